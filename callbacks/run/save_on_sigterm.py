"""Pre-emption: a checkpoint and a clean exit after SIGTERM, or after SIGHUP."""

from __future__ import annotations

import logging
import os
import signal
import threading
from pathlib import Path
from typing import Any, ClassVar

from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lit_async_rl.callbacks.parts import run_folder
from lit_async_rl.data.module import RolloutDataModule
from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer
from lit_async_rl.utils.saving import finish_saving

log = logging.getLogger(__name__)


class SaveOnSigterm(Checkpoint):
    """Saves `last.ckpt` after SIGTERM, at the end of the running micro-batch (at once while the trainer waits).

    An unfinished step is repeated after a resume; with several ranks it is finished first. Before training, and during
    a validation outside of it, there is nothing to save, and SIGTERM exits with status 143.

    SIGHUP, which a terminal sends when it is closed, is treated as SIGTERM, unless it is ignored (`nohup`) or has
    another handler. What would have gone to the terminal after it goes to `after_hangup.txt` in the run's folder.

    Written to the folder of the run's `ModelCheckpoint`, or where that would be without one. With
    `data.admission: FixedLag` saving waits for all admitted groups, so the grace period before SIGKILL must cover a
    step and their sampling.

    Attributes:
        path: of the checkpoint, also if a full disk did not take it; None before.
        signal_name: what the log calls the signal; Ctrl-C becomes SIGTERM in the command line, and SIGHUP anywhere.
    """

    signal_name: ClassVar[str] = "SIGTERM"

    def __init__(self) -> None:
        self.path: str | None = None
        self._folder: Path | None = None  # None before training

    def setup(self, trainer: AnyTrainer, pl_module: AnyModule, stage: str) -> None:
        """Takes SIGHUP over, unless it is ignored or has a handler."""
        self._folder = None
        if stage == "fit":
            self.path = None
        before = signal.getsignal(signal.SIGHUP)
        is_free = before == signal.SIG_DFL or isinstance(before, _HangUp)
        if is_free and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGHUP, _HangUp(_own_log_folder(trainer)))

    def on_fit_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        self._folder = checkpoint_folder(trainer)  # a collective: asked for on all ranks

    def on_train_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        self.path = None

    def on_validation_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        """Exits on SIGTERM during validation, where Lightning would handle it only after the batch."""
        is_main = threading.current_thread() is threading.main_thread()
        if trainer.state.fn == TrainerFn.VALIDATING and is_main:
            signal.signal(signal.SIGTERM, _end_validation)  # Lightning restores the previous handler
            if (
                trainer.received_sigterm and trainer.world_size == 1
            ):  # while other callbacks began, the engine with them
                _end_validation()

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
        if not isinstance(exception, SIGTERMException) or self.path is not None:
            return
        if trainer.state.fn == TrainerFn.FITTING and self._folder is not None:
            self._save(trainer)
        elif trainer.is_global_zero:
            log.warning("%s: training had not begun; nothing is saved", self.signal_name)

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
    raise SystemExit(128 + (signal.SIGHUP if SaveOnSigterm.signal_name == "SIGHUP" else signal.SIGTERM))


class _HangUp:
    """Handler of SIGHUP.

    Args:
        folder: for what is said from then on; None drops it.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._terminals = [number for number in (0, 1, 2) if os.isatty(number)]  # not asked for when they are gone

    def __call__(self, *_: Any) -> None:
        """As SIGTERM; outside of a run, where that has no handler, what SIGHUP does by default."""
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
            signal.raise_signal(signal.SIGHUP)
            return
        SaveOnSigterm.signal_name = "SIGHUP"
        self._leave_terminal()
        signal.raise_signal(signal.SIGTERM)

    def _leave_terminal(self) -> None:
        """Replaces a closed terminal, in which every `print` would be an error, before the checkpoint is saved."""
        path = os.devnull if self._folder is None else str(self._folder / "after_hangup.txt")
        terminals, self._terminals = self._terminals, []
        if not terminals:
            return
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError:  # a full disk
            file = os.open(os.devnull, os.O_RDWR)
        for number in terminals:
            os.dup2(file, number)
        os.close(file)


def _own_log_folder(trainer: AnyTrainer) -> Path | None:
    """Folder of the run's files on rank 0. Asks no other rank: only this one may have got a signal."""
    logs = trainer.loggers if trainer.is_global_zero else []
    return next((Path(log.log_dir) for log in logs if isinstance(log, CSVLogger | TensorBoardLogger)), None)


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
