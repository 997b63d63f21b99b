"""Pre-emption: a last checkpoint, and a clean end."""

from __future__ import annotations

import logging
import signal
import threading
from pathlib import Path
from typing import Any, ClassVar

from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lit_async_rl.data.module import RolloutDataModule
from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer

log = logging.getLogger(__name__)


class SaveOnSigterm(Checkpoint):
    """After SIGTERM, saves `last.ckpt` at the end of the micro-batch that runs (or at once, while the trainer waits).

    A step that was not finished begins again when the run is resumed; several ranks finish it first. Where there is
    nothing to save, in a validation before or after training, SIGTERM ends the process with status 143.

    It lies where the run's `ModelCheckpoint` writes. With `schedule: fixed_lag` saving waits until all that was
    admitted is sampled, so the time between SIGTERM and SIGKILL must be longer than a step and that.

    Attributes:
        path: of the checkpoint; None before.
        signal_name: what the log calls the signal; Ctrl-C becomes SIGTERM in the command line.
    """

    signal_name: ClassVar[str] = "SIGTERM"

    def __init__(self) -> None:
        self.path: str | None = None

    def on_train_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        """What an earlier run saved does not count."""
        self.path = None

    def on_validation_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        """Lightning would only look at the signal after the batch, and forget it after the last."""
        is_main = threading.current_thread() is threading.main_thread()
        if trainer.state.fn == TrainerFn.VALIDATING and is_main:
            signal.signal(signal.SIGTERM, _end_validation)  # Lightning puts back what was there before

    def on_train_batch_end(
        self, trainer: AnyTrainer, pl_module: AnyModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Between two steps (a `Checkpoint` comes after all other callbacks)."""
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0 and _on_any_rank(trainer):
            self._save(trainer)

    def on_train_end(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        """When the signal came while the trainer waited for rollouts."""
        if self.path is None and _on_any_rank(trainer):
            self._save(trainer)

    def on_exception(self, trainer: AnyTrainer, pl_module: AnyModule, exception: BaseException) -> None:
        """Within a step, or when several ranks have agreed to end (`lit_async_rl.distributed.scatter`)."""
        if isinstance(exception, SIGTERMException) and self.path is None:
            self._save(trainer)

    def _save(self, trainer: AnyTrainer) -> None:
        self.path = str(Path(checkpoint_folder(trainer)) / "last.ckpt")
        trainer.save_checkpoint(self.path)
        trainer.should_stop = True
        name, step = self.signal_name, trainer.global_step
        log.warning("%s: saved %s after step %d; resume with --ckpt_path", name, self.path, step)


def _end_validation(*_: Any) -> None:
    log.warning("%s: the validation was not finished; nothing is saved", SaveOnSigterm.signal_name)
    raise SystemExit(128 + signal.SIGTERM)


def checkpoint_folder(trainer: AnyTrainer) -> str:
    """Where the run's `ModelCheckpoint` writes; without one, where Lightning would."""
    for callback in trainer.checkpoint_callbacks:
        if dirpath := getattr(callback, "dirpath", None):  # the `ModelCheckpoint` of either Lightning
            return str(dirpath)
    return trainer.default_root_dir


def _on_any_rank(trainer: AnyTrainer) -> bool:
    data = trainer.datamodule  # type: ignore[attr-defined]
    asked = data.is_asked_to_stop if isinstance(data, RolloutDataModule) else trainer.received_sigterm
    return trainer.strategy.reduce_boolean_decision(asked, all=False)
