"""Advice on settings from data age and the parts of importance ratios, for the last verdict of a run."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

DRIFT = ("sample/staleness_mean", "drift/half_lag", "drift/stale", "drift/radius")
PARTS = ("ratio/discrepancy", "ratio/staleness", "rollout/length_mean")
NUM_STEPS = 50  # latest ones, whose medians count
MIN_STEPS = 10  # with values, to say something
MIN_EXCESS = 1.1  # of the distance from the weights that sampled the data, over the radius
MIN_LOSS = 0.1  # share of the effective sample size below which a discrepancy is not worth a word


class StaleDataWords:
    """Says that data are older than the learning rate allows, or that engine and trainer differ more than versions do.

    By medians of the last 50 steps that logged what is needed, where those of the last ten agree; silent with fewer.

    * The distance of the weights from those that sampled the data (`WeightDriftMonitor`) exceeds by a tenth or more the
      one that leaves half of the effective sample size. It is proportional to the rate, so their quotient gives the
      rate that fits.
    * The data are stale, yet the discrepancy d is the larger part of the ratio (`FreshDataMonitor`), and costs at least
      a tenth of the effective sample size of whole completions: over L tokens with uncorrelated errors, exp(-L d^2) is
      left.
    """

    def __init__(self) -> None:
        self._drift: deque[tuple[float, ...]] = deque(maxlen=NUM_STEPS)
        self._parts: deque[tuple[float, ...]] = deque(maxlen=NUM_STEPS)

    def observe(self, metrics: Mapping[str, Any]) -> None:
        """Adds what a step logged."""
        for names, found in ((DRIFT, self._drift), (PARTS, self._parts)):
            values = tuple(float(metrics[name]) for name in names if name in metrics)
            if len(values) == len(names) and all(map(math.isfinite, values)):
                found.append(values)

    def sentences(self, remedy: str) -> list[str]:
        """Advice in sentences; empty if there is none.

        Args:
            remedy: besides a lower rate, for data that are too old; empty if the run has it: runs with an optimal
                baseline learn with much less than half of the effective sample size.
        """
        found = []
        if remedy and _holds(self._drift, _is_too_old):
            age, allowed, stale, radius = _medians(self._drift)
            found.append(
                f"the data are {age:.3g} versions old, and at this learning rate half of the effective sample size "
                f"is lost at {allowed:.3g} (drift/half_lag): set model.learning_rate to {radius / stale:.2g} times "
                f"its value, or {remedy}"
            )
        if _holds(self._parts, _is_discrepant):
            discrepancy, staleness, length = _medians(self._parts)
            found.append(
                f"the log-ratios of engine and trainer at one version ({discrepancy:.2g} nats a token, "
                f"ratio/discrepancy) are larger than what staleness adds ({staleness:.2g}), and cost about "
                f"{_lost(discrepancy, length):.0%} of the effective sample size, of fresh data, too: give the engine "
                "the trainer's precision, and see engine/logprob_error"
            )
        return found


def _is_too_old(age: float, allowed: float, stale: float, radius: float) -> bool:
    return stale > MIN_EXCESS * radius


def _is_discrepant(discrepancy: float, staleness: float, length: float) -> bool:
    return discrepancy > staleness > 0 and _lost(discrepancy, length) >= MIN_LOSS


def _lost(discrepancy: float, length: float) -> float:
    """Share of the effective sample size."""
    return -math.expm1(-length * discrepancy**2)


def _holds(rows: Sequence[tuple[float, ...]], test: Callable[..., bool]) -> bool:
    """Whether the medians of all rows and of the last ones both pass the test: early trouble may be over."""
    return len(rows) >= MIN_STEPS and all(test(*_medians(some)) for some in (rows, list(rows)[-MIN_STEPS:]))


def _medians(rows: Sequence[tuple[float, ...]]) -> list[float]:
    """Of each column."""
    return [statistics.median(column) for column in zip(*rows, strict=True)]
