"""Checkpoints hold all that was admitted: nothing is trained on twice, nothing is lost, the bound holds on."""

import logging
import random
import threading
import time

import lightning.pytorch as pl
import pytest
import torch
from disk import full_disk
from flow import barrier_engine, fit, make_data, make_module, parameters
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_async_rl.engines.base import SamplingParams
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.errors import ProducerError, RewardError, StalledError
from lit_async_rl.problem import Prompt
from lit_async_rl.rollouts.group_book import unpack_groups
from lit_async_rl.scheduling.admission import Admission
from lit_async_rl.training.checkpoint_io import AtomicCheckpointIO, check_same_model


class Watch(pl.Callback):
    """What each step was trained on."""

    def __init__(self) -> None:
        self.trained: list[tuple[int, str, int]] = []  # index, prompt, staleness

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        for group in trainer.datamodule.last_step_groups:
            oldest = min(min(rollout.versions) for rollout in group.rollouts)
            version = int(pl_module.stabilizer_signals["version"])
            self.trained.append((group.index, group.prompt.text, version - oldest))


def saving(folder) -> ModelCheckpoint:
    return ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)


@pytest.mark.slow
@pytest.mark.parametrize(("lag", "sync_steps", "at"), [(0, 1, 2), (2, 1, 3), (1, 2, 3)])
def test_a_resumed_fixed_lag_run_ends_bit_for_bit_where_the_unbroken_one_does(tmp_path, lag, sync_steps, at):
    def data():
        schedule = dict(schedule="fixed_lag", max_staleness=lag, weight_sync_steps=sync_steps)
        return make_data(**schedule, groups_per_step=2, engine=barrier_engine())

    whole, unbroken = make_module(), Watch()
    fit(whole, data(), 6, [unbroken, saving(tmp_path)], enable_checkpointing=True)
    resumed, rest = make_module(), Watch()
    fit(resumed, data(), 6, [rest], ckpt_path=str(tmp_path / f"step={at}.ckpt"))
    assert rest.trained == unbroken.trained[2 * at :]
    assert torch.equal(parameters(resumed), parameters(whole))
    assert resumed.version == whole.version


@pytest.mark.slow
def test_a_checkpoint_that_is_saved_after_the_run_says_that_it_does_not_repeat_it(tmp_path, caplog):
    for schedule in ("fixed_lag", "free"):
        data = make_data(schedule=schedule, max_staleness=1, groups_per_step=2)
        trainer = fit(make_module(), data, 2, enable_checkpointing=True, default_root_dir=tmp_path)
        trainer.save_checkpoint(tmp_path / f"{schedule}.ckpt")
    (line,) = [record.getMessage() for record in caplog.records if "bit for bit" in record.getMessage()]
    assert "after the engine had closed" in line


@pytest.mark.slow
@pytest.mark.parametrize("in_flight", [True, False])
def test_after_a_resume_every_prompt_is_trained_on_once_and_within_the_bound(tmp_path, in_flight):
    chance = random.Random(0)

    def data():
        engine = EmbeddedEngine(num_slots=7, in_flight_weight_updates=in_flight)
        return make_data(max_staleness=2, groups_per_step=2, engine=engine, reward=slowly)

    def slowly(prompt, completion):
        time.sleep(chance.random() * 0.01)
        return chance.random()

    first, second = Watch(), Watch()
    fit(make_module(), data(), 4, [first, saving(tmp_path)], enable_checkpointing=True)
    before = first.trained[: 2 * 3]
    resumed = data()
    fit(make_module(), resumed, 12, [second], ckpt_path=str(tmp_path / "step=3.ckpt"))
    indices = [index for index, _, _ in before + second.trained]
    prompts = [prompt for _, prompt, _ in before + second.trained]
    assert len(set(indices)) == len(indices) == 24
    expected = {resumed.stream.at(n).text for n in range(24 + 2 * 3)}
    assert set(prompts) <= expected
    assert {resumed.stream.at(n).text for n in range(18)} <= set(prompts), "none was left behind"
    assert max(staleness for _, _, staleness in second.trained) <= 2


class Interrupted(EmbeddedEngine):
    """Samples one group, and part of a completion of the next."""

    num_finished = 0

    def poll(self, timeout_s):
        if self.num_finished >= 4 and any(len(c.token_ids) > 3 for c in self.partial_completions()):
            time.sleep(0.01)
            return []
        finished = super().poll(0.0)
        self.num_finished += len(finished)
        return finished


@pytest.mark.slow
def test_partial_completions_go_on_from_where_they_were(tmp_path):
    class Log(pl.Callback):
        def __init__(self):
            self.worst = 0.0

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            log_ratio = pl_module.stabilizer_signals["log_ratio"][batch.loss_mask]
            self.worst = max(self.worst, float(log_ratio.abs().max()))

    def data(engine):
        sampling = SamplingParams(max_tokens=60)
        return make_data(max_staleness=3, groups_per_step=1, engine=engine(num_slots=1), sampling=sampling)

    still = dict(learning_rate=1e-12)
    fit(make_module(**still), data(Interrupted), 1, [saving(tmp_path)], enable_checkpointing=True)
    saved = torch.load(tmp_path / "step=1.ckpt", weights_only=True)["RolloutDataModule"]
    groups = {group.index: group for group in unpack_groups(saved["groups"], lambda _: Prompt(text="p"))}
    partial = [c for group in groups.values() for c in group.rollouts.values() if c.finish_reason == "abort"]
    assert partial, "something was being sampled"
    log, resumed, seen = Log(), data(EmbeddedEngine), {}

    class Keep(pl.Callback):
        def on_train_batch_end(self, trainer, *_):
            seen.update({group.index: group for group in trainer.datamodule.last_step_groups})

    fit(make_module(**still), resumed, 6, [log, Keep()], ckpt_path=str(tmp_path / "step=1.ckpt"))
    for completion in partial:
        rollout = seen[completion.request_id].rollouts[completion.sample_index]
        length = len(completion.token_ids)
        assert rollout.token_ids[:length] == completion.token_ids
        assert rollout.logprobs[:length] == completion.logprobs
        assert len(rollout.token_ids) <= 60
    assert log.worst < 1e-4, "log-probabilities are those of the policy, also where two parts meet"


@settings(max_examples=30)
@given(st.integers(1, 4), st.integers(0, 5), st.integers(1, 4), st.integers(0, 5), st.integers(0, 9), st.data())
def test_restored_groups_keep_the_bound_whatever_was_changed(groups, bound, new_groups, new_bound, rounds, data):
    admission = Admission(groups, bound)
    admitted_in: dict[int, int] = {}

    def admit(admission):
        for _ in range(admission.num_admissible):
            admitted_in[admission.admit()] = admission.round

    for _ in range(rounds):
        admit(admission)
        while admission.num_left_in_round:
            admission.finish(data.draw(st.sampled_from(sorted(admission.deadlines))))
            if (index := admission.choose()) is not None:
                admission.take(index)
        admission.advance()
    admit(admission)
    resumed = Admission(new_groups, new_bound)
    kept = resumed.restore(admission.state_dict(), admission.deadlines)
    if (new_groups, new_bound) == (groups, bound):
        assert kept == set(admission.deadlines)
    for _ in range(20):
        admit(resumed)
        while resumed.num_left_in_round:
            for index in resumed.deadlines:
                resumed.finish(index)
            index = resumed.choose()
            assert index is not None, "no deadlock"
            assert resumed.round - admitted_in[index] <= max(new_bound, 0)
            resumed.take(index)
        resumed.advance()
    assert not kept & set(resumed.deadlines), "all of them were trained on"


def test_a_full_disk_and_a_crash_while_saving_leave_the_old_checkpoint(tmp_path, caplog):
    io, path = AtomicCheckpointIO(), tmp_path / "one.ckpt"
    io.save_checkpoint({"n": torch.zeros(10)}, path)
    with full_disk(50_000), caplog.at_level(logging.WARNING):
        io.save_checkpoint({"n": torch.ones(100_000)}, path)
    assert "disk is full" in caplog.text
    io.remove_checkpoint(path)
    assert torch.load(path, weights_only=True)["n"].sum() == 0, "nothing was overwritten, nothing removed"
    assert [file.name for file in tmp_path.iterdir()] == ["one.ckpt"], "nothing was left behind"
    with pytest.raises(AttributeError):
        io.save_checkpoint({"n": lambda: None}, path)
    assert torch.load(path, weights_only=True)["n"].sum() == 0
    io.save_checkpoint({"n": torch.ones(3)}, path)
    io.remove_checkpoint(path)
    assert not path.exists()


def test_the_checkpoint_of_another_model_is_refused_by_name():
    with pytest.raises(ValueError, match=r"another model: b has the shape None in the checkpoint and \(2,\)"):
        check_same_model({"a": torch.zeros(3)}, {"a": torch.zeros(3), "b": torch.zeros(2)})


@pytest.mark.slow
def test_settings_that_cannot_go_on_are_refused_and_others_sample_anew(tmp_path, caplog):
    fit(make_module(), make_data(groups_per_step=2, max_staleness=0), 1, [saving(tmp_path)], enable_checkpointing=True)
    path = str(tmp_path / "step=1.ckpt")
    with pytest.raises(ValueError, match=r"data\.seed is 5, and was 0"):
        fit(make_module(), make_data(groups_per_step=2, max_staleness=0, seed=5), 2, ckpt_path=path)
    watch = Watch()
    changed = make_data(groups_per_step=2, max_staleness=0, group_size=3)
    with caplog.at_level(logging.WARNING):
        fit(make_module(), changed, 2, [watch], ckpt_path=path)
    assert "data.group_size is 3 and was 4, so 2 groups of the checkpoint are sampled again" in caplog.text
    assert [prompt for _, prompt, _ in watch.trained] == [changed.stream.at(n).text for n in (2, 3)]


def test_a_prompt_that_cannot_be_scored_is_left_out_and_another_takes_its_place(caplog):
    data, watch, done = make_data(groups_per_step=2, reward_tries=2, reward_timeout_s=0.3, max_staleness=1), Watch(), []
    bad = {data.stream.at(1).text: "raises", data.stream.at(3).text: "hangs"}

    def reward(prompt, completion):
        if bad.get(prompt.text) == "raises":
            raise KeyError("gold")
        if bad.get(prompt.text) == "hangs":
            time.sleep(5.0)
        done.append(prompt.text)
        return float(len(done) % 2)

    data.reward = reward
    with caplog.at_level(logging.WARNING):
        fit(make_module(), data, 5, [watch])
    prompts = [prompt for _, prompt, _ in watch.trained]
    assert len(set(prompts)) == 10
    assert not set(bad) & set(prompts)
    assert max(staleness for _, _, staleness in watch.trained) <= 1
    said = [
        record.message for record in caplog.records if "calls for it failed (data.scoring.tries=2" in record.message
    ]
    assert len(said) == 2
    assert any("KeyError" in line for line in said)
    assert any("did not return within data.scoring.timeout_s=0.3" in line for line in said)


def test_a_save_that_waits_for_scores_that_never_come_raises_and_writes_nothing(tmp_path):
    """A checkpoint of a run in order holds all groups under way; without their scores the run could not be repeated."""
    hangs, released, errors = threading.Event(), threading.Event(), []

    def reward(prompt, completion):
        if hangs.is_set():
            released.wait(60)
        return float(len(completion))

    class Save(pl.Callback):
        def on_train_batch_start(self, *_):
            hangs.set()

        def on_train_batch_end(self, trainer, *_):
            try:
                trainer.save_checkpoint(tmp_path / "incomplete.ckpt")
            except Exception as error:
                errors.append(error)
                raise
            finally:
                released.set()

    data = make_data(
        reward=reward,
        reward_timeout_s=0.5,
        max_staleness=1,
        schedule="fixed_lag",
        engine=barrier_engine(),
        groups_per_step=1,
        group_size=2,
    )
    with pytest.raises((ProducerError, StalledError, RewardError)):
        fit(make_module(), data, 6, [Save()])
    assert len(errors) == 1
    assert not (tmp_path / "incomplete.ckpt").exists()
