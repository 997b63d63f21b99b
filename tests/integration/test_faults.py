"""Rewards, signals and folders that fail: each has a defined outcome, one line in the log, and loses nothing."""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time

import lightning.pytorch as pl
import pytest
from disk import full_disk
from failing_engines import Watch, failing, said
from flow import fit, make_data, make_module
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lit_async_rl.advantages.group import Raw
from lit_async_rl.callbacks import SaveOnFailure, SaveOnSigterm
from lit_async_rl.errors import ProducerError, RewardError, StalledError
from lit_async_rl.rewards.functions import IsolatedReward
from lit_async_rl.runtime.files import check_writable
from lit_async_rl.tasks import SortDigits
from lit_async_rl.training.checkpoint_io import BackgroundCheckpointIO

pytestmark = pytest.mark.timeout(120)


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


@pytest.mark.slow
def test_a_reward_that_hangs_in_its_own_process_is_ended_and_tried_again(tmp_path, monkeypatch, caplog):
    (tmp_path / "hangs_once.py").write_text(HANGS_ONCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    reward = IsolatedReward("hangs_once.judge", timeout_s=0.7)
    settings = dict(reward_tries=2, rollout_timeout_s=100.0, reward_timeout_s=90.0)
    data, watch = make_data(reward=reward, groups_per_step=2, max_staleness=1, **settings), Watch()
    fit(make_module(), data, 4, [watch])
    assert sorted(watch.trained) == list(range(8)), "no group was given up"
    (line,) = said(caplog, "try 1 of data.scoring.tries=2 failed, trying again")
    assert "did not return within 0.7 s" in line


def test_a_stopped_process_takes_nobody_for_hung():
    code = """
import sys, time, logging
from lit_async_rl.runtime import waiting as clocks
clocks.MAX_GAP_S = 0.6
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
    assert "this process did not run for" in err


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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_checkpoint_that_a_full_disk_did_not_take_is_not_said_to_be_saved(tmp_path, caplog):
    for engine, more, error in (
        (None, [Terminate("in the first micro-batch"), SaveOnSigterm()], SIGTERMException),
        (failing("poll", "crash", 1, after=400), [SaveOnFailure()], ProducerError),
    ):
        keep = ModelCheckpoint(tmp_path, every_n_train_steps=1000)
        data = make_data(engine=engine, engine_restarts=0, groups_per_step=2, micro_batches_per_step=2)
        settings = dict(enable_checkpointing=True, plugins=[BackgroundCheckpointIO()])
        with full_disk(50_000), contextlib.suppress(error):
            fit(make_module(), data, 30, [*more, keep], **settings)
    assert len(said(caplog, "was not written: the disk is full")) == 2
    assert said(caplog, "SIGTERM: the run ends after step 2, and")
    assert not said(caplog, "saved ")
    assert not list(tmp_path.glob("*.ckpt"))


def test_a_run_ends_with_its_own_error_and_a_closed_engine_though_its_checkpoint_fails(tmp_path, caplog):
    class Mistake(pl.Callback):
        def on_save_checkpoint(self, *_):
            raise KeyError("mine")

    data = make_data(engine=failing("poll", "crash", 1, after=400), engine_restarts=0, groups_per_step=2)
    settings = dict(default_root_dir=tmp_path, enable_checkpointing=True)
    with pytest.raises(ProducerError, match="broken"):
        fit(make_module(), data, 30, [SaveOnFailure(), Mistake()], **settings)
    assert said(caplog, "failed.ckpt was not saved: KeyError: 'mine'")
    assert data.engine.engine._closed


@pytest.mark.slow
def test_what_is_slow_is_said_before_it_is_cut_off(caplog):
    def slowly(prompt, completion):
        if not said(caplog, "is slow"):
            time.sleep(0.7)
        return 1.0

    with caplog.at_level(logging.WARNING):
        fit(
            make_module(),
            make_data(reward=slowly, reward_timeout_s=1.0, reward_tries=9, group_size=1, advantage=Raw()),
            2,
        )
    assert said(caplog, "of data.scoring.timeout_s=1")


def test_an_unwritable_folder_is_named_and_left_alone(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"the tape's folder cannot be written to: Not a directory.*file/tape"):
        check_writable(tmp_path / "file" / "tape", "the tape's folder")
    check_writable(tmp_path / "new" / "tape", "the tape's folder")
    assert list((tmp_path / "new" / "tape").iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["raises", "hangs"])
def test_a_reward_that_fails_in_a_validation_within_the_run_costs_no_work(kind, tmp_path, caplog):
    begun = threading.Event()

    def reward(prompt, completion):
        if begun.is_set() and prompt.text in held_out:
            if kind == "raises":
                raise KeyError("mine")
            time.sleep(2)
        return 1.0

    prompts = SortDigits(4, size=4, split="held_out")
    held_out = {prompts[n].text for n in range(4)}

    class Later(pl.Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == 3:
                begun.set()

    data = make_data(reward=reward, groups_per_step=2, val_prompts=prompts, reward_timeout_s=1.0)
    callbacks, settings = [Later(), SaveOnFailure()], dict(default_root_dir=tmp_path, enable_checkpointing=True)
    with pytest.raises((RewardError, StalledError)):
        fit(make_module(), data, 30, callbacks, val_check_interval=4, limit_val_batches=1.0, **settings)
    assert said(caplog, "failed.ckpt after step 4, with all finished rollouts")
