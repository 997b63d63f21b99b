"""Lightning's `ModelCheckpoint` whose link to the last checkpoint is never broken."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn

from lit_async_rl.callbacks.run.save_on_sigterm import SaveOnSigterm, is_asked_to_stop
from lit_async_rl.errors import describe
from lit_async_rl.training.background_io import BackgroundCheckpointIO
from lit_async_rl.training.checkpoint_notices import tell_loggers_after_saving
from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer

log = logging.getLogger(__name__)


class LinkedCheckpoint(ModelCheckpoint):
    """`ModelCheckpoint` (same arguments) for checkpoints that are written in the background.

    With `save_last: link` the file `last.ckpt` is a symbolic link, which moves in one step once the newest checkpoint
    is written. A run that is resumed from it moves it on.

    The end of training is saved, too, which may be up to an interval after the last of `every_n_train_steps`. With a
    `monitor`, whose metric is of an earlier step, and before `trainer.max_steps`, where the run may have been stopped
    because it collapsed, that is `last.ckpt` alone, as a file: no other checkpoint is removed for it. What fails after
    the last step (another callback's end, say) does not take it along.
    """

    _has_ended = False  # the last step, and nothing that comes after it

    def setup(self, trainer: AnyTrainer, pl_module: AnyModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)  # type: ignore[arg-type]
        if stage == "fit":
            tell_loggers_after_saving(trainer)

    def on_train_end(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        """Saves the last steps, unless the run was asked to stop: `SaveOnSigterm` does then."""
        saves_itself = any(isinstance(callback, SaveOnSigterm) for callback in trainer.checkpoint_callbacks)
        if self._should_skip_saving_checkpoint(trainer) or (saves_itself and is_asked_to_stop(trainer)):
            return
        metrics = self._monitor_candidates(trainer)
        if self.monitor is None and trainer.global_step >= trainer.max_steps:
            self._save_topk_checkpoint(trainer, metrics)
        else:
            self._last_checkpoint_saved = ""  # nothing else is of this step, so that a link could name it
        self._save_last_checkpoint(trainer, metrics)

    def on_exception(self, trainer: AnyTrainer, pl_module: AnyModule, exception: BaseException) -> None:
        """Saves the last step if training was over. Not with several ranks, because the others do not join."""
        super().on_exception(trainer, pl_module, exception)  # type: ignore[arg-type]
        if trainer.state.fn != TrainerFn.FITTING or not self._has_ended or trainer.world_size > 1:
            return
        try:
            self.on_train_end(trainer, pl_module)
        except Exception as error:  # the run ends with the error that it has
            log.warning("the last step was not saved: %s", describe(error))

    def on_train_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        super().on_train_start(trainer, pl_module)  # type: ignore[arg-type]
        self._has_ended = False

    def on_train_epoch_end(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        """Notes that training is over: between two steps, and before any callback's `on_train_end`."""
        super().on_train_epoch_end(trainer, pl_module)  # type: ignore[arg-type]
        self._has_ended = trainer.fit_loop.done

    @staticmethod
    def _link_checkpoint(trainer: AnyTrainer, filepath: str, linkpath: str) -> None:
        checkpoint_io = trainer.strategy.checkpoint_io
        if not isinstance(checkpoint_io, BackgroundCheckpointIO):
            ModelCheckpoint._link_checkpoint(trainer, filepath, linkpath)  # type: ignore[arg-type]
            return
        if trainer.is_global_zero:
            checkpoint_io.link_checkpoint(filepath, linkpath)
        trainer.strategy.barrier()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the state; the link belongs to this run even if the checkpoint was saved before it was made."""
        super().load_state_dict(state_dict)
        if self.dirpath is not None:
            link = Path(self.dirpath, f"{self.CHECKPOINT_NAME_LAST}{self.FILE_EXTENSION}")
            if link.is_symlink():
                self.last_model_path = str(link)
