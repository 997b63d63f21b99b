"""Waiting for checkpoints that are written in the background."""

from __future__ import annotations

from lit_async_rl.utils.lightning_types import AnyTrainer


def finish_saving(trainer: AnyTrainer) -> bool:
    """Returns when checkpoints that are written in the background are on disk; False if the last one is not."""
    if callable(wait := getattr(trainer.strategy.checkpoint_io, "wait", None)):
        wait()
    return not getattr(trainer.strategy.checkpoint_io, "disk_is_full", False)
