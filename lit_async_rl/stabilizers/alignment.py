"""The choices of gradient alignment control (GAC, arXiv:2603.01501) as pure functions of a cosine.

g is the step's gradient, p the reference it is compared with, c = <g, p> / (|g| |p|). Projection keeps a share a of the
component of g along p:

    g~ = g - (1 - a) (<g, p> / |p|^2) p,      |g~|^2 = |g|^2 (1 - c^2 + a^2 c^2),      <g~, g> >= 0

The paper's idea is confirmed: the cosine of consecutive gradients, a projection that splits the gradient into a part
along the previous one and a part orthogonal to it, and thresholds between applying, projecting and skipping. What we
could not establish, and offer as choices: a, the thresholds, the sign of c that matters, and what p is.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import IntEnum

from torch import Tensor


class Regime(IntEnum):
    """What was done with a step; the number is what gets logged."""

    APPLY = 0
    PROJECT = 1
    SKIP = 2
    DROP = 3  # the gradient contained NaN or infinity


class Residual(ABC):
    """Rule for a, the share of the parallel component that a projection keeps."""

    @abstractmethod
    def share(self, cosine: float, low: float) -> float:
        """The share a in [0, 1] for |c| = `cosine` above the threshold `low`."""


@dataclass(frozen=True)
class FullRemoval(Residual):
    """a = 0: nothing of the parallel component stays; the plainest reading of the paper."""

    def share(self, cosine: float, low: float) -> float:
        """0."""
        return 0.0


@dataclass(frozen=True)
class CappedResidual(Residual):
    """a = low / c: the parallel component is cut to low * |g|; ours."""

    def share(self, cosine: float, low: float) -> float:
        """See the class."""
        return low / cosine


@dataclass(frozen=True)
class ExactResidual(Residual):
    """a = low sqrt(1 - c^2) / (c sqrt(1 - low^2)): the projected gradient has a cosine of exactly `low`; ours.

    Continuous at the threshold, where a = 1.
    """

    def share(self, cosine: float, low: float) -> float:
        """See the class."""
        return low * math.sqrt(1 - cosine**2) / (cosine * math.sqrt(1 - low**2))


@dataclass(frozen=True)
class FixedResidual(Residual):
    """A constant a; 1 changes nothing. Ours.

    Args:
        kept: a, in [0, 1].
    """

    kept: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.kept <= 1:
            raise ValueError(f"FixedResidual: kept must be in [0, 1], got {self.kept}")

    def share(self, cosine: float, low: float) -> float:
        """`kept`."""
        return self.kept


class Reference(ABC):
    """Rule for p, what the next gradient is compared with."""

    @abstractmethod
    def update(self, reference: Tensor, raw: Tensor, applied: Tensor | None) -> None:
        """Changes this rank's piece of p in place.

        Args:
            reference: p so far.
            raw: the step's gradient before projection.
            applied: what the optimizer is given; None if the step is skipped.
        """


@dataclass(frozen=True)
class LastRaw(Reference):
    """The previous step's gradient before projection, applied or not: a drift is removed for as long as it lasts."""

    def update(self, reference: Tensor, raw: Tensor, applied: Tensor | None) -> None:
        """Always raw."""
        reference.copy_(raw)


@dataclass(frozen=True)
class LastApplied(Reference):
    """The gradient before projection of the last step that was not skipped."""

    def update(self, reference: Tensor, raw: Tensor, applied: Tensor | None) -> None:
        """Raw, unless skipped."""
        if applied is not None:
            reference.copy_(raw)


@dataclass(frozen=True)
class LastProjected(Reference):
    """What the optimizer was last given: lets a constant drift through every second step."""

    def update(self, reference: Tensor, raw: Tensor, applied: Tensor | None) -> None:
        """What was applied, unless skipped."""
        if applied is not None:
            reference.copy_(applied)


@dataclass(frozen=True)
class MovingAverage(Reference):
    """Exponential average of gradients before projection, of steps that were not skipped; like Adam's first moment.

    Args:
        decay: share of the old average, in [0, 1).
    """

    decay: float = 0.9

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ValueError(f"MovingAverage: decay must be in [0, 1), got {self.decay}")

    def update(self, reference: Tensor, raw: Tensor, applied: Tensor | None) -> None:
        """See the class."""
        if applied is not None:
            reference.lerp_(raw, 1 - self.decay)


@dataclass(frozen=True, kw_only=True)
class AlignmentRule:
    """Which regime a cosine calls for, and how much of the parallel component stays.

    Args:
        low: up to here the gradient is applied as it is; 1 never intervenes.
        high: up to here it is projected, beyond it is skipped; 1 never skips.
        residual: how much of the parallel component a projection keeps.
        two_sided: treat strongly opposed gradients (c < 0) like aligned ones.
        max_consecutive_skips: after so many skips in a row a step is projected instead; 0 never skips.
        min_remainder: a projection that leaves less than this share of the gradient's norm is a skip, because Adam
            would blow the rounding noise that is left up to a full-sized step.
    """

    low: float
    high: float
    residual: Residual
    two_sided: bool
    max_consecutive_skips: int
    min_remainder: float

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high <= 1:
            raise ValueError(f"thresholds must satisfy 0 <= low <= high <= 1, got low={self.low}, high={self.high}")
        if self.max_consecutive_skips < 0:
            raise ValueError(f"max_consecutive_skips must be >= 0, got {self.max_consecutive_skips}")
        if not 0 < self.min_remainder <= 1:
            raise ValueError(f"min_remainder must be in (0, 1], got {self.min_remainder}")

    def decide(self, cosine: float, num_skipped: int) -> tuple[Regime, float]:
        """Regime and a (1 when applied, 0 when skipped), after `num_skipped` skips in a row."""
        size = abs(cosine) if self.two_sided else cosine
        if size <= self.low:
            return Regime.APPLY, 1.0
        share = self.residual.share(size, self.low)
        remainder = math.sqrt(max(0.0, 1 - size**2 + (share * size) ** 2))
        if size <= self.high and remainder >= self.min_remainder:
            return Regime.PROJECT, share
        if num_skipped < self.max_consecutive_skips:
            return Regime.SKIP, 0.0
        if remainder < self.min_remainder:  # never nothing: a constant direction must still move
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
