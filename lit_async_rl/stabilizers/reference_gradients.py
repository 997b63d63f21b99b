"""Cosine of each step's gradient with a reference gradient, by default that of the step before."""

from __future__ import annotations

import math

from jaxtyping import Float64
from torch import Tensor

from lit_async_rl.stabilizers.gradients import GradSpace, Pieces


def cosine(gg: float, gp: float, pp: float) -> float | None:
    """C = <g, p> / (|g| |p|), clamped to [-1, 1], from inner products; None if |g| or |p| is 0, or |g| not finite."""
    if not (math.isfinite(gg) and gg > 0 and pp > 0):
        return None
    return max(-1.0, min(1.0, gp / math.sqrt(gg) / math.sqrt(pp)))


class ReferenceGradients:
    """Reference gradient p of each optimizer, as this rank's pieces (see `GradSpace`).

    p is zero until it is first set, and again after parameters were added to the optimizer. Takes the memory of one
    gradient shard per optimizer; not checkpointed.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[GradSpace, list[Tensor | None]]] = {}

    def of(self, space: GradSpace, index: int = 0) -> list[Tensor | None]:
        """Pieces of p for the optimizer at position `index`; writing to the list changes p."""
        known = self._known.get(index)
        if known is None or known[0] is not space:
            known = self._known[index] = (space, [None] * len(space.params))
        return known[1]

    def products(self, space: GradSpace, gradients: Pieces, index: int = 0) -> Float64[Tensor, "G 3"]:
        """Global <g, g>, <g, p> and <p, p> of each parameter group. One collective: all ranks call."""
        p = self.of(space, index)
        return space.dots((gradients, gradients), (gradients, p), (p, p)).T

    def keep(self, space: GradSpace, gradients: Pieces, index: int = 0) -> None:
        """Makes a copy of `gradients` the reference."""
        self.of(space, index)[:] = [None if piece is None else piece.clone() for piece in gradients]
