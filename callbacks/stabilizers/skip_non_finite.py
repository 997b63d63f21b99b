"""Drops updates with non-finite gradients."""

from __future__ import annotations

import math
from typing import Any

import lightning.pytorch as pl
from torch.optim import Optimizer

from lit_async_rl.stabilizers.gradients import DroppedUpdates, GradSpaces, is_dropped_before
from lit_async_rl.stabilizers.step_lr import (
    finds_scale,
    loss_scaler,
    optimizer_index,
    overflows,
    raw_optimizer,
    tolerate_dropped_gradients,
)
from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer


class SkipNonFinite(pl.Callback):
    """Drops updates whose gradient contains NaN or infinity on any rank; weights, moments and version are unchanged.

    One of the default callbacks. `GradientClipping` does the same, with its own limit; the first of both counts a drop,
    also one by `GradientAlignmentControl`. With loss scaling (`precision: 16-mixed`) the scaler skips such steps and
    lowers its scale; they count here once the scale is at most 1, and cannot be the reason.

    Logs `grad/num_skipped`, the dropped updates, once there are any.

    Args:
        max_in_a_row: consecutive dropped updates above which the run fails; None is no limit.

    Raises:
        ValueError: the limit is negative.
    """

    def __init__(self, max_in_a_row: int | None = 10) -> None:
        self.max_in_a_row = max_in_a_row
        self.dropped = DroppedUpdates("SkipNonFinite", max_in_a_row)
        self._spaces = GradSpaces()

    def on_train_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        self._spaces = GradSpaces()
        self.dropped.begin()
        tolerate_dropped_gradients(trainer)

    def on_before_optimizer_step(self, trainer: AnyTrainer, pl_module: AnyModule, optimizer: Optimizer) -> None:
        """Checks the accumulated gradient; a collective where it is sharded."""
        raw = raw_optimizer(optimizer)
        index = optimizer_index(trainer, optimizer)
        if loss_scaler(trainer) is not None:
            is_broken = overflows(trainer, raw) and not finds_scale(trainer, raw)
        else:
            space = self._spaces.of(trainer.strategy.model or pl_module, raw)
            is_broken = not math.isfinite(space.norm(space.gradients()))
            if is_broken:
                space.drop()
            is_broken = is_broken or is_dropped_before(trainer, self, index)
        is_broken = is_broken and not is_dropped_before(trainer, self, index, is_counted=True)
        self.dropped.note(is_broken, index)
        if self.dropped.total:
            pl_module.log("grad/num_skipped", float(self.dropped.total))

    def has_dropped(self, index: int) -> bool:
        """Whether the last update of the optimizer at position `index` was dropped."""
        return self.dropped.is_in_a_row(index)

    def on_train_batch_start(self, trainer: AnyTrainer, pl_module: AnyModule, batch: Any, batch_idx: int) -> None:
        """Fails the run after too many dropped updates, once all callbacks have finished the last step."""
        self.dropped.check()

    def state_dict(self) -> dict[str, int]:
        return {"num_dropped": self.dropped.total}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.dropped.total = state_dict["num_dropped"]
