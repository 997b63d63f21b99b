"""A resume with another reward, other answers or another environment samples again, or keeps rewards if asked."""

import dataclasses
import functools
import importlib
import linecache
import shutil
import sys

import lightning.pytorch as pl
import pytest
from flow import fit, make_data, make_module
from lightning.pytorch.callbacks import LambdaCallback

import lit_async_rl as rl
from lit_async_rl.prompts.stream import UsablePrompts
from lit_async_rl.rollouts.resume import _is_same
from lit_async_rl.utils.identity import reward_identity, without_code


def constant(prompt, completion, value=1.0):
    """A reward with a setting."""
    return value + 0.01 * len(completion)


class Scale:
    """A reward whose setting is nested, and counts its calls."""

    def __init__(self, settings):
        self._settings = settings
        self._num_calls = 0

    def __call__(self, prompt, completion):
        self._num_calls += 1
        return self._settings["value"] + 0.01 * len(completion)


def closed_over(value):
    """A reward that closes over its setting."""
    return lambda prompt, completion: value + 0.01 * len(completion)


class Shift(rl.GroupFilter):
    """A filter that changes rewards."""

    def __init__(self, by):
        self._by = by

    def __call__(self, group):
        return dataclasses.replace(
            group, rollouts=tuple(one.add_reward(self._by, part="shift") for one in group.rollouts)
        )


class Episode(rl.Episode):
    def __init__(self, value):
        self.value = value

    async def step(self, completion):
        return rl.Observation(reward=self.value + 0.01 * len(completion), done=True)


class Room(rl.Environment):
    """An environment of one turn, with a setting."""

    def __init__(self, value):
        self._value = value
        self._num_started = 0

    async def start(self, prompt):
        self._num_started += 1
        return Episode(self._value)


def data_of(kind, value, keep):
    answers = [str(value) if kind == "answers" else "1"] * 12
    prompts = [{"prompt": f"{n}=", "answer": answer} for n, answer in enumerate(answers, 10)]
    rewards = {
        "reward": Scale({"value": value, "others": [1, 2]}),
        "answers": lambda prompt, completion: float(prompt.answer) + 0.01 * len(completion),
        "environment": None,
        "filter": closed_over(0.0),
    }
    settings = dict(engine=rl.EpisodeEngine(rl.EmbeddedEngine(), Room(value))) if kind == "environment" else {}
    settings |= dict(filters=[Shift(value)]) if kind == "filter" else {}
    return make_data(
        prompts=prompts,
        reward=rewards[kind],
        groups_per_step=1,
        group_size=2,
        max_staleness=3,
        sampling=rl.SamplingParams(max_tokens=4),
        resume_rewards="keep" if keep else "anew",
        **settings,
    )


KINDS = "reward", "answers", "environment", "filter"


@pytest.mark.parametrize("keep", [False, True], ids=["anew", "keep"])
@pytest.mark.parametrize("kind", KINDS)
def test_finished_groups_do_not_keep_what_another_reward_gave_unless_asked(kind, keep, tmp_path, caplog):
    seen = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            seen.append(float(batch.rewards.mean()))

        def on_train_end(self, trainer, module):
            trainer.save_checkpoint(tmp_path / "last.ckpt")

    first = data_of(kind, 1.0, keep)
    fit(make_module(), first, 2, [Watch()])
    assert all(value < 2 for value in seen)
    seen.clear()
    fit(make_module(), data_of(kind, 5.0, keep), 8, [Watch()], str(tmp_path / "last.ckpt"))
    if keep:
        assert "saved rewards are kept (data.scoring.resume_rewards: keep)" in caplog.text
        assert seen[-1] > 5
    else:
        assert "groups of the checkpoint are sampled again" in caplog.text
        assert all(value > 5 for value in seen), seen


def test_another_answer_of_a_finished_group_is_seen_among_prompts_of_which_a_sample_is_compared(
    tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr("lit_async_rl.prompts.stream.NUM_DIGEST_SAMPLES", 1)
    monkeypatch.setattr(UsablePrompts.check, "__defaults__", (5,))

    class Save(pl.Callback):
        def on_train_end(self, trainer, module):
            trainer.save_checkpoint(tmp_path / "last.ckpt")

    def data(answer):
        prompts = [{"prompt": f"{n}=", "answer": "1" if n == 10 else answer} for n in range(10, 22)]
        reward = functools.partial(constant, value=0.5)
        return make_data(prompts=prompts, reward=reward, groups_per_step=1, group_size=2, max_staleness=3)

    fit(make_module(), data("1"), 2, [Save()])
    fit(make_module(), data("1"), 3, [], str(tmp_path / "last.ckpt"))
    assert "of the checkpoint are sampled again" not in caplog.text
    fit(make_module(), data("5"), 4, [], str(tmp_path / "last.ckpt"))
    assert "the digest of the answers of the checkpoint's groups is" in caplog.text
    assert "groups of the checkpoint are sampled again" in caplog.text


CODE = """
def short(prompt, completion):
    return {value} + 0.01 * len(completion)  # {comment}
"""


@pytest.mark.slow
def test_a_reward_whose_code_was_edited_is_another_one(tmp_path, caplog, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))

    class Save(pl.Callback):
        def on_train_end(self, trainer, module):
            trainer.save_checkpoint(tmp_path / "last.ckpt")

    def data(value, comment):
        (tmp_path / "edited_reward.py").write_text(CODE.format(value=value, comment=comment))
        sys.modules.pop("edited_reward", None)
        importlib.invalidate_caches()
        linecache.clearcache()
        shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)
        reward = importlib.import_module("edited_reward").short
        return make_data(reward=reward, groups_per_step=1, group_size=2, max_staleness=3)

    fit(make_module(), data(1.0, "as it was"), 2, [Save()])
    fit(make_module(), data(1.0, "with another comment"), 3, [], str(tmp_path / "last.ckpt"))
    assert "of the checkpoint are sampled again" not in caplog.text
    fit(make_module(), data(2.0, "as it was"), 4, [], str(tmp_path / "last.ckpt"))
    assert "the code of data.reward, edited_reward.short, or a value that it refers to, has changed" in caplog.text
    assert "groups of the checkpoint are sampled again" in caplog.text


def test_identities_of_checkpoints_that_know_no_code_are_compared_without_it():
    known = reward_identity(constant)
    assert " code " in known
    assert _is_same("data.reward", known, without_code(known))
    assert not _is_same("data.reward", known, "another")
    assert not _is_same("data.reward", known, known[:-1] + ("0" if known[-1] != "0" else "1"))
    assert " code " not in reward_identity(rl.exact_match), "of this package: releases say what changes"


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_settings_keep_their_groups(kind, tmp_path, caplog):
    data = data_of(kind, 1.0, keep=False)

    class Save(pl.Callback):
        def on_train_end(self, trainer, module):
            trainer.save_checkpoint(tmp_path / "last.ckpt")

    fit(make_module(), data, 2, [Save()])
    fit(make_module(), data_of(kind, 1.0, keep=False), 4, [], str(tmp_path / "last.ckpt"))
    assert "of the checkpoint are sampled again" not in caplog.text
    assert "finished groups are kept" in caplog.text


@pytest.mark.slow
def test_a_reward_that_cannot_be_compared_is_sampled_again_and_named(tmp_path, caplog):
    path = tmp_path / "last.ckpt"

    def fit_to(step, ckpt=None):
        reward = Scale({"value": 1.0, "next": (n for n in range(9))})
        save = LambdaCallback(on_train_end=lambda trainer, _: trainer.save_checkpoint(path))
        fit(make_module(), make_data(reward=reward, groups_per_step=1, max_staleness=3), step, [save], ckpt)

    fit_to(2)
    fit_to(3, str(path))
    named = "data.reward, test_resumed_rewards.Scale(_settings, _num_calls: "
    assert named in caplog.text
    assert "cannot be compared with that of the checkpoint for its Scale._settings['next'] (builtins" in caplog.text


def test_another_environment_with_cut_turns_is_another_one():
    engines = [rl.EpisodeEngine(rl.EmbeddedEngine(), Room(1.0), step_cut_turns=cut) for cut in (False, True)]
    assert engines[0].scoring_identity != engines[1].scoring_identity


@pytest.mark.slow
def test_another_threshold_of_success_measures_pass_rates_anew_and_keeps_the_groups(tmp_path, caplog):
    path = tmp_path / "last.ckpt"
    save = LambdaCallback(on_train_end=lambda trainer, _: trainer.save_checkpoint(path))
    settings = dict(reward=closed_over(1.0), groups_per_step=1, max_staleness=3)
    fit(make_module(), make_data(reward_success=0.5, **settings), 2, [save])
    fit(make_module(), make_data(reward_success=0.9, **settings), 3, [], str(path))
    assert "the pass rates of prompts are measured again" in caplog.text
    assert "of the checkpoint are sampled again" not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("keep", [False, True], ids=["anew", "keep"])
def test_other_texts_for_the_reward_count_as_another_reward(keep, tmp_path, caplog):
    path = tmp_path / "last.ckpt"

    class Save(pl.Callback):
        def on_train_end(self, trainer, module):
            trainer.save_checkpoint(path)

    def data(special_tokens):
        scoring = dict(special_tokens=special_tokens, resume_rewards="keep" if keep else "anew")
        return make_data(groups_per_step=1, group_size=2, max_staleness=3, **scoring)

    fit(make_module(), data("none"), 2, [Save()])
    fit(make_module(), data("all"), 3, [], str(path))
    assert ("data.scoring.special_tokens is 'all' and was 'none'), but saved rewards are kept" in caplog.text) == keep
    assert ("the pass rates of prompts are measured again" in caplog.text) == (not keep)
