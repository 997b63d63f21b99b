"""Checkpoint of a failed run."""

from __future__ import annotations

import logging
from pathlib import Path

from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.states import TrainerFn

from lit_async_rl.callbacks.run.save_on_sigterm import checkpoint_folder
from lit_async_rl.data.module import RolloutDataModule
from lit_async_rl.errors import (
    EngineError,
    EnvironmentFailure,
    NonFiniteError,
    ProducerError,
    RewardError,
    StalledError,
    describe,
)
from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer
from lit_async_rl.utils.saving import finish_saving

BETWEEN_STEPS = (EngineError, EnvironmentFailure, NonFiniteError, ProducerError, RewardError, StalledError)
log = logging.getLogger(__name__)


class SaveOnFailure(Checkpoint):
    """Saves `failed.ckpt` when engine, reward or environment end the run, or after too many NaN gradients.

    These errors are raised between two steps, so weights, moments and finished rollouts are consistent, and the run can
    be resumed once the cause is fixed. Written to the folder of the run's `ModelCheckpoint`, or where that would be
    without one. Nothing is saved before the first finished rollout, and with several ranks, because saving is a
    collective that the others do not join.

    Attributes:
        path: path of the checkpoint; None until one is saved.
    """

    def __init__(self) -> None:
        self.path: str | None = None
        self._folder: Path | None = None

    def on_fit_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        self._folder = checkpoint_folder(trainer)  # a collective: asked for on all ranks

    def on_exception(self, trainer: AnyTrainer, pl_module: AnyModule, exception: BaseException) -> None:
        """Saves the checkpoint, before the engine is closed."""
        is_fit = trainer.state.fn == TrainerFn.FITTING  # its validations are between two steps, too
        if not isinstance(exception, BETWEEN_STEPS) or trainer.world_size > 1 or not is_fit:
            return
        data = trainer.datamodule  # type: ignore[attr-defined]
        stats = data.stats() if isinstance(data, RolloutDataModule) else None
        if trainer.global_step == 0 and (stats is None or stats.num_finished == 0):  # there is nothing to keep
            return
        path = str((self._folder or Path(trainer.default_root_dir)) / "failed.ckpt")
        try:
            trainer.save_checkpoint(path)
            is_saved = finish_saving(trainer)
        except Exception as error:  # the run ends with the error that it has, and its engine is closed
            log.warning("%s was not saved: %s", path, describe(error))
            return
        if is_saved:
            self.path = path
            log.warning("saved %s after step %d, with all finished rollouts", path, trainer.global_step)
