"""LightningModule with complete optimizer steps: in training, in checkpoints, and after a resume.

Also tells whether a step changed the weights, which callbacks can prevent.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch.optim import Optimizer

from lit_async_rl.stabilizers.step_lr import overflows
from lit_async_rl.training.checkpoint_notices import tell_loggers_after_saving
from lit_async_rl.training.optimizer import gradients
from lit_async_rl.training.step_guard import StepGuard, count_whole_steps
from lit_async_rl.training.step_saves import SavesBetweenUpdates
from lit_async_rl.types import RolloutBatch
from lit_async_rl.utils.saving import check_last_is_saved


class WholeSteps(pl.LightningModule):
    """Checks the micro-batches of each step, and aligns checkpoints with the start of a step.

    A subclass calls `guard.admit` in its `training_step`.

    Attributes:
        guard: of the present fit.
    """

    def __init__(self) -> None:
        super().__init__()
        self.guard = StepGuard()
        self._saves: SavesBetweenUpdates | None = None
        self._updated = False

    @property
    def is_changed(self) -> bool:
        """Whether the weights changed since their publication."""
        return self._updated

    def mark_updated(self) -> None:
        """Marks the weights as changed by other means than the optimizer, to be published."""
        self._updated = True

    def take_updated(self) -> bool:
        """Whether the weights have changed since the last call."""
        updated, self._updated = self._updated, False
        return updated

    def setup(self, stage: str) -> None:
        if stage == "fit":
            self.guard = guard = StepGuard()
            self._saves = SavesBetweenUpdates(self.trainer, lambda: guard.is_updating(self.trainer.global_step))
            tell_loggers_after_saving(self.trainer)

    def on_after_backward(self) -> None:
        """Runs after all callbacks."""
        self.guard.accumulated()

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Raises if micro-batches of the step are missing; after all callbacks, one of which may drop the gradients."""
        self.guard.check_whole()
        self._updated |= any(True for _ in gradients(optimizer)) and not overflows(self.trainer, optimizer)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Makes the step, and frees the gradients: what is published and the next activations need memory, too.

        Lightning frees them after the next `training_step`, which is also too late for norms under FSDP1.
        """
        super().optimizer_step(*args, **kwargs)
        for optimizer in self.trainer.optimizers:
            optimizer.zero_grad()

    def on_train_batch_end(self, outputs: Any, batch: RolloutBatch, batch_idx: int) -> None:
        """Writes checkpoints deferred during the update."""
        if self._saves is not None:
            self._saves.flush()

    def teardown(self, stage: str) -> None:
        """Ends a run that was not interrupted.

        Raises:
            LastCheckpointError: a full disk did not take the last checkpoint.
        """
        if self._saves is not None:
            self._saves.remove()
            self._saves = None
        if stage == "fit":
            check_last_is_saved(self.trainer)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds whether there is a change to publish, and the random state; within a step, that of its start."""
        checkpoint["updated"] = self._updated
        began = self.guard.random_state if self.guard.is_within(self.trainer.global_step) else None
        checkpoint["random_state"] = torch.get_rng_state() if began is None else began
        checkpoint["micro_batches_per_step"] = self.trainer.accumulate_grad_batches
        count_whole_steps(checkpoint, self.trainer.accumulate_grad_batches)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Inverse of `on_save_checkpoint`; converts Lightning's counters to this run's micro-batches."""
        self._updated = checkpoint["updated"]
        if self._trainer is not None:  # an export has none
            now = self.trainer.accumulate_grad_batches
            count_whole_steps(checkpoint, checkpoint.get("micro_batches_per_step", now), now)
        torch.set_rng_state(checkpoint["random_state"].cpu())
