"""Gradient alignment control (GAC, arXiv:2603.01501): thresholds and projection as pure functions of a cosine.

g is the step's gradient, p the reference gradient, c = <g, p> / (|g| |p|). Projection keeps a share a of the component
of g along p:

    g~ = g - (1 - a) (<g, p> / |p|^2) p,      |g~|^2 = |g|^2 (1 - c^2 + a^2 c^2),      <g~, g> >= 0

The value of a, the thresholds, the sign of c and the choice of p are not established by the paper, and are therefore
options, see `GradientAlignmentControl`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import IntEnum

from jaxtyping import Float64
from torch import Tensor

from lit_async_rl.stabilizers.gradients import GradSpace, Pieces
from lit_async_rl.utils.checks import check_range

# -- Cosine of each step's gradient with a reference gradient, by default that of the step before ---------------------


def cosine(gg: float, gp: float, pp: float) -> float | None:
    """C = <g, p> / (|g| |p|), clamped to [-1, 1], from inner products; None if |g| or |p| is 0, or |g| not finite."""
    if not (math.isfinite(gg) and gg > 0 and pp > 0):
        return None
    return max(-1.0, min(1.0, gp / math.sqrt(gg) / math.sqrt(pp)))


class ReferenceGradients:
    """Reference gradient p of each optimizer, as this rank's pieces (see `GradSpace`).

    p is zero until it is set, and again once parameters are added to the optimizer. Takes the memory of one gradient
    shard per optimizer; not checkpointed.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[GradSpace, list[Tensor | None]]] = {}

    def of(self, space: GradSpace, index: int = 0) -> list[Tensor | None]:
        """Pieces of p for the optimizer at position `index`; writing to the list changes p."""
        known = self._known.get(index)
        if known is None or known[0] is not space:  # pieces of another space belong to other parameters
            known = self._known[index] = (space, [None] * len(space.params))
        return known[1]

    def products(self, space: GradSpace, gradients: Pieces, index: int = 0) -> Float64[Tensor, "3"]:
        """Global <g, g>, <g, p> and <p, p>. One collective: all ranks call."""
        p = self.of(space, index)
        return space.dots((gradients, gradients), (gradients, p), (p, p))

    def keep(self, space: GradSpace, gradients: Pieces, index: int = 0) -> None:
        """Makes a copy of `gradients` the reference."""
        self.of(space, index)[:] = [None if piece is None else piece.clone() for piece in gradients]


class Regime(IntEnum):
    """Treatment of a step; the number is logged as `gac/regime`."""

    APPLY = 0
    PROJECT = 1
    SKIP = 2
    DROP = 3  # the gradient contained NaN or infinity


@dataclass
class AlignedStep:
    """Measurements and treatment of one step.

    Attributes:
        norm: |g|.
        cosine: c; None without a reference.
        slope: <g, p> / |p|^2.
        regime: treatment of the step.
        kept: share a of the parallel component that is kept.
    """

    norm: float
    cosine: float | None
    slope: float
    regime: Regime = Regime.APPLY
    kept: float = 1.0

    @classmethod
    def of(cls, gg: float, gp: float, pp: float) -> AlignedStep:
        """Step from the global inner products <g, g>, <g, p> and <p, p>."""
        norm = math.sqrt(gg) if gg >= 0 else math.nan
        c = cosine(gg, gp, pp)
        return cls(norm, c, 0.0 if c is None else gp / pp)


class Residual(ABC):
    """Rule for a, the share of the parallel component that a projection keeps."""

    @abstractmethod
    def share(self, cosine: float, low: float) -> float:
        """The share a in [0, 1] for |c| = `cosine` above the threshold `low`."""


@dataclass(frozen=True)
class FullRemoval(Residual):
    """a = 0 removes the parallel component, the most direct reading of the paper."""

    def share(self, cosine: float, low: float) -> float:
        """Returns 0."""
        return 0.0


@dataclass(frozen=True)
class ExactResidual(Residual):
    """a = low sqrt(1 - c^2) / (c sqrt(1 - low^2)): the projected gradient has a cosine of exactly `low`.

    Not from the paper. Continuous at the threshold, where a = 1.
    """

    def share(self, cosine: float, low: float) -> float:
        return low * math.sqrt(1 - cosine**2) / (cosine * math.sqrt(1 - low**2))


@dataclass(frozen=True)
class FixedResidual(Residual):
    """Constant a; 1 changes nothing. Not from the paper.

    Args:
        kept: a, in [0, 1].
    """

    kept: float = 0.5

    def __post_init__(self) -> None:
        check_range("FixedResidual", "in [0, 1]", kept=self.kept)

    def share(self, cosine: float, low: float) -> float:
        """Returns `kept`."""
        return self.kept


class Reference(ABC):
    """Rule for the reference gradient p."""

    @abstractmethod
    def update(self, reference: Tensor, raw: Tensor, applied: Tensor | None) -> None:
        """Updates this rank's piece of p in place.

        Args:
            reference: piece of p.
            raw: piece of the gradient before projection.
            applied: piece of the gradient passed to the optimizer; None if the step is skipped.
        """


@dataclass(frozen=True)
class LastRaw(Reference):
    """Previous gradient before projection, applied or not: removes a persistent drift at every step."""

    def update(self, reference: Tensor, raw: Tensor, applied: Tensor | None) -> None:
        """Copies the raw gradient."""
        reference.copy_(raw)


@dataclass(frozen=True)
class LastProjected(Reference):
    """Gradient last passed to the optimizer: removes a constant drift only at every second step."""

    def update(self, reference: Tensor, raw: Tensor, applied: Tensor | None) -> None:
        """Copies the applied gradient, unless the step is skipped."""
        if applied is not None:
            reference.copy_(applied)


@dataclass(frozen=True)
class MovingAverage(Reference):
    """Exponential moving average of unprojected gradients over steps that were not skipped.

    Args:
        decay: weight of the old average, in [0, 1).
    """

    decay: float = 0.9

    def __post_init__(self) -> None:
        check_range("MovingAverage", "in [0, 1)", decay=self.decay)

    def update(self, reference: Tensor, raw: Tensor, applied: Tensor | None) -> None:
        if applied is not None:
            reference.lerp_(raw, 1 - self.decay)


@dataclass(frozen=True, kw_only=True)
class AlignmentRule:
    """Maps a cosine to a regime and the share a of the parallel component that is kept.

    The arguments are those of `GradientAlignmentControl`. A projection that leaves less than `min_remainder` of the
    gradient's norm is a skip, because Adam would amplify the remaining rounding noise to a full-sized step.
    """

    low: float
    high: float
    residual: Residual
    two_sided: bool
    max_consecutive_skips: int
    min_remainder: float

    def __post_init__(self) -> None:
        owner = "GradientAlignmentControl"
        check_range(owner, "in [0, 1]", low=self.low)
        check_range(owner, f"in [{self.low}, 1]", high=self.high)
        check_range(owner, "integer >= 0", max_consecutive_skips=self.max_consecutive_skips)
        check_range(owner, "in (0, 1]", min_remainder=self.min_remainder)

    def decide(self, cosine: float, num_skipped: int) -> tuple[Regime, float]:
        """Regime and a (1 when applied, 0 when skipped) after `num_skipped` consecutive skips."""
        size = abs(cosine) if self.two_sided else cosine
        if size <= self.low:
            return Regime.APPLY, 1.0
        share = self.residual.share(size, self.low)
        remainder = math.sqrt(max(0.0, 1 - size**2 + (share * size) ** 2))
        if size <= self.high and remainder >= self.min_remainder:
            return Regime.PROJECT, share
        if self.high < 1 and num_skipped < self.max_consecutive_skips:  # at 1 nothing is skipped, noise neither
            return Regime.SKIP, 0.0
        if remainder < self.min_remainder:  # keep a part, or a constant gradient direction would never be applied
            share = max(share, min(1.0, max(self.low, self.min_remainder) / size))
        return Regime.PROJECT, share

    def calibrated(self, cosines: list[float], quantile: float) -> tuple[float, float]:
        """Thresholds (low, high) from cosines seen without intervention.

        `low` is their quantile (of |c| if two-sided, not below 0), `high` keeps its place between `low` and 1.
        """
        sizes = sorted(abs(c) if self.two_sided else c for c in cosines)
        low = max(0.0, sizes[min(len(sizes) - 1, int(quantile * len(sizes)))])
        place = (self.high - self.low) / (1 - self.low) if self.low < 1 else 1.0
        return low, low + (1 - low) * place
