"""Size and direction of the gradient."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.optim import Optimizer

from lit_async_rl.errors import InvariantError
from lit_async_rl.stabilizers.gradients import GradSpace


class GradientMonitor(pl.Callback):
    """Logs `grad/norm` (before clipping) and `grad/cosine` with the step before; changes nothing.

    Stale data show here first: consecutive gradients that point the same way (GAC, arXiv:2603.01501). Keeps one copy of
    this rank's gradient. Put it before callbacks that change gradients.

    Args:
        cosine: False saves the copy and logs the norm only.
    """

    def __init__(self, cosine: bool = True) -> None:
        self.cosine = cosine
        self._space: GradSpace | None = None
        self._previous: list[Tensor | None] | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Sharding is done by now."""
        parameters = [p for optimizer in trainer.optimizers for g in optimizer.param_groups for p in g["params"]]
        self._space = GradSpace(trainer.strategy.model or pl_module, [parameters])
        self._previous = None

    @torch.no_grad()
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Looks at the accumulated gradient."""
        if self._space is None:
            raise InvariantError("the gradient was not looked at")
        now = self._space.gradients()
        previous = self._previous
        if previous is None:
            norm = float(self._space.norms(now)[0])
        else:
            squares = self._space.dots((now, now), (previous, previous), (now, previous))[:, 0]
            norm = float(squares[0].sqrt())
            if squares[0] > 0 and squares[1] > 0:
                pl_module.log("grad/cosine", float(squares[2] / (squares[0] * squares[1]).sqrt()))
        pl_module.log("grad/norm", norm)
        if self.cosine:
            self._previous = [None if piece is None else piece.clone() for piece in now]
