"""Latency distributions of simulated engines and environments."""

from __future__ import annotations

import math
import random
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

    def draw(self, rng: random.Random) -> float:
        return rng.lognormvariate(math.log(self.mean_s) - self.sigma**2 / 2, self.sigma)


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
