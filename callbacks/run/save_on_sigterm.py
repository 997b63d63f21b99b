"""Pre-emption: a checkpoint and a clean exit after SIGTERM."""

from __future__ import annotations

import logging
import signal
import threading
from pathlib import Path
from typing import Any, ClassVar

from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lit_async_rl.callbacks.parts import run_folder
from lit_async_rl.data.module import RolloutDataModule
from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer
from lit_async_rl.utils.saving import finish_saving

log = logging.getLogger(__name__)


class SaveOnSigterm(Checkpoint):
    """Saves `last.ckpt` after SIGTERM, at the end of the running micro-batch (at once while the trainer waits).

    An unfinished step is repeated after a resume; with several ranks it is finished first. During a validation outside
    of training there is nothing to save, and SIGTERM exits with status 143.

    Written to the folder of the run's `ModelCheckpoint`, or where that would be without one. With
    `data.admission: FixedLag` saving waits for all admitted groups, so the grace period before SIGKILL must cover a
    step and their sampling.

    Attributes:
        path: of the checkpoint, also if a full disk did not take it; None before.
        signal_name: what the log calls the signal; Ctrl-C becomes SIGTERM in the command line.
    """

    signal_name: ClassVar[str] = "SIGTERM"

    def __init__(self) -> None:
        self.path: str | None = None
        self._folder: Path | None = None

    def on_fit_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        self._folder = checkpoint_folder(trainer)  # a collective: asked for on all ranks

    def on_train_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        self.path = None

    def on_validation_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        """Exits on SIGTERM during validation, where Lightning would handle it only after the batch."""
        is_main = threading.current_thread() is threading.main_thread()
        if trainer.state.fn == TrainerFn.VALIDATING and is_main:
            signal.signal(signal.SIGTERM, _end_validation)  # Lightning restores the previous handler

    def on_train_batch_end(
        self, trainer: AnyTrainer, pl_module: AnyModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Saves between two steps (a `Checkpoint` runs after all other callbacks)."""
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0 and is_asked_to_stop(trainer):
            self._save(trainer)

    def on_train_end(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        """Saves if the signal arrived while the trainer waited for rollouts."""
        if self.path is None and is_asked_to_stop(trainer):
            self._save(trainer)

    def on_exception(self, trainer: AnyTrainer, pl_module: AnyModule, exception: BaseException) -> None:
        """Saves within a step, or when several ranks agreed to stop (`lit_async_rl.distributed.scatter`)."""
        if isinstance(exception, SIGTERMException) and self.path is None:
            self._save(trainer)

    def _save(self, trainer: AnyTrainer) -> None:
        self.path = str((self._folder or Path(trainer.default_root_dir)) / "last.ckpt")
        trainer.save_checkpoint(self.path)
        is_saved = finish_saving(trainer)
        trainer.should_stop = True
        name, step = self.signal_name, trainer.global_step
        if not trainer.is_global_zero:
            return
        if is_saved:
            log.warning("%s: saved %s after step %d; resume with --ckpt_path", name, self.path, step)
        else:
            log.warning("%s: the run ends after step %d, and %s could not be written", name, step, self.path)


def _end_validation(*_: Any) -> None:
    log.warning("%s: the validation was not finished; nothing is saved", SaveOnSigterm.signal_name)
    raise SystemExit(128 + signal.SIGTERM)


def checkpoint_folder(trainer: AnyTrainer) -> Path:
    """Folder of the run's `ModelCheckpoint`; without one, where it would be. A collective."""
    folder = run_folder(trainer)
    for callback in trainer.checkpoint_callbacks:
        if dirpath := getattr(callback, "dirpath", None):  # the `ModelCheckpoint` of either Lightning
            return Path(dirpath)
    return Path(trainer.default_root_dir) if folder is None else folder / "checkpoints"


def is_asked_to_stop(trainer: AnyTrainer) -> bool:
    """Whether SIGTERM or Ctrl-C reached any rank. A collective."""
    data = trainer.datamodule  # type: ignore[attr-defined]
    asked = data.is_asked_to_stop if isinstance(data, RolloutDataModule) else trainer.received_sigterm
    return trainer.strategy.reduce_boolean_decision(asked, all=False)
