"""Gradient clipping by global norm under every strategy."""

from __future__ import annotations

import math
from typing import Any

import lightning.pytorch as pl
from torch import nn
from torch.optim import Optimizer

from lit_async_rl.errors import SetupError
from lit_async_rl.stabilizers.gradients import DroppedUpdates, GradSpaces
from lit_async_rl.stabilizers.step_lr import (
    check_choice,
    chosen_index,
    metric_suffix,
    raw_optimizer,
    tolerate_dropped_gradients,
    unscale_gradients,
)
from lit_async_rl.utils.checks import check_range
from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer


class GradientClipping(pl.Callback):
    """g <- g * min(1, max_norm / ||g||), with the norm over all shards, ranks and devices.

    `Trainer(gradient_clip_val=...)` refuses norms under FSDP1, fails with tensor parallelism and with fused optimizers
    under loss scaling; this works under every strategy. Put it last in the list of callbacks, after the
    other stabilizers. A step whose gradient contains NaN or infinity is dropped (weights and optimizer state are
    unchanged, also by weight decay; Lightning still advances the scheduler), logged and counted.

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
        norm = space.norms(gradients)[0].item()
        self.dropped.note(not math.isfinite(norm), index)
        if not math.isfinite(norm):
            space.drop([0])
            return {"grad/clip_scale": 0.0, "grad/num_dropped": float(self.dropped.total)}
        # 1e-6 as in `torch.nn.utils.clip_grad_norm_`, so that results agree
        scale = self.max_norm / (norm + 1e-6) if norm > self.max_norm else 1.0
        space.scale_(gradients, [scale])
        return {"grad/norm": norm, "grad/clip_scale": scale, "grad/num_dropped": float(self.dropped.total)}

    def on_train_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        check_choice(trainer, pl_module, self.optimizer, owner="GradientClipping")
        self._spaces = GradSpaces()
        self.dropped.begin()
        tolerate_dropped_gradients(trainer)

    def on_before_optimizer_step(self, trainer: AnyTrainer, pl_module: AnyModule, optimizer: Optimizer) -> None:
        index = chosen_index(trainer, pl_module, optimizer, choice=self.optimizer)
        if index is None:
            return
        unscale_gradients(trainer, optimizer)
        if trainer.strategy.model is None:
            raise SetupError("GradientClipping was used before the Trainer had a model")
        suffix = metric_suffix(trainer, self.optimizer, index)
        for name, value in self.apply(trainer.strategy.model, optimizer, index).items():
            pl_module.log(name + suffix, value)

    def on_train_batch_start(self, trainer: AnyTrainer, pl_module: AnyModule, batch: Any, batch_idx: int) -> None:
        """Fails the run after too many dropped steps, once all callbacks have completed the last one."""
        self.dropped.check()

    @property
    def state_key(self) -> str:
        """Key of the checkpointed state; distinguishes instances for different optimizers."""
        return self._generate_state_key(optimizer=self.optimizer)

    def state_dict(self) -> dict[str, int]:
        return {"num_dropped": self.dropped.total}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.dropped.total = state_dict["num_dropped"]
