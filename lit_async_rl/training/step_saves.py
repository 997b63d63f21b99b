"""Defers checkpoints requested during an update to its end."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from lit_async_rl.utils.lightning_types import AnyTrainer

log = logging.getLogger(__name__)


class SavesBetweenUpdates:
    """Replaces `trainer.save_checkpoint`, for all its callers (user callbacks, Lightning's, ours).

    Between `on_before_optimizer_step` and the end of the optimizer's step some callbacks have processed the step and
    others have not, and weights may have changed while counters have not: a checkpoint from there could not be resumed
    correctly.

    Args:
        trainer: whose method is replaced, until `remove`.
        is_updating: whether an update is in progress.
    """

    def __init__(self, trainer: AnyTrainer, is_updating: Callable[[], bool]) -> None:
        self._trainer, self._is_updating = trainer, is_updating
        self._pending: list[Callable[[], None]] = []
        self._save = partial(type(trainer).save_checkpoint, trainer)
        trainer.__dict__["save_checkpoint"] = self

    def __call__(self, filepath: Any, weights_only: bool | None = None, storage_options: Any = None) -> None:
        """Saves now, or at the end of the update."""
        if not self._is_updating():
            self._save(filepath, weights_only, storage_options)
            return
        log.warning("checkpoint %s was asked for in the middle of an update: it is written at its end", filepath)
        self._pending.append(lambda: self._save(filepath, weights_only, storage_options))

    def after_saves(self, task: Callable[[], None]) -> None:
        """Calls `task` once all that was to be saved so far was handed to the writer: now, or at the update's end."""
        if self._pending:
            self._pending.append(task)
        else:
            task()

    def flush(self) -> None:
        """Writes the deferred checkpoints."""
        pending, self._pending = self._pending, []
        for call in pending:
            call()

    def remove(self) -> None:
        """Restores the trainer's method."""
        self._trainer.__dict__.pop("save_checkpoint", None)
