"""Pre-emption: a checkpoint and a clean exit after SIGTERM, or after SIGHUP."""

from __future__ import annotations

import logging
import os
import signal
import threading
from pathlib import Path
from typing import Any, ClassVar

from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lit_async_rl.callbacks.parts import callbacks_of, own_log_dir, run_folder, stats_of
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
from lit_async_rl.runtime.files import absolute
from lit_async_rl.training.checkpoint_io import BackgroundCheckpointIO
from lit_async_rl.training.whole_steps import tell_loggers_after_saving
from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer
from lit_async_rl.utils.saving import finish_saving

log = logging.getLogger(__name__)


class SaveOnSigterm(Checkpoint):
    """Saves `last.ckpt` after SIGTERM, at the end of the running micro-batch (at once while the trainer waits).

    An unfinished step is repeated after a resume; several ranks finish it first. Before training, and in a validation
    outside of training, SIGTERM saves nothing and exits with status 143.

    SIGHUP, which a closed terminal sends, is handled likewise, unless it is ignored (`nohup`) or has another handler.
    Later terminal output goes to `after_hangup.txt` in the run's folder.

    The checkpoint goes to the folder of the run's `ModelCheckpoint`, or to the default folder of one. With
    `data.admission: FixedLag` saving waits for all admitted groups, so the grace period before SIGKILL must cover a
    step and their sampling.

    Attributes:
        path: path of the checkpoint, even if a full disk did not take it; None before.
        signal_name: name of the signal in the log. The command line turns Ctrl-C into SIGTERM, and `_HangupHandler`
            SIGHUP.
    """

    signal_name: ClassVar[str] = "SIGTERM"

    def __init__(self) -> None:
        self.path: str | None = None
        self._folder: Path | None = None  # None before training, while the engine starts

    def setup(self, trainer: AnyTrainer, pl_module: AnyModule, stage: str) -> None:
        """Installs the handler of SIGHUP, unless the signal is ignored or has one."""
        self._folder = None
        if stage == "fit":
            self.path = None
        before = signal.getsignal(signal.SIGHUP)
        is_free = before == signal.SIG_DFL or isinstance(before, _HangupHandler)
        if is_free and threading.current_thread() is threading.main_thread():  # Python allows handlers only there
            folder = own_log_dir(trainer)
            signal.signal(signal.SIGHUP, _HangupHandler(None if folder is None else absolute(folder)))

    def on_train_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        self.path = None
        self._folder = checkpoint_folder(trainer)  # a collective, which a signal handler could not call

    def on_validation_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        """Exits on SIGTERM during validation, where Lightning would handle it only after the batch."""
        is_main = threading.current_thread() is threading.main_thread()
        if trainer.state.fn == TrainerFn.VALIDATING and is_main:
            signal.signal(signal.SIGTERM, _end_validation)  # Lightning restores the previous handler
            # the signal may have arrived while other callbacks started, the engine among them
            if trainer.received_sigterm and trainer.world_size == 1:
                _end_validation()

    def on_train_batch_end(
        self, trainer: AnyTrainer, pl_module: AnyModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Saves between two steps (a `Checkpoint` runs after all other callbacks)."""
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0 and is_asked_to_stop(trainer):
            self._save(trainer)

    def on_train_end(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        """Saves if the signal came while the trainer waited for rollouts."""
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
        trainer.save_checkpoint(self.path, weights_only=False)
        is_saved = finish_saving(trainer)
        trainer.should_stop = True
        name = self.signal_name
        step = trainer.global_step
        if not trainer.is_global_zero:
            return
        if is_saved:
            log.warning("%s: saved %s after step %d; resume with --ckpt_path", name, self.path, step)
        else:
            log.warning(
                "%s: the run ends after step %d, and the checkpoint %s could not be written", name, step, self.path
            )


def _end_validation(*_: Any) -> None:
    log.warning("%s: the validation was not finished; nothing is saved", SaveOnSigterm.signal_name)
    raise SystemExit(signal_status())


def signal_status() -> int:
    """Exit status after the signal that has ended a run; Lightning's exception would end it with 0."""
    return 128 + (signal.SIGHUP if SaveOnSigterm.signal_name == "SIGHUP" else signal.SIGTERM)


class _HangupHandler:
    """Handler of SIGHUP: redirects output and raises SIGTERM.

    Args:
        folder: folder of the file for later output; None discards the output.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        # asked now, because `isatty` is False once the terminal is closed
        self._terminals = [number for number in (0, 1, 2) if os.isatty(number)]

    def __call__(self, *_: Any) -> None:
        """Raises SIGTERM; outside of a run, where SIGTERM has no handler, the default action of SIGHUP."""
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
            signal.raise_signal(signal.SIGHUP)
            return
        SaveOnSigterm.signal_name = "SIGHUP"
        self._redirect_terminal()
        signal.raise_signal(signal.SIGTERM)

    def _redirect_terminal(self) -> None:
        """Replaces a closed terminal by a file: any `print` to it would raise, also during saving."""
        path = os.devnull if self._folder is None else str(self._folder / "after_hangup.txt")
        terminals = self._terminals
        self._terminals = []
        if not terminals:
            return
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError:  # a full disk
            file = os.open(os.devnull, os.O_RDWR)
        for number in terminals:
            os.dup2(file, number)
        os.close(file)


def checkpoint_folder(trainer: AnyTrainer) -> Path:
    """Folder of the run's `ModelCheckpoint`, or the default folder of one. A collective: all ranks call."""
    folder = run_folder(trainer)
    for callback in trainer.checkpoint_callbacks:
        if dirpath := getattr(callback, "dirpath", None):  # the `ModelCheckpoint` of either Lightning
            return Path(dirpath)
    return Path(trainer.default_root_dir) if folder is None else folder / "checkpoints"


def is_asked_to_stop(trainer: AnyTrainer) -> bool:
    """Whether SIGTERM or Ctrl-C reached any rank. A collective, because all ranks must stop after the same step."""
    data = trainer.datamodule  # type: ignore[attr-defined]
    asked = data.is_asked_to_stop if isinstance(data, RolloutDataModule) else trainer.received_sigterm
    return trainer.strategy.reduce_boolean_decision(asked, all=False)


# -- Checkpoint of a failed run ---------------------------------------------------------------------------------------


ERRORS_BETWEEN_STEPS = (EngineError, EnvironmentFailure, NonFiniteError, ProducerError, RewardError, StalledError)


class SaveOnFailure(Checkpoint):
    """Saves `failed.ckpt` when engine, reward or environment end the run, or after too many NaN gradients.

    These errors are raised between two steps, so weights, moments and finished rollouts are consistent, and the run can
    be resumed once the cause is fixed. The checkpoint goes to the same folder as that of `SaveOnSigterm`. It saves
    nothing before the first finished rollout, nor with several ranks: saving is a collective, which ranks without the
    error would not join.

    Attributes:
        path: path of the checkpoint; None until one is saved.
    """

    def __init__(self) -> None:
        self.path: str | None = None
        self._folder: Path | None = None

    def on_fit_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        self._folder = checkpoint_folder(trainer)  # a collective, and after an error no longer possible

    def on_exception(self, trainer: AnyTrainer, pl_module: AnyModule, exception: BaseException) -> None:
        """Saves the checkpoint, before the engine is closed."""
        is_fit = trainer.state.fn == TrainerFn.FITTING  # includes validations, which are between two steps, too
        if not isinstance(exception, ERRORS_BETWEEN_STEPS) or trainer.world_size > 1 or not is_fit:
            return
        stats = stats_of(trainer)
        if trainer.global_step == 0 and (stats is None or stats.num_finished == 0):  # nothing to save yet
            return
        path = str((self._folder or Path(trainer.default_root_dir)) / "failed.ckpt")
        try:
            trainer.save_checkpoint(path, weights_only=False)
            is_saved = finish_saving(trainer)
        except Exception as error:  # must not hide the error that ends the run, nor keep the engine from closing
            log.warning("%s was not saved: %s", path, describe(error))
            return
        if is_saved:
            self.path = path
            log.warning("saved %s after step %d, with all finished rollouts", path, trainer.global_step)


# -- `ModelCheckpoint` with a link to the last checkpoint that is never broken ----------------------------------------


class LinkedCheckpoint(ModelCheckpoint):
    """`ModelCheckpoint` (same arguments) for checkpoints that are written in the background.

    With `save_last: link`, `last.ckpt` is a symbolic link, replaced atomically once the newest checkpoint is written,
    also by a run resumed from it.

    It also saves the end of training between two multiples of `every_n_train_steps`. With a `monitor` (its metric
    belongs to an earlier step), or before `trainer.max_steps` (the run may have collapsed), only `last.ckpt` is then
    written, as a file, and no other checkpoint is removed. A failure after the last step, such as in another callback's
    `on_train_end`, does not prevent this.
    """

    _has_ended = False  # whether the last step is done; the callbacks' `on_train_end` may not be

    def setup(self, trainer: AnyTrainer, pl_module: AnyModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)  # type: ignore[arg-type]
        if stage == "fit":
            tell_loggers_after_saving(trainer)

    def on_train_end(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        """Saves the end of training, unless `SaveOnSigterm` does."""
        saves_itself = callbacks_of(trainer, SaveOnSigterm)
        if self._should_skip_saving_checkpoint(trainer) or (saves_itself and is_asked_to_stop(trainer)):
            return
        metrics = self._monitor_candidates(trainer)
        if self.monitor is None and trainer.global_step >= trainer.max_steps:
            self._save_topk_checkpoint(trainer, metrics)
        else:
            self._last_checkpoint_saved = ""  # no checkpoint of this step that a link could point to: writes a file
        self._save_last_checkpoint(trainer, metrics)

    def on_exception(self, trainer: AnyTrainer, pl_module: AnyModule, exception: BaseException) -> None:
        """Saves the end of training if it was reached. Not with several ranks: the others would not join."""
        super().on_exception(trainer, pl_module, exception)  # type: ignore[arg-type]
        if trainer.state.fn != TrainerFn.FITTING or not self._has_ended or trainer.world_size > 1:
            return
        try:
            self.on_train_end(trainer, pl_module)
        except Exception as error:  # must not hide the error that ends the run
            log.warning("the last step was not saved: %s", describe(error))

    def on_train_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        super().on_train_start(trainer, pl_module)  # type: ignore[arg-type]
        self._has_ended = False

    def on_train_epoch_end(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        """Records the end of training, before any `on_train_end`."""
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
        trainer.strategy.barrier()  # no rank may read the link before it is set

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the state, and adopts an existing link, which may be newer."""
        super().load_state_dict(state_dict)
        if self.dirpath is not None:
            link = Path(self.dirpath, f"{self.CHECKPOINT_NAME_LAST}{self.FILE_EXTENSION}")
            if link.is_symlink():
                self.last_model_path = str(link)
