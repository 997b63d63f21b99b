"""Engines, rewards and gradients that fail: each has a defined outcome, one line in the log, and loses nothing."""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from flow import MODEL, fit, make_data, make_module, parameters
from launch import finish, start
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lit_async_rl.callbacks import GradientClipping, RolloutTape, SaveOnFailure, SaveOnSigterm, SkipNonFinite
from lit_async_rl.checkpoint_io import check_writable
from lit_async_rl.embedded_engine import EmbeddedEngine
from lit_async_rl.engine import GenerationRequest, SamplingParams
from lit_async_rl.episodes import EpisodeEngine
from lit_async_rl.errors import NonFiniteError, ProducerError, StalledError
from lit_async_rl.rewards import IsolatedReward
from lit_async_rl.simulated_engine import Constant, SimulatedEngine
from lit_async_rl.tape import Tape
from lit_async_rl.tasks.calculator import Calculator
from lit_async_rl.weights import stream_weights

pytestmark = pytest.mark.timeout(120)


class Watch(pl.Callback):
    """Which groups were trained on, and that each was within the bound."""

    def __init__(self) -> None:
        self.trained: list[int] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        for group in trainer.datamodule.last_step_groups:
            self.trained.append(group.index)
            oldest = min(min(rollout.versions) for rollout in group.rollouts)
            assert pl_module.stabilizer_signals["version"] - oldest <= trainer.datamodule.max_staleness


class FailingEngine(EmbeddedEngine):
    """Fails in one method when some tokens were sampled, as often as `failures` says, counted over all restarts."""

    where, how, failures = "_step", "crash", [0]

    def _maybe_fail(self, where: str) -> None:
        if where == self.where and self.failures[0] > 0 and self.num_tokens > 100:
            self.failures[0] -= 1
            if self.how == "hang":
                time.sleep(1e6)
            raise {"crash": KeyError("broken"), "out of memory": torch.OutOfMemoryError("CUDA out of memory.")}[
                self.how
            ]

    def _step(self):
        self._maybe_fail("_step")
        return super()._step()

    def poll(self, timeout_s):
        self._maybe_fail("poll")
        return super().poll(timeout_s)

    def submit(self, requests):
        self._maybe_fail("submit")
        super().submit(requests)

    def load_weights(self, version, weights):
        self._maybe_fail("load_weights")
        super().load_weights(version, weights)


def failing(where: str, how: str, times: int, **changes) -> EmbeddedEngine:
    kind = type("FailingEngine", (FailingEngine,), {"where": where, "how": how, "failures": [times]})
    return kind(**{"update_timeout_s": 2.0, **changes})


def said(caplog, text: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if text in record.getMessage()]


@pytest.mark.parametrize(
    ("where", "how", "in_flight"),
    [
        ("_step", "hang", True),
        ("poll", "hang", False),
        ("_step", "crash", False),
        ("submit", "crash", True),
        ("load_weights", "crash", True),
    ],
)
def test_an_engine_that_fails_is_restarted_and_nothing_is_lost(where, how, in_flight, caplog, monkeypatch):
    monkeypatch.setattr("lit_async_rl.embedded_engine.CLOSE_S", 0.2)
    engine = failing(where, how, 1, in_flight_weight_updates=in_flight)
    data, watch = make_data(engine=engine, groups_per_step=2, max_staleness=2, rollout_timeout_s=2.0), Watch()
    module = make_module()
    fit(module, data, 8, [watch])
    assert module.version == 8
    assert len(set(watch.trained)) == len(watch.trained) == 16
    assert set(range(16)) <= set(watch.trained) | set(data.admission.deadlines)
    lines = said(caplog, "the engine was restarted (1 of data.engine_restarts=3 in a row)")
    assert len(lines) == 1
    assert ("StalledError" if how == "hang" else "KeyError") in lines[0]
    assert data.engine is not engine
    assert data.stats().num_tokens > 100


def test_completions_that_have_come_are_kept_when_the_engine_is_restarted():
    class Half(SimulatedEngine):
        """Hands completions out one by one; the first one breaks in the middle of a group."""

        given, breaks = [], [True]

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.waiting = []

        def poll(self, timeout_s):
            if self.breaks and len(self.given) == 3:
                self.breaks.clear()
                raise RuntimeError("broke")
            self.waiting = self.waiting or super().poll(timeout_s)
            found, self.waiting = self.waiting[:1], self.waiting[1:]
            self.given.extend(found)
            return found

    data, seen = make_data(engine=Half(Constant(0.01), num_slots=1), max_staleness=0, reward=lambda *_: 1.0), {}

    class Keep(pl.Callback):
        def on_train_batch_end(self, trainer, *_):
            seen.update({group.index: group for group in trainer.datamodule.last_step_groups})

    fit(make_module(), data, 1, [Keep()])
    assert not Half.breaks
    assert len(seen[0].rollouts) == 4
    assert sum(c.request_id == 0 for c in Half.given) == 4, "only what was lacking is sampled again"


def test_out_of_memory_halves_the_slots(caplog):
    data = make_data(engine=failing("_step", "out of memory", 2, num_slots=32), groups_per_step=2)
    fit(make_module(), data, 6)
    assert data.engine.num_slots == 8
    assert said(caplog, "data.engine.num_slots is now 16 instead of 32")


def test_an_engine_that_fails_again_and_again_ends_the_run_with_a_checkpoint_that_goes_on(tmp_path, caplog):
    data, watch = make_data(engine=failing("_step", "crash", 99), groups_per_step=2, max_staleness=3), Watch()
    keep = ModelCheckpoint(tmp_path, every_n_train_steps=1000)
    with pytest.raises(ProducerError, match="broken"):
        fit(make_module(), data, 30, [watch, keep, SaveOnFailure()], enable_checkpointing=True)
    assert said(caplog, "the engine fails still after data.engine_restarts=3 in a row")
    finished, path = set(data._source._producer.book.finished), tmp_path / "failed.ckpt"
    saved = torch.load(path, weights_only=True)["RolloutDataModule"]["groups"]["groups"]
    assert {int(row[0]) for row in saved if row[4]} == finished
    rest = Watch()
    fit(make_module(), make_data(groups_per_step=2, max_staleness=3), 12, [rest], ckpt_path=str(path))
    everything = watch.trained + rest.trained
    assert len(set(everything)) == len(everything) == 24
    assert finished <= set(everything)


@pytest.mark.slow
def test_with_several_ranks_all_send_their_weights_to_the_new_engine():
    processes = start(Path(__file__).parent / "distributed_faults.py", [], 2)
    first, _ = finish(processes, 100.0)
    assert [process.returncode for process in processes] == [0, 0], first[-3000:]
    assert first.count("the engine was restarted") == 2


def test_with_no_restarts_the_first_failure_ends_the_run():
    data = make_data(engine=failing("_step", "crash", 1), groups_per_step=2, engine_restarts=0)
    with pytest.raises(ProducerError, match="broken"):
        fit(make_module(), data, 30)
    with pytest.raises(ValueError, match=r"data\.engine_restarts must be >= 0, got -1"):
        make_data(engine_restarts=-1)


def test_nobody_waits_for_ever_for_an_engine_that_hangs_in_a_token(monkeypatch):
    monkeypatch.setattr("lit_async_rl.embedded_engine.CLOSE_S", 0.2)
    engine = failing("_step", "hang", 1, update_timeout_s=0.3)
    engine.setup(MODEL)
    weights = dict(stream_weights(make_module().policy))
    engine.load_weights(0, weights.items())
    request = GenerationRequest(id=0, prompt_ids=(5, 6), num_samples=40, sampling=SamplingParams(max_tokens=30))
    engine.submit([request])
    poll = threading.Thread(target=lambda: [engine.poll(9.0) for _ in range(9)], daemon=True)
    poll.start()
    while engine.num_tokens <= 100:
        time.sleep(0.01)
    time.sleep(0.2)
    calls = {
        "submit": lambda: engine.submit([request]),
        "load_weights": lambda: engine.load_weights(1, weights.items()),
        "partial_completions": engine.partial_completions,
        "abort": lambda: engine.abort([0]),
    }
    for call in calls.values():
        with pytest.raises(StalledError, match=r"data\.engine\.update_timeout_s=0\.3"):
            call()
    engine.close()
    assert poll.is_alive()


def test_a_fresh_engine_has_the_arguments_of_the_first_also_inside_another():
    inner = EmbeddedEngine(num_slots=7, seed=3)
    outer = EpisodeEngine(inner, environment=Calculator(), max_turns=5)
    again = outer.fresh()
    assert isinstance(again, EpisodeEngine)
    assert (again.max_turns, again.environment, again.engine.seed) == (5, outer.environment, 3)
    assert again.engine is not inner
    assert [outer.fresh(out_of_memory=True).engine.num_slots, again.engine.num_slots] == [3, 7]


HANGS_ONCE = """
import pathlib

def judge(prompt, completion):
    marker = pathlib.Path(__file__).with_name("was_here")
    if not marker.exists():
        marker.touch()
        while True:
            pass
    return 1.0
"""


def test_a_reward_that_hangs_in_its_own_process_is_ended_and_tried_again(tmp_path, monkeypatch, caplog):
    (tmp_path / "hangs_once.py").write_text(HANGS_ONCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    reward = IsolatedReward("hangs_once.judge", timeout_s=0.7)
    settings = dict(reward_tries=2, rollout_timeout_s=100.0, reward_timeout_s=90.0)
    data, watch = make_data(reward=reward, groups_per_step=2, max_staleness=1, **settings), Watch()
    fit(make_module(), data, 4, [watch])
    assert sorted(watch.trained) == list(range(8)), "no group was given up"
    (line,) = said(caplog, "try 1 of reward_tries=2 failed, there is another")
    assert "SIGALRM" in line


def test_a_stopped_process_takes_nobody_for_hung():
    code = """
import sys, time, logging
from lit_async_rl import clocks
clocks.STILL_S = 0.6
clock = clocks.AwakeClock()
began, awake = time.monotonic(), clock.now()
print("ready", flush=True)
while time.monotonic() - began < 3.0:
    time.sleep(0.05)
print(time.monotonic() - began, clock.now() - awake)
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGSTOP)
        time.sleep(1.5)
        process.send_signal(signal.SIGCONT)
        out, err = process.communicate(timeout=30)
    by_the_wall, awake = map(float, out.split())
    assert by_the_wall - awake > 1.2
    assert "this process stood still for" in err


class NaNs(pl.Callback):
    """In the gradients of some steps; notes weights, moments and versions after each."""

    def __init__(self, steps):
        self.steps, self.seen = steps, []

    def on_after_backward(self, trainer, pl_module):
        if trainer.global_step in self.steps:
            next(p.grad for p in pl_module.parameters() if p.grad is not None).view(-1)[0] = torch.nan

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        moments = [value.clone() for state in trainer.optimizers[0].state.values() for value in state.values()]
        self.seen.append((parameters(pl_module).clone(), torch.cat([m.flatten() for m in moments]), pl_module.version))


@pytest.mark.parametrize("guard", [SkipNonFinite, GradientClipping])
def test_a_gradient_with_nan_changes_neither_weights_nor_moments_nor_version(guard, caplog):
    nans = NaNs({2, 3})
    fit(make_module(), make_data(groups_per_step=2), 6, [nans, guard()])
    assert [version for *_, version in nans.seen] == [1, 2, 2, 2, 3, 4]
    for name in range(2):
        assert torch.equal(nans.seen[1][name], nans.seen[3][name])
        assert not torch.equal(nans.seen[3][name], nans.seen[4][name])
    assert nans.seen[-1][0].isfinite().all()
    assert len(said(caplog, "the gradient contains NaN or infinity, so this update is dropped")) == 2


class Terminate(pl.Callback):
    """SIGTERM in the middle of a step, or after all other callbacks have seen its end."""

    def __init__(self, where: str) -> None:
        self.where = where

    def on_before_backward(self, trainer, pl_module, loss):
        if self.where == "in the first micro-batch" and trainer.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        if self.where == "while saving":
            self.where = "done"
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("where", ["in the first micro-batch", "while saving"])
def test_whenever_sigterm_comes_the_run_saves_and_goes_on(where, tmp_path, caplog):
    keep = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=3)
    callbacks, settings = [Terminate(where), SaveOnSigterm(), keep], dict(groups_per_step=2, micro_batches_per_step=2)
    with contextlib.suppress(SIGTERMException):
        fit(make_module(), make_data(**settings), 30, callbacks, enable_checkpointing=True)
    (line,) = said(caplog, "SIGTERM: saved")
    step = 2 if where == "in the first micro-batch" else 3
    assert f"after step {step}" in line
    rest = Watch()
    fit(make_module(), make_data(**settings), 8, [rest], ckpt_path=str(tmp_path / "last.ckpt"))
    assert len(set(rest.trained)) == 2 * (8 - step)


def test_too_many_nans_in_a_row_end_the_run_with_a_checkpoint(tmp_path, caplog):
    keep = ModelCheckpoint(tmp_path, every_n_train_steps=1000)
    guards = [NaNs(range(2, 99)), SkipNonFinite(max_in_a_row=2), keep, SaveOnFailure()]
    module, watch, tape = make_module(), Watch(), RolloutTape(str(tmp_path / "tape"))
    with pytest.raises(NonFiniteError, match=r"3 updates in a row .* SkipNonFinite\.max_in_a_row=2"):
        fit(module, make_data(groups_per_step=2), 99, [*guards, watch, tape], enable_checkpointing=True)
    resumed, rest = make_module(), Watch()
    fit(resumed, make_data(groups_per_step=2), 7, [rest], ckpt_path=str(tmp_path / "failed.ckpt"))
    assert not set(watch.trained) & set(rest.trained)
    assert (len(watch.trained), len(rest.trained)) == (10, 4)
    assert [step.step for step in Tape(tmp_path / "tape").steps()] == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match=r"SkipNonFinite\.max_in_a_row must be >= 0"):
        SkipNonFinite(max_in_a_row=-1)


def test_what_is_slow_is_said_before_it_is_cut_off(caplog):
    def slowly(prompt, completion):
        if not said(caplog, "is slow"):
            time.sleep(0.7)
        return 1.0

    with caplog.at_level(logging.WARNING):
        fit(make_module(), make_data(reward=slowly, reward_timeout_s=1.0, reward_tries=9, group_size=1), 2)
    assert said(caplog, "of reward_timeout_s=1")


def test_an_unwritable_folder_is_named_and_left_alone(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"the tape's folder cannot be written to: Not a directory.*file/tape"):
        check_writable(tmp_path / "file" / "tape", "the tape's folder")
    check_writable(tmp_path / "new" / "tape", "the tape's folder")
    assert list((tmp_path / "new" / "tape").iterdir()) == []
