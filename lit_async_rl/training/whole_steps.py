"""Optimizer steps are complete: in training, in checkpoints, and after a resume."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from lightning.pytorch.loggers import Logger
from torch import Tensor

from lit_async_rl.errors import StalenessError, StepError, describe
from lit_async_rl.types import RolloutBatch
from lit_async_rl.utils.lightning_types import AnyTrainer

# -- Defers checkpoints requested during an update to its end ---------------------------------------------------------


log = logging.getLogger(__name__)


class SavesBetweenUpdates:
    """Replaces `trainer.save_checkpoint`, for all its callers (user callbacks, Lightning's, ours).

    Between `on_before_optimizer_step` and the end of the optimizer's step, only some callbacks have processed the step,
    and weights may have changed while counters have not: a checkpoint from there could not be resumed correctly.

    Args:
        trainer: whose method is replaced, until `remove`.
        is_updating: whether an update is in progress.
    """

    def __init__(self, trainer: AnyTrainer, is_updating: Callable[[], bool]) -> None:
        self._trainer = trainer
        self._is_updating = is_updating
        self._pending: list[Callable[[], None]] = []
        self._save = partial(type(trainer).save_checkpoint, trainer)
        trainer.__dict__["save_checkpoint"] = self

    def __call__(self, filepath: Any, weights_only: bool | None = None, storage_options: Any = None) -> None:
        """Saves now, or at the end of the update."""
        if not self._is_updating():
            self._save(filepath, weights_only, storage_options)
            return
        log.warning(
            "checkpoint %s was requested in the middle of an update, and is written at the end of the update", filepath
        )
        self._pending.append(lambda: self._save(filepath, weights_only, storage_options))

    def after_saves(self, task: Callable[[], None]) -> None:
        """Calls `task` once the writer has all that was to be saved so far: now, or at the update's end."""
        if self._pending:
            self._pending.append(task)
        else:
            task()

    def flush(self) -> None:
        """Writes the deferred checkpoints."""
        pending = self._pending
        self._pending = []
        for call in pending:
            call()

    def remove(self) -> None:
        """Restores the trainer's method."""
        self._trainer.__dict__.pop("save_checkpoint", None)


# -- Tells the loggers of a run about a checkpoint when its file is complete ------------------------------------------

REPLACED = ("after_save_checkpoint", "finalize")


def tell_loggers_after_saving(trainer: AnyTrainer) -> None:
    """Defers `after_save_checkpoint` of all loggers to when the checkpoint's file is complete.

    Lightning calls it when `Trainer.save_checkpoint` returns, before a checkpoint written in the background, or at the
    end of an update, is there to be uploaded. The writing thread calls the loggers, so training does not wait for an
    upload (the next checkpoint does). If the file could not be written, they are not called. They get a copy of the
    `ModelCheckpoint` as it was at its save, with the checkpoint itself in place of a link to it.

    `finalize` waits for pending writes, also after a failure, and restores both methods. An error of a tracker in
    either is a warning only.

    Args:
        trainer: about to train; loggers prepared before stay as they are.
    """
    for logger in trainer.loggers:
        if not any(name in vars(logger) for name in REPLACED):
            _Notices(trainer, logger)


class _Notices:
    """Replaces the methods of one logger."""

    def __init__(self, trainer: AnyTrainer, logger: Logger) -> None:
        self._trainer = trainer
        self._logger = logger
        self._told: dict[str, Any] = {}  # `ModelCheckpoint`s as the logger knows them: some keep them until the end
        self._tell = logger.after_save_checkpoint
        self._finalize = logger.finalize
        for name in REPLACED:
            vars(logger)[name] = getattr(self, name)

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """Notifies the logger after the save, with the state that the callback has now."""
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
        """Waits for pending writes, whose errors the run itself raises, and ends the logger."""
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
    """Copy of a `ModelCheckpoint`, of which Lightning hands out a proxy."""
    kind = checkpoint_callback.__class__
    copied = kind.__new__(kind)
    for name, value in checkpoint_callback.__dict__.items():
        vars(copied)[name] = value.copy() if isinstance(value, dict | list | set) else value
    if getattr(copied, "save_last", None) == "link" and getattr(copied, "_last_checkpoint_saved", ""):
        copied.last_model_path = copied._last_checkpoint_saved
    return copied


# -- Checks that every optimizer step consists of exactly its micro-batches, each once, and that no token is too old
# A micro-batch carries the step it was made for, its index there, and the staleness bound of each row. A checkpoint
# saved within a step starts with that step, because its gradients are not saved.


class StepGuard:
    """Tracks the micro-batches of a run.

    Attributes:
        step: global step of the last admitted micro-batch; -1 before the first one.
        num_admitted: micro-batches of that step so far, of `num_micro_batches`.
        random_state: torch's, when that step began.
    """

    def __init__(self) -> None:
        self.step = -1
        self.num_admitted = self.num_micro_batches = 0
        self.random_state: Tensor | None = None
        self._last_batch_idx = -1
        self._is_accumulated = False

    def admit(self, batch: RolloutBatch, batch_idx: int, global_step: int, version: int) -> None:
        """Checks the next micro-batch; without a step (other data modules) only the age of its tokens.

        Args:
            batch: to be trained on.
            batch_idx: Lightning's; repeated by an optimizer that evaluates the loss several times.
            global_step: optimizer steps so far.
            version: of the policy.

        Raises:
            StepError: it was made for another step, is repeated, or its predecessor is missing.
            StalenessError: a token is too old.
        """
        if batch.step is not None:
            self._admit(batch, batch_idx, global_step)
        check_staleness(batch, version)

    def _admit(self, batch: RolloutBatch, batch_idx: int, global_step: int) -> None:
        is_repeated = self.step == global_step and self._last_batch_idx == batch_idx
        if self.step != global_step:
            self.num_admitted = 0
        expected = self.num_admitted - is_repeated
        if batch.step != global_step or batch.micro_batch != expected:
            raise StepError(
                f"optimizer step {global_step} needs its micro-batch {expected}, but got micro-batch "
                f"{batch.micro_batch} of step {batch.step}. Set trainer.accumulate_grad_batches to "
                f"data.micro_batches_per_step={batch.num_micro_batches}, and trainer.limit_train_batches to a multiple "
                "of that number"
            )
        if expected == 0 and not is_repeated:
            self.random_state = torch.get_rng_state()
        self.step = global_step
        self.num_admitted = expected + 1
        self.num_micro_batches = batch.num_micro_batches
        self._last_batch_idx = batch_idx
        self._is_accumulated = False

    def accumulated(self) -> None:
        """Records that the micro-batch's gradients were accumulated."""
        self._is_accumulated = True

    def check_whole(self) -> None:
        """Checks that the step is complete; called before the optimizer's step.

        Raises:
            StepError: micro-batches are missing.
        """
        if self.num_admitted != self.num_micro_batches:
            raise StepError(
                f"step {self.step} got only {self.num_admitted} of its {self.num_micro_batches} micro-batches: "
                "set trainer.accumulate_grad_batches to data.micro_batches_per_step, and trainer.limit_train_batches "
                "to a multiple of data.micro_batches_per_step"
            )

    def is_within(self, global_step: int) -> bool:
        """Whether some of the step's micro-batches were trained on, and the optimizer has not stepped."""
        return self.step == global_step

    def is_updating(self, global_step: int) -> bool:
        """Whether the step's gradient is complete, and the optimizer has not stepped."""
        return self.is_within(global_step) and self._is_accumulated and self.num_admitted == self.num_micro_batches


def check_staleness(batch: RolloutBatch, version: int) -> None:
    """Checks every trained token against its row's bound.

    Raises:
        StalenessError: a token exceeds the bound, or is newer than the policy.
    """
    if batch.max_staleness is None:
        return
    staleness = version - batch.versions
    is_wrong = batch.loss_mask & ((staleness > batch.max_staleness[:, None]) | (staleness < 0))
    if bool(is_wrong.any()):
        row, position = is_wrong.nonzero()[0].tolist()
        found = int(batch.versions[row, position])
        bound = int(batch.max_staleness[row])
        raise StalenessError(
            f"a token of group {int(batch.group_index[row])} was sampled by policy version {found}, so policy version "
            f"{version} cannot be trained on it ({int(is_wrong.sum())} tokens of the batch are affected): a token may "
            f"be at most max_staleness={bound} versions older than the policy, and never newer"
        )


def count_whole_steps(checkpoint: dict[str, Any], micro_batches_per_step: int, in_future: int | None = None) -> None:
    """Resets a checkpoint saved within an optimizer step to the start of that step.

    The step's gradients are not saved. `processed` counts a step's last micro-batch only after the optimizer's step.

    Args:
        checkpoint: changed in place.
        micro_batches_per_step: of the run that saved it.
        in_future: of the run that resumes from it; None is the same number.
    """
    if "loops" not in checkpoint:  # weights only
        return
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    current = progress["current"]
    total = progress["total"]
    steps = current["processed"] // micro_batches_per_step
    number = in_future or micro_batches_per_step
    is_within = current["ready"] != steps * micro_batches_per_step
    before = (total["ready"] - current["ready"]) // micro_batches_per_step
    if is_within:
        progress["is_last_batch"] = False
    for counts, whole in ((current, steps), (total, before + steps)):
        lag = 0 if is_within else counts["ready"] - counts["completed"]  # saved at the end of the step's last one
        counts.update(dict.fromkeys(counts, whole * number))
        counts["completed"] -= lag


# -- Both for the module that trains ----------------------------------------------------------------------------------


class WholeSteps:
    """Checks the micro-batches of each step, and aligns checkpoints with the start of a step.

    Attributes:
        guard: of the present fit.
    """

    def __init__(self) -> None:
        self.guard = StepGuard()
        self._saves: SavesBetweenUpdates | None = None

    def begin_fit(self, trainer: AnyTrainer) -> None:
        """Starts over, and takes control of when checkpoints are written and loggers are told."""
        self.guard = guard = StepGuard()
        self._saves = SavesBetweenUpdates(trainer, lambda: guard.is_updating(trainer.global_step))
        tell_loggers_after_saving(trainer)

    def end_update(self) -> None:
        """Writes the checkpoints deferred during the update."""
        if self._saves is not None:
            self._saves.flush()

    def end_fit(self) -> None:
        """Gives back what `begin_fit` took over. Safe to call twice."""
        if self._saves is not None:
            self._saves.remove()
            self._saves = None

    def save(self, checkpoint: dict[str, Any], trainer: AnyTrainer) -> None:
        """Adds the random state, and within a step resets it and the counters to the step's start."""
        began = self.guard.random_state if self.guard.is_within(trainer.global_step) else None
        checkpoint["random_state"] = torch.get_rng_state() if began is None else began
        checkpoint["micro_batches_per_step"] = trainer.accumulate_grad_batches
        count_whole_steps(checkpoint, trainer.accumulate_grad_batches)

    @staticmethod
    def load(checkpoint: dict[str, Any], trainer: AnyTrainer | None) -> None:
        """Inverse of `save`; converts Lightning's counters to this run's micro-batches.

        Does nothing without a trainer: an export and `load_from_checkpoint` keep the random numbers of the calling
        program.
        """
        if trainer is None:
            return
        now = trainer.accumulate_grad_batches
        count_whole_steps(checkpoint, checkpoint.get("micro_batches_per_step", now), now)
        torch.set_rng_state(checkpoint["random_state"].cpu())
