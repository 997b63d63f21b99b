"""Norm of the gradient, and its cosine with the previous one."""

from __future__ import annotations

import math

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.optim import Optimizer

from lit_async_rl.stabilizers.alignment import ReferenceGradients, cosine
from lit_async_rl.stabilizers.gradients import GradSpace, GradSpaces, Pieces, is_dropped_before
from lit_async_rl.stabilizers.step_lr import (
    is_left_out,
    metric_suffix,
    optimizer_index,
    raw_optimizer,
    unscale_gradients,
)
from lit_async_rl.utils.checks import check_range
from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer


class GradientMonitor(pl.Callback):
    """Logs `grad/norm` (before clipping) and `grad/cosine` with the gradient of the previous step.

    Stale data align consecutive gradients (GAC, arXiv:2603.01501). Callbacks that run before it (by default the
    stabilizers) may have changed the gradient. With several optimizers the names end in `/0`, `/1`, and so on. Nothing
    is logged for a gradient with NaN or infinity.

    The norm is exact, and so is the cosine of a small gradient, which is copied. Of a larger one it stores a random
    projection (256 kB, and 4 MB of signs) that estimates the cosine with a standard error of 0.004 to 0.0055, see
    `lit_async_rl.stabilizers.gradients`.

    Args:
        cosine: False logs the norm only, and stores no gradient.
        max_copied: largest piece of a gradient to copy, in elements per rank.

    Raises:
        ValueError: `max_copied` is negative.
    """

    def __init__(self, cosine: bool = True, max_copied: int = 4_000_000) -> None:
        check_range("GradientMonitor", "integer >= 0", max_copied=max_copied)
        self.cosine = cosine
        self.max_copied = max_copied
        self._reset()

    def _reset(self) -> None:
        self._spaces = GradSpaces()
        self._previous = ReferenceGradients()
        self._decided: dict[int, tuple[GradSpace, bool]] = {}  # by optimizer: whether its gradient is copied
        self._sketches: dict[int, tuple[GradSpace, list[Tensor], float]] = {}  # by optimizer, with the squared norm

    def on_train_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        self._reset()  # strategies have sharded the parameters since `__init__`

    @torch.no_grad()
    def on_before_optimizer_step(self, trainer: AnyTrainer, pl_module: AnyModule, optimizer: Optimizer) -> None:
        if is_left_out(trainer, raw_optimizer(optimizer)):
            return
        unscale_gradients(trainer, optimizer)
        index = optimizer_index(trainer, optimizer)
        suffix = metric_suffix(trainer, None, index)
        space = self._spaces.of(trainer.strategy.model or pl_module, raw_optimizer(optimizer))
        gradients = space.gradients()
        copies = self.cosine and self._may_copy(trainer, space, index)
        gg, gp, pp = self._previous.products(space, gradients, index).tolist()
        if not math.isfinite(gg) or is_dropped_before(trainer, self, index):
            return
        pl_module.log(f"grad/norm{suffix}", math.sqrt(gg))
        if copies:
            self._previous.keep(space, gradients, index)
        elif self.cosine:
            gp, pp = self._sketched(space, gradients, index, gg=gg)
        if (c := cosine(gg, gp, pp)) is not None:
            pl_module.log(f"grad/cosine{suffix}", c)

    def _may_copy(self, trainer: AnyTrainer, space: GradSpace, index: int) -> bool:
        """Whether no rank's piece of the gradient is too large. All decide alike: sketches take another collective."""
        known = self._decided.get(index)
        if known is None or known[0] is not space:
            pieces = space.weights()
            sizes = zip(pieces, space.params, strict=True)
            size = sum(piece.numel() for piece, param in sizes if param.requires_grad)
            own = torch.tensor(float(size), device=pieces[0].device)
            largest = float(trainer.strategy.reduce(own, reduce_op="max"))
            known = self._decided[index] = space, largest <= self.max_copied
        return known[1]

    def _sketched(self, space: GradSpace, gradients: Pieces, index: int, gg: float) -> tuple[float, float]:
        """Estimated inner product with the previous gradient, and the latter's squared norm; 0 if there is none."""
        known = self._sketches.get(index)
        own = space.sketches(gradients)
        self._sketches[index] = (space, own, gg)
        if known is None or known[0] is not space:
            return 0.0, 0.0
        return space.sketch_dot(own, known[1]), known[2]
