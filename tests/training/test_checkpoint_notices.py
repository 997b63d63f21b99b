"""Loggers hear of a checkpoint when its file is complete: in the run, at its end, and after a failure."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from disk import full_disk
from flow import fit, make_data, make_module
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from lightning.pytorch.loggers import Logger

from lit_async_rl.callbacks import LinkedCheckpoint
from lit_async_rl.training.checkpoint_io import AtomicCheckpointIO, BackgroundCheckpointIO


class Recorder(Logger):
    """Notes each checkpoint that it hears of, with the step that its file has then."""

    name = version = "recorder"

    def __init__(self) -> None:
        super().__init__()
        self.heard: list = []
        self.callbacks: list = []
        self.threads: set = set()

    def log_metrics(self, *args, **kwargs) -> None: ...

    def log_hyperparams(self, *args, **kwargs) -> None: ...

    def after_save_checkpoint(self, checkpoint_callback) -> None:
        paths = [checkpoint_callback.best_model_path, checkpoint_callback.last_model_path]
        steps = [torch.load(path, weights_only=True)["global_step"] for path in paths if path]
        self.heard.append((Path(paths[0]).name, *steps))
        self.callbacks.append(checkpoint_callback)
        self.threads.add(threading.current_thread())

    def finalize(self, status: str) -> None:
        self.heard.append(status)


def trained(tmp_path, checkpoint, logger, *callbacks, steps=5, io=BackgroundCheckpointIO, **more):
    data = make_data(groups_per_step=2, group_size=2)
    settings = dict(enable_checkpointing=True, plugins=[io()], logger=logger, default_root_dir=tmp_path)
    return fit(make_module(), data, steps, [checkpoint, *callbacks], **settings, **more)


def linked(tmp_path, **settings):
    return LinkedCheckpoint(tmp_path, filename="{step}", every_n_train_steps=2, save_top_k=1, **settings)


@pytest.fixture
def slow_disk(monkeypatch):
    """The last of several steps has ended before a file is written."""
    event, write = threading.Event(), AtomicCheckpointIO.save_checkpoint

    def slow(self, *args, **kwargs):
        event.wait(0.3)
        write(self, *args, **kwargs)

    monkeypatch.setattr(AtomicCheckpointIO, "save_checkpoint", slow)


@pytest.mark.slow
@pytest.mark.parametrize("io", [BackgroundCheckpointIO, AtomicCheckpointIO])
def test_every_checkpoint_is_there_when_loggers_hear_of_it(io, tmp_path, slow_disk):
    logger = Recorder()
    trained(tmp_path, linked(tmp_path, save_last="link"), logger, io=io)
    assert logger.heard == [("step=2.ckpt", 2, 2), ("step=4.ckpt", 4, 4), ("step=5.ckpt", 5, 5), "success"]
    assert len({id(callback) for callback in logger.callbacks}) == 1, "what a logger keeps is one, and the newest"
    assert "after_save_checkpoint" not in vars(logger), "the logger is as it was"
    if io is BackgroundCheckpointIO:
        assert threading.main_thread() not in logger.threads, "training did not wait"


@pytest.mark.slow
def test_lightnings_own_callback_is_told_of_in_the_same_way(tmp_path, slow_disk):
    logger = Recorder()
    trained(tmp_path, ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=2, save_top_k=1), logger)
    assert logger.heard == [("step=2.ckpt", 2), ("step=4.ckpt", 4), "success"]


def test_after_a_failure_they_have_heard_of_all_that_was_saved_before(tmp_path, slow_disk):
    def fail(trainer, *_):
        if trainer.global_step == 3:
            raise KeyError("mine")

    logger = Recorder()
    with pytest.raises(KeyError, match="mine"):
        trained(tmp_path, linked(tmp_path), logger, LambdaCallback(on_train_batch_end=fail))
    assert logger.heard == [("step=2.ckpt", 2), "failed"]


@pytest.mark.slow
def test_they_do_not_hear_of_a_checkpoint_that_was_not_written(tmp_path):
    class Full(pl.Callback):
        """From the second step to the fourth, whose checkpoint is the first that can be written."""

        disk = full_disk(50_000)

        def on_train_batch_start(self, trainer, *_):
            if trainer.global_step == 1:
                self.disk.__enter__()
            if trainer.global_step == 2:
                trainer.strategy.checkpoint_io.wait()
                self.disk.__exit__(None, None, None)

    logger = Recorder()
    trained(tmp_path, linked(tmp_path, save_last="link"), logger, Full())
    assert logger.heard == [("step=4.ckpt", 4, 4), ("step=5.ckpt", 5, 5), "success"]


class Broken(Recorder):
    """A tracker without a network."""

    def after_save_checkpoint(self, checkpoint_callback) -> None:
        raise ConnectionError("no route to tracker")

    def finalize(self, status: str) -> None:
        raise ConnectionError("no way to end")


@pytest.mark.slow
def test_a_tracker_that_fails_takes_neither_run_nor_checkpoint_along(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        trainer = trained(tmp_path, linked(tmp_path, save_last="link"), Broken(), steps=3)
    assert trainer.global_step == 3
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 3
    said = [record.getMessage() for record in caplog.records]
    assert f"Broken did not take checkpoint {tmp_path / 'step=2.ckpt'}: no route to tracker" in said
    assert "Broken did not end well: no way to end" in said


def test_a_save_that_an_update_defers_is_heard_of_after_it(tmp_path):
    class InTheUpdate(ModelCheckpoint):
        def on_before_optimizer_step(self, trainer, *_):
            if trainer.global_step == 1:
                self.best_model_path = self.last_model_path = str(tmp_path / "asked.ckpt")
                self._save_checkpoint(trainer, self.best_model_path)

    logger = Recorder()
    checkpoint = InTheUpdate(tmp_path, every_n_train_steps=1000, save_top_k=1)
    trained(tmp_path, checkpoint, logger, steps=3, io=AtomicCheckpointIO)
    assert logger.heard == [("asked.ckpt", 2, 2), "success"], "as it is when the update is whole"
