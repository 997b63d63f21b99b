"""Learning-rate schedules that take their height from `model.learning_rate` and their length from `trainer.max_steps`.

A schedule is a function of the step, the peak rate and the number of steps of the run. Nothing of it is checkpointed
but the step, so a run that is resumed with another rate or more steps follows the schedule of its own settings.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from lit_async_rl.utils.checks import check_range


@dataclass(frozen=True, kw_only=True)
class RateSchedule(ABC):
    """A learning rate by optimizer step, as a function of the peak rate and the length of the run.

    Args:
        warmup: optimizer steps until the peak rate; below 1, that share of the run.

    Raises:
        ValueError: a setting is out of range.
    """

    warmup: int | float = 0.0

    def __post_init__(self) -> None:
        check_range("model.scheduler", ">= 0", warmup=self.warmup)

    @abstractmethod
    def rate(self, peak: float, step: int, num_steps: int) -> float:
        """The rate of the optimizer step number `step`, counted from 0."""

    def momentum(self, step: int, num_steps: int) -> float | None:
        """Momentum (Adam: beta1) of that step; None leaves it alone."""
        return None

    @property
    def needs_length(self) -> bool:
        """Whether the rate depends on the length of the run."""
        return True

    def warmup_steps(self, num_steps: int) -> float:
        """The warm-up in optimizer steps."""
        return float(self.warmup * num_steps if self.warmup < 1 else self.warmup)

    def warm(self, peak: float, step: int, num_steps: int) -> float:
        """Linear warm-up: the n-th of N steps has n / N of the peak rate."""
        steps = self.warmup_steps(num_steps)
        return peak * min(1.0, (step + 1) / steps) if steps > 0 else peak


@dataclass(frozen=True, kw_only=True)
class ConstantRate(RateSchedule):
    """Linear warm-up, then the same rate for ever."""

    @property
    def needs_length(self) -> bool:
        """Only for a warm-up that is a share of the run."""
        return 0 < self.warmup < 1

    def rate(self, peak: float, step: int, num_steps: int) -> float:
        return self.warm(peak, step, num_steps)


@dataclass(frozen=True, kw_only=True)
class _Decay(RateSchedule):
    """Linear warm-up, then a decay over the rest of the run.

    Args:
        warmup: optimizer steps until the peak rate; below 1, that share of the run.
        final: share of the peak rate at the end of the run.
    """

    final: int | float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.final <= 1:
            raise ValueError(f"model.scheduler.final must be between 0 and 1, got {self.final}")

    def rate(self, peak: float, step: int, num_steps: int) -> float:
        warm = self.warmup_steps(num_steps)
        if step < warm:
            return self.warm(peak, step, num_steps)
        progress = (step - warm) / (num_steps - warm)
        return peak * (self.final + (1 - self.final) * self.decay(progress))

    @abstractmethod
    def decay(self, progress: float) -> float:
        """From 1 to 0."""


@dataclass(frozen=True, kw_only=True)
class Linear(_Decay):
    """Linear warm-up, then a straight line down to `final`."""

    def decay(self, progress: float) -> float:
        return 1 - progress


@dataclass(frozen=True, kw_only=True)
class Cosine(_Decay):
    """Linear warm-up, then half a cosine down to `final` (SGDR, arXiv:1608.03983, without restarts)."""

    def decay(self, progress: float) -> float:
        return (1 + math.cos(math.pi * progress)) / 2


@dataclass(frozen=True, kw_only=True)
class StableDecay(RateSchedule):
    """Linear warm-up, the peak rate for most of the run, then a straight line to 0 (WSD, arXiv:2404.06395).

    Moves the weights as far as a schedule that touches its peak once, at a rate that is never as high: the bias of
    stale gradients grows with the rate (arXiv:2607.01083).

    Args:
        warmup: optimizer steps until the peak rate; below 1, that share of the run.
        decay: share of the run at its end over which the rate falls.
    """

    decay: int | float = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("model.scheduler", "in [0, 1]", decay=self.decay)

    def rate(self, peak: float, step: int, num_steps: int) -> float:
        left = num_steps - step  # the first step of the decay still has the peak rate
        share = min(1.0, left / (self.decay * num_steps)) if self.decay else 1.0
        return min(self.warm(peak, step, num_steps), peak * max(0.0, share))


@dataclass(frozen=True, kw_only=True)
class OneCycle(RateSchedule):
    """One-cycle policy (arXiv:1708.07120), number for number torch's `OneCycleLR` with its defaults.

    The rate rises from `start` to the peak and falls to `final`, each along half a cosine; momentum (Adam: beta1) falls
    from 0.95 to 0.85 and rises again.

    Args:
        warmup: optimizer steps until the peak rate; below 1, that share of the run.
        start: share of the peak rate at the first step; `final`: at the last.
        cycle_momentum: False leaves momentum alone.
    """

    warmup: int | float = 0.1
    start: int | float = 0.04
    final: int | float = 4e-6
    cycle_momentum: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.start <= 1:
            raise ValueError(f"model.scheduler.start must be in (0, 1], got {self.start}")
        if not 0 <= self.final <= 1:
            raise ValueError(f"model.scheduler.final must be between 0 and 1, got {self.final}")

    def rate(self, peak: float, step: int, num_steps: int) -> float:
        start = peak / (1 / self.start)  # as torch divides by its `div_factor`
        final = start / (self.start / self.final) if self.final else 0.0
        return self._cycle(start, peak, final, step, num_steps)

    def momentum(self, step: int, num_steps: int) -> float | None:
        return self._cycle(0.95, 0.85, 0.95, step, num_steps) if self.cycle_momentum else None

    def _cycle(self, start: float, peak: float, final: float, step: int, num_steps: int) -> float:
        top, last = self.warmup_steps(num_steps) - 1, num_steps - 1
        if step <= top:
            return _half_cosine(start, peak, step / top if top > 0 else 1.0)
        top = max(0.0, top)
        return _half_cosine(peak, final, (step - top) / (last - top) if last > top else 1.0)


def _half_cosine(begin: float, end: float, progress: float) -> float:
    return end + (begin - end) / 2.0 * (math.cos(math.pi * progress) + 1)
