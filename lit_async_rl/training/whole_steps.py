"""LightningModule with complete optimizer steps: in training, in checkpoints, and after a resume."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch.optim import Optimizer

from lit_async_rl.training.step_guard import StepGuard, count_whole_steps
from lit_async_rl.training.step_saves import SavesBetweenUpdates
from lit_async_rl.types import RolloutBatch


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

    def setup(self, stage: str) -> None:
        if stage == "fit":
            self.guard = guard = StepGuard()
            self._saves = SavesBetweenUpdates(self.trainer, lambda: guard.is_updating(self.trainer.global_step))

    def on_after_backward(self) -> None:
        """Runs after all callbacks."""
        self.guard.accumulated()

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Raises if micro-batches of the step are missing."""
        self.guard.check_whole()

    def on_train_batch_end(self, outputs: Any, batch: RolloutBatch, batch_idx: int) -> None:
        """Writes checkpoints deferred during the update."""
        if self._saves is not None:
            self._saves.flush()

    def teardown(self, stage: str) -> None:
        if self._saves is not None:
            self._saves.remove()
            self._saves = None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds the random state; within a step, that of its start."""
        began = self.guard.random_state if self.guard.is_within(self.trainer.global_step) else None
        checkpoint["random_state"] = torch.get_rng_state() if began is None else began
        checkpoint["micro_batches_per_step"] = self.trainer.accumulate_grad_batches
        count_whole_steps(checkpoint, self.trainer.accumulate_grad_batches)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restores the random state; converts Lightning's counters to this run's micro-batches."""
        if self._trainer is not None:  # an export has none
            now = self.trainer.accumulate_grad_batches
            count_whole_steps(checkpoint, checkpoint.get("micro_batches_per_step", now), now)
        torch.set_rng_state(checkpoint["random_state"].cpu())
