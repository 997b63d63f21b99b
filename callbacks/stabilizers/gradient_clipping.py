"""Gradient clipping by global norm under every strategy."""

from __future__ import annotations

import math
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lit_async_rl.stabilizers.gradients import DroppedUpdates, GradientTreatment, GradSpaces, is_dropped_before
from lit_async_rl.stabilizers.step_lr import finds_scale, optimizer_index, raw_optimizer
from lit_async_rl.utils.checks import check_range
from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer


class GradientClipping(GradientTreatment):
    """g <- g * min(1, max_norm / ||g||), with the norm over all shards, ranks and devices.

    `Trainer(gradient_clip_val=...)` refuses norms under FSDP1, and fails with tensor parallelism and with fused
    optimizers under loss scaling; this works under every strategy. Put it last in the list of callbacks. A step whose
    gradient contains NaN or infinity is dropped (weights and optimizer state are unchanged, also by weight decay;
    Lightning still advances the scheduler), and counted with a warning unless `SkipNonFinite`, with its own limit, has
    dropped it before.

    Logs `grad/norm` (before clipping; not for a non-finite gradient), `grad/clip_scale` (1: unchanged, 0: dropped) and
    `grad/num_dropped` (steps so far).

    Args:
        max_norm: largest norm; `inf` only logs.
        optimizer: optimizer to clip, by position or submodule name; None clips each independently.
        max_in_a_row: consecutive dropped steps above which the run fails; None is no limit.

    Raises:
        ValueError: `max_norm` is not positive, or the limit is negative.
    """

    def __init__(
        self, max_norm: float = 1.0, optimizer: int | str | None = None, max_in_a_row: int | None = 10
    ) -> None:
        check_range("GradientClipping", "positive", max_norm=None if max_norm == math.inf else max_norm)
        self.max_norm = max_norm
        self.optimizer = optimizer
        self.max_in_a_row = max_in_a_row
        self.dropped = DroppedUpdates("GradientClipping", max_in_a_row)
        self._spaces = GradSpaces()
        self._finds_scale = False  # the loss scaler skips this step
        self._is_gone = False  # the gradient of this step, which another callback has dropped
        self._is_counted = False  # by that one

    def apply(self, root: nn.Module, optimizer: Optimizer, index: int = 0) -> dict[str, float]:
        """Clips the gradients between backward and step, in any loop; returns the metrics.

        Args:
            root: outermost module (the FSDP or DDP wrapper, if there is one).
            optimizer: optimizer of the gradients.
            index: position of the optimizer, if there are several.
        """
        optimizer = raw_optimizer(optimizer)
        space = self._spaces.of(root, optimizer)
        gradients = space.gradients()
        norm = space.norm(gradients)
        is_broken = self._is_gone or not math.isfinite(norm)
        self.dropped.note(is_broken and not self._finds_scale and not self._is_counted, index)
        if is_broken:
            space.drop()
            return {"grad/clip_scale": 0.0, "grad/num_dropped": float(self.dropped.total)}
        # 1e-6 as in `torch.nn.utils.clip_grad_norm_`, so that results agree
        scale = self.max_norm / (norm + 1e-6) if norm > self.max_norm else 1.0
        space.scale_(gradients, scale)
        return {"grad/norm": norm, "grad/clip_scale": scale, "grad/num_dropped": float(self.dropped.total)}

    def on_train_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._spaces = GradSpaces()
        self.dropped.begin()

    def on_before_optimizer_step(self, trainer: AnyTrainer, pl_module: AnyModule, optimizer: Optimizer) -> None:
        """Clips; overflows by which the loss scaler finds its scale do not count."""
        self._finds_scale = finds_scale(trainer, raw_optimizer(optimizer))
        index = optimizer_index(trainer, optimizer)
        self._is_gone = is_dropped_before(trainer, self, index)
        self._is_counted = is_dropped_before(trainer, self, index, is_counted=True)
        try:
            super().on_before_optimizer_step(trainer, pl_module, optimizer)
        finally:
            self._finds_scale = self._is_gone = self._is_counted = False  # of this step, and not of a later `apply`

    def has_dropped(self, index: int) -> bool:
        """Whether the last update of the optimizer at position `index` was dropped."""
        return self.dropped.is_in_a_row(index)

    def on_train_batch_start(self, trainer: AnyTrainer, pl_module: AnyModule, batch: Any, batch_idx: int) -> None:
        """Fails the run after too many dropped steps, once all callbacks have finished the last."""
        self.dropped.check()

    def state_dict(self) -> dict[str, int]:
        return {"num_dropped": self.dropped.total}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.dropped.total = state_dict["num_dropped"]
