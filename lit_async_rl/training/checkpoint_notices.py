"""Tells the loggers of a run about a checkpoint when its file is complete."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from lightning.pytorch.loggers import Logger

from lit_async_rl.errors import describe
from lit_async_rl.training.step_saves import SavesBetweenUpdates
from lit_async_rl.utils.lightning_types import AnyTrainer

log = logging.getLogger(__name__)
REPLACED = ("after_save_checkpoint", "finalize")


def tell_loggers_after_saving(trainer: AnyTrainer) -> None:
    """Defers `after_save_checkpoint` of all loggers, until their `finalize`, to when the checkpoint's file is complete.

    Lightning calls it when `Trainer.save_checkpoint` returns, at which time a checkpoint that is written in the
    background, or at the end of an update, is not there yet: trackers would find nothing to upload. Loggers are called
    in the thread that writes, so training does not wait for an upload (the next checkpoint does); not at all if the
    file could not be written. What a logger gets is a copy of the `ModelCheckpoint` as it was at its save, with the
    checkpoint itself in place of a link to it.

    `finalize` waits for all that is being written, after a failure, too. An error of a tracker in either is a warning:
    it takes neither the run nor its checkpoints along.

    Args:
        trainer: that is about to train. Nothing happens to a logger that was prepared already.
    """
    for logger in trainer.loggers:
        if not any(name in vars(logger) for name in REPLACED):
            _Notices(trainer, logger)


class _Notices:
    """Replaces the methods of one logger."""

    def __init__(self, trainer: AnyTrainer, logger: Logger) -> None:
        self._trainer, self._logger = trainer, logger
        self._told: dict[str, Any] = {}  # `ModelCheckpoint`s as the logger knows them: some keep them until the end
        self._tell, self._finalize = logger.after_save_checkpoint, logger.finalize
        for name in REPLACED:
            vars(logger)[name] = getattr(self, name)

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """Tells the logger later, of what is true now."""
        known = _copied(checkpoint_callback)
        saves = vars(self._trainer).get("save_checkpoint")
        if isinstance(saves, SavesBetweenUpdates):
            saves.after_saves(lambda: self._tell_when_written(known))
        else:
            self._tell_when_written(known)

    def _tell_when_written(self, known: Any) -> None:
        checkpoint_io = self._trainer.strategy.checkpoint_io
        after_saving: Callable[[Callable[[], None]], None] | None = getattr(checkpoint_io, "after_saving", None)
        if after_saving is None:
            self._tell_now(known)
        else:
            after_saving(lambda: self._tell_now(known))

    def _tell_now(self, known: Any) -> None:
        if getattr(self._trainer.strategy.checkpoint_io, "last_is_missing", False):
            return
        told = self._told.setdefault(known.state_key, known)
        vars(told).update(vars(known))
        try:
            self._tell(told)
        except Exception as error:
            name = type(self._logger).__name__
            log.warning("%s did not take checkpoint %s: %s", name, told.best_model_path, describe(error))

    def finalize(self, status: str) -> None:
        """Waits for what is being written, whose errors the run itself raises, and ends the logger."""
        settle = getattr(self._trainer.strategy.checkpoint_io, "settle", None)
        if settle is not None:
            settle()
        for name in REPLACED:
            vars(self._logger).pop(name, None)
        try:
            self._finalize(status)
        except Exception as error:
            log.warning("%s did not end well: %s", type(self._logger).__name__, describe(error))


def _copied(checkpoint_callback: Any) -> Any:
    """A `ModelCheckpoint` with the values that it has now; Lightning hands out a proxy of it."""
    kind = checkpoint_callback.__class__
    copied = kind.__new__(kind)
    for name, value in checkpoint_callback.__dict__.items():
        vars(copied)[name] = value.copy() if isinstance(value, dict | list | set) else value
    if getattr(copied, "save_last", None) == "link" and getattr(copied, "_last_checkpoint_saved", ""):
        copied.last_model_path = copied._last_checkpoint_saved
    return copied
