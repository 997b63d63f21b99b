"""Norm of the gradient, and its cosine with the previous one."""

from __future__ import annotations

import math

import lightning.pytorch as pl
import torch
from torch.optim import Optimizer

from lit_async_rl.stabilizers.gradients import GradSpaces
from lit_async_rl.stabilizers.reference_gradients import ReferenceGradients, cosine
from lit_async_rl.stabilizers.step_lr import metric_suffix, optimizer_index, raw_optimizer, unscale_gradients
from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer


class GradientMonitor(pl.Callback):
    """Logs `grad/norm` (before clipping) and `grad/cosine` with the gradient of the previous step.

    Stale data align consecutive gradients (GAC, arXiv:2603.01501). Keeps one copy of
    this rank's gradient. Put it before callbacks that change gradients. With several optimizers the names
    end in `/0`, `/1`, and so on. A gradient with NaN or infinity has neither norm nor cosine.

    Args:
        cosine: False logs the norm only, and keeps no copy.
    """

    def __init__(self, cosine: bool = True) -> None:
        self.cosine = cosine
        self._spaces, self._previous = GradSpaces(), ReferenceGradients()

    def on_train_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        self._spaces, self._previous = GradSpaces(), ReferenceGradients()  # parameters are sharded by now

    @torch.no_grad()
    def on_before_optimizer_step(self, trainer: AnyTrainer, pl_module: AnyModule, optimizer: Optimizer) -> None:
        unscale_gradients(trainer, optimizer)
        index = optimizer_index(trainer, optimizer)
        suffix = metric_suffix(trainer, None, index)
        space = self._spaces.of(trainer.strategy.model or pl_module, raw_optimizer(optimizer))
        gradients = space.gradients()
        gg, gp, pp = self._previous.products(space, gradients, index)[0].tolist()
        if not math.isfinite(gg):
            return
        pl_module.log(f"grad/norm{suffix}", math.sqrt(gg))
        if (c := cosine(gg, gp, pp)) is not None:
            pl_module.log(f"grad/cosine{suffix}", c)
        if self.cosine:
            self._previous.keep(space, gradients, index)
