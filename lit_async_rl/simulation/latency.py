"""Latency distributions of simulated engines and environments."""

from __future__ import annotations

import functools
import math
import random
import statistics
from abc import ABC, abstractmethod
from dataclasses import dataclass

from lit_async_rl.utils.checks import check_range


class Latency(ABC):
    """Distribution of the time that one sample occupies a slot, in seconds."""

    @abstractmethod
    def draw(self, rng: random.Random) -> float:
        """Draws the seconds of one sample."""


@dataclass(frozen=True)
class Constant(Latency):
    """Constant latency of `mean_s` seconds."""

    mean_s: float

    def draw(self, rng: random.Random) -> float:
        return self.mean_s


@dataclass(frozen=True)
class LogNormal(Latency):
    """exp(N(mu, sigma^2)) with mean `mean_s`: mu = ln(mean_s) - sigma^2 / 2."""

    mean_s: float
    sigma: float = 1.0

    @property
    def mu(self) -> float:
        """Mean of the logarithm."""
        return math.log(self.mean_s) - self.sigma**2 / 2

    def draw(self, rng: random.Random) -> float:
        return rng.lognormvariate(self.mu, self.sigma)


@dataclass(frozen=True)
class CutLogNormal(Latency):
    """exp(N(mu, sigma^2)), at most `longest_s`, with mean `mean_s`: completions that end at `sampling.max_tokens`.

    Raises:
        ValueError: the mean is not below `longest_s`.
    """

    mean_s: float
    sigma: float
    longest_s: float

    def __post_init__(self) -> None:
        check_range("CutLogNormal", f"in (0, {self.longest_s})", mean_s=self.mean_s)

    def draw(self, rng: random.Random) -> float:
        return min(self.longest_s, rng.lognormvariate(self._mu, self.sigma))

    @functools.cached_property
    def _mu(self) -> float:
        # the mean after the cut rises with mu, from 0 to longest_s
        low = math.log(self.mean_s) - self.sigma**2
        high = math.log(self.longest_s) + 10 * self.sigma
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if self._mean(middle) < self.mean_s else (low, middle)
        return high

    def _mean(self, mu: float) -> float:
        """E[min(X, longest_s)] of a log-normal X."""
        if not self.sigma:
            return min(self.longest_s, math.exp(mu))
        cut = (math.log(self.longest_s) - mu) / self.sigma
        normal = statistics.NormalDist()
        whole = math.exp(mu + self.sigma**2 / 2) * normal.cdf(cut - self.sigma)
        return whole + self.longest_s * (1 - normal.cdf(cut))


@dataclass(frozen=True)
class Pareto(Latency):
    """P(X > x) = (x_min / x)^alpha with mean `mean_s`: x_min = mean_s (alpha - 1) / alpha.

    Raises:
        ValueError: alpha is not greater than 1, so the mean is infinite.
    """

    mean_s: float
    alpha: float = 2.0

    def __post_init__(self) -> None:
        check_range("Pareto", "> 1", alpha=self.alpha)

    def draw(self, rng: random.Random) -> float:
        return self.mean_s * (self.alpha - 1) / self.alpha * rng.paretovariate(self.alpha)


@dataclass(frozen=True)
class Stragglers(Latency):
    """A share of the samples takes `factor` times as long as the others; `mean_s` is the overall mean."""

    mean_s: float
    share: float = 0.02
    factor: float = 10.0

    def draw(self, rng: random.Random) -> float:
        short_s = self.mean_s / (1 + self.share * (self.factor - 1))
        return short_s * self.factor if rng.random() < self.share else short_s
