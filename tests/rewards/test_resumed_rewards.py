"""A resume with another reward, other answers or another environment samples again, or keeps rewards if asked."""

import functools
import importlib
import linecache
import shutil
import sys

import lightning.pytorch as pl
import pytest
from flow import fit, make_data, make_module

import lit_async_rl as rl
from lit_async_rl.prompts.stream import UsablePrompts
from lit_async_rl.rewards.scorer import reward_identity, without_code
from lit_async_rl.rollouts.resume import _is_same


def constant(prompt, completion, value=1.0):
    """A reward with a setting."""
    return value + 0.01 * len(completion)


class Scale:
    """A reward whose setting is nested."""

    def __init__(self, settings):
        self.settings = settings

    def __call__(self, prompt, completion):
        return self.settings["value"] + 0.01 * len(completion)


class Episode(rl.Episode):
    def __init__(self, value):
        self.value = value

    async def step(self, completion):
        return rl.Observation(reward=self.value + 0.01 * len(completion), done=True)


class Room(rl.Environment):
    """An environment of one turn, with a setting."""

    def __init__(self, value):
        self.value = value

    async def start(self, prompt):
        return Episode(self.value)


def data_of(kind, value, keep):
    answers = [str(value) if kind == "answers" else "1"] * 12
    prompts = [{"prompt": f"{n}=", "answer": answer} for n, answer in enumerate(answers, 10)]
    rewards = {
        "reward": Scale({"value": value, "others": [1, 2]}),
        "answers": lambda prompt, completion: float(prompt.answer) + 0.01 * len(completion),
        "environment": None,
    }
    settings = dict(engine=rl.EpisodeEngine(rl.EmbeddedEngine(), Room(value))) if kind == "environment" else {}
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


@pytest.mark.parametrize("keep", [False, True], ids=["anew", "keep"])
@pytest.mark.parametrize("kind", ["reward", "answers", "environment"])
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
        assert "groups of the checkpoint are sampled anew" in caplog.text
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
    assert "sampled anew" not in caplog.text
    fit(make_module(), data("5"), 4, [], str(tmp_path / "last.ckpt"))
    assert "the digest of the answers of the checkpoint's groups is" in caplog.text
    assert "groups of the checkpoint are sampled anew" in caplog.text


CODE = """
def short(prompt, completion):
    return {value} + 0.01 * len(completion)  # {comment}
"""


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
    assert "sampled anew" not in caplog.text
    fit(make_module(), data(2.0, "as it was"), 4, [], str(tmp_path / "last.ckpt"))
    assert "the code of data.reward, edited_reward.short, has changed" in caplog.text
    assert "groups of the checkpoint are sampled anew" in caplog.text


def test_identities_of_checkpoints_that_know_no_code_are_compared_without_it():
    known = reward_identity(constant)
    assert " code " in known
    assert _is_same("data.reward", known, without_code(known))
    assert not _is_same("data.reward", known, "another")
    assert not _is_same("data.reward", known, known[:-1] + ("0" if known[-1] != "0" else "1"))
    assert " code " not in reward_identity(rl.exact_match), "of this package: releases say what changes"


def test_the_same_settings_keep_their_groups(tmp_path, caplog):
    data = data_of("reward", 1.0, keep=False)

    class Save(pl.Callback):
        def on_train_end(self, trainer, module):
            trainer.save_checkpoint(tmp_path / "last.ckpt")

    fit(make_module(), data, 2, [Save()])
    fit(make_module(), data_of("reward", 1.0, keep=False), 4, [], str(tmp_path / "last.ckpt"))
    assert "sampled anew" not in caplog.text


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
    assert ("data.scoring.special_tokens is 'all' and was 'none', and saved rewards are kept" in caplog.text) == keep
    assert ("the pass rates of prompts are measured anew" in caplog.text) == (not keep)
