"""Size and direction of the gradient."""

from __future__ import annotations

import math

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.optim import Optimizer

from lit_async_rl.stabilizers.gradients import GradSpace, GradSpaces
from lit_async_rl.stabilizers.step_lr import metric_suffix, optimizer_index, raw_optimizer, unscale_gradients
from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer


class GradientMonitor(pl.Callback):
    """Logs `grad/norm` (before clipping) and `grad/cosine` with the step before; changes nothing.

    Stale data show here first: consecutive gradients that point the same way (GAC, arXiv:2603.01501). Keeps one copy of
    this rank's gradient. Put it before callbacks that change gradients. Of several optimizers each has its own values,
    with `/0`, `/1` behind the name. A gradient with NaN or infinity has neither norm nor cosine.

    Args:
        cosine: False saves the copy and logs the norm only.
    """

    def __init__(self, cosine: bool = True) -> None:
        self.cosine = cosine
        self._spaces = GradSpaces()
        self._previous: dict[int, tuple[GradSpace, list[Tensor | None]]] = {}  # by position of the optimizer

    def on_train_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        """Sharding is done by now."""
        self._spaces, self._previous = GradSpaces(), {}

    @torch.no_grad()
    def on_before_optimizer_step(self, trainer: AnyTrainer, pl_module: AnyModule, optimizer: Optimizer) -> None:
        """Looks at the accumulated gradient."""
        unscale_gradients(trainer, optimizer)
        index = optimizer_index(trainer, optimizer)
        suffix = metric_suffix(trainer, None, index)
        space = self._spaces.of(trainer.strategy.model or pl_module, raw_optimizer(optimizer))
        now = space.gradients()
        known, previous = self._previous.get(index, (None, []))
        if known is not space:  # parameters were added
            previous = [None] * len(now)
        gg, pp, gp = space.dots((now, now), (previous, previous), (now, previous))[:, 0].tolist()
        if not math.isfinite(gg):
            return
        pl_module.log(f"grad/norm{suffix}", math.sqrt(gg))
        if gg > 0 and pp > 0:
            pl_module.log(f"grad/cosine{suffix}", gp / math.sqrt(gg * pp))
        if self.cosine:
            self._previous[index] = space, [None if piece is None else piece.clone() for piece in now]
