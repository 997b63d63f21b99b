"""Waiting for checkpoints that are written in the background."""

from __future__ import annotations

from typing import Any

from lit_async_rl.errors import LastCheckpointError
from lit_async_rl.utils.lightning_types import AnyTrainer


def finish_saving(trainer: AnyTrainer) -> bool:
    """Waits until all checkpoints are on disk; False if the last one did not fit."""
    if callable(wait := getattr(trainer.strategy.checkpoint_io, "wait", None)):
        wait()
    return not getattr(trainer.strategy.checkpoint_io, "disk_is_full", False)


def check_last_is_saved(trainer: AnyTrainer) -> None:
    """Waits for the last checkpoint of a run.

    Raises:
        LastCheckpointError: the disk was full; the message has the newest checkpoint and the number of lost steps.
    """
    if finish_saving(trainer):
        return
    checkpoint_io: Any = trainer.strategy.checkpoint_io
    lost = checkpoint_io.unwritten
    error = LastCheckpointError(
        f"the last checkpoint, {lost.path} after step {lost.step}, was not written: the disk is full. "
        f"{what_is_saved(trainer)}"
    )
    error.trainer = trainer
    raise error


def what_is_saved(trainer: AnyTrainer) -> str:
    """Text with the newest checkpoint, its step, and the number of steps lost after it."""
    checkpoint_io: Any = trainer.strategy.checkpoint_io
    newest = checkpoint_io.newest
    step = checkpoint_io.unwritten.step
    if newest is None:
        return f"This run has no checkpoint: its steps up to {step} are lost"
    return f"{step - newest.step} steps are lost; the newest is of step {newest.step}: {newest.path}"
