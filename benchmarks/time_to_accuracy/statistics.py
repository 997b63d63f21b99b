"""Times to accuracy and their ratios, with bootstrap intervals over seeds.

q_p is the accuracy at the share p of the reference system's rise; tau(q_p) the first time at which the smoothed
held-out accuracy reaches q_p and stays at most `SLACK` below it afterwards; S(p) = tau_reference(q_p) / tau(q_p), a
ratio of medians over seeds. A run that never gets there has tau = inf, and S = 0.

`MeanCurve` has another tau, which needs neither a running mean nor a slack: the time at which the mean over seeds, made
monotone, reaches the level.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

import numpy as np
import pandas as pd
from scipy.optimize import isotonic_regression

SHARES = (0.5, 0.8, 0.95)
SMOOTH = 3  # evaluations in the running mean
LAST = 3  # evaluations whose mean is the accuracy at the end
SLACK = 0.02
NUM_RESAMPLED = 2000


def smoothed(curve: pd.DataFrame) -> pd.Series:
    """Running mean of the accuracy: centred, so that it does not lag more where snapshots lie further apart."""
    return curve["accuracy"].rolling(SMOOTH, min_periods=2, center=True).mean()


def time_to(curve: pd.DataFrame, level: float, by: str = "wall_s") -> float:
    """tau: seconds (or steps, tokens) until the level; inf if it is not reached, or lost again.

    Args:
        curve: of one run, in order.
        level: accuracy.
        by: column to read.
    """
    values = smoothed(curve).to_numpy()
    at = curve[by].to_numpy(dtype=float)
    lost = np.flatnonzero(values < level - SLACK)
    first = np.flatnonzero(values >= level)
    first = first[first > lost[-1]] if len(lost) else first
    if not len(first):
        return math.inf
    n = int(first[0])
    if n == 0 or values[n - 1] >= level:
        return float(at[n])
    share = (level - values[n - 1]) / (values[n] - values[n - 1])
    return float(at[n - 1] + share * (at[n] - at[n - 1]))


def final(curve: pd.DataFrame) -> float:
    """Mean of the last evaluations."""
    return float(curve["accuracy"].iloc[-LAST:].mean())


def level_at(reference: Sequence[pd.DataFrame], share: float) -> float:
    """q_p: between the mean first accuracy of the reference runs and their mean at the end."""
    first = float(np.mean([curve["accuracy"].iloc[0] for curve in reference]))
    return first + share * (float(np.mean([final(curve) for curve in reference])) - first)


def ratio(reference: Sequence[float], other: Sequence[float]) -> float:
    """S: ratio of medians; 0 where the other system does not get there, nan where neither does or it begins there."""
    above = float(np.median(reference))
    below = float(np.median(other))
    if math.isinf(above) or below == 0:
        return math.nan
    return 0.0 if math.isinf(below) else above / below


def speedup(reference: Sequence[float], other: Sequence[float], seed: int = 0) -> tuple[float, float, float]:
    """S with its 95 % bootstrap interval: seeds of both systems are drawn with replacement. One seed has none."""
    if min(len(reference), len(other)) < 2:
        return ratio(reference, other), math.nan, math.nan
    above, below = (np.median(drawn, axis=1) for drawn in _resampled(reference, other, seed))
    with np.errstate(divide="ignore", invalid="ignore"):
        drawn = np.where(np.isinf(above) | (below == 0), math.nan, above / below)  # as in `ratio`
    low, high = np.nanpercentile(drawn, [2.5, 97.5], method="nearest")
    return ratio(reference, other), float(low), float(high)


def difference(reference: Sequence[float], other: Sequence[float], seed: int = 0) -> tuple[float, float, float]:
    """Mean of the other system less that of the reference, with its 95 % bootstrap interval. One seed has none."""
    if min(len(reference), len(other)) < 2:
        return float(np.mean(other) - np.mean(reference)), math.nan, math.nan
    others, references = _resampled(other, reference, seed)
    low, high = np.percentile(others.mean(axis=1) - references.mean(axis=1), [2.5, 97.5])
    return float(np.mean(other) - np.mean(reference)), float(low), float(high)


def _resampled(first: Sequence[float], second: Sequence[float], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """`NUM_RESAMPLED` rows of each, in the order in which one row after the other would be drawn."""
    n = len(first)
    m = len(second)
    below = np.broadcast_to(np.repeat([n, m], [n, m]), (NUM_RESAMPLED, n + m))
    at = np.random.default_rng(seed).integers(0, below)
    return np.asarray(first)[at[:, :n]], np.asarray(second)[at[:, n:]]


def summarize(table: pd.DataFrame, workload: str, reference: str) -> pd.DataFrame:
    """One row per system of a workload.

    Args:
        table: as `curves.read_runs` gives it.
        workload: name.
        reference: system to compare with.
    """
    rows = table[table["workload"] == workload]
    runs = {
        str(system): [one.sort_values("step") for _, one in runs.groupby("seed")]
        for system, runs in rows.groupby("system", sort=False)
    }
    base = runs[reference]
    found = []
    for system, curves in runs.items():
        row: dict[str, object] = {"system": system, "seeds": len(curves)}
        for share in SHARES:
            level = level_at(base, share)
            for by, name in (("wall_s", "time"), ("step", "steps")):
                times = [time_to(curve, level, by) for curve in curves]
                row[f"{name}_{share}"] = float(np.median(times))
                row[f"{name}_speedup_{share}"] = speedup([time_to(one, level, by) for one in base], times)
        row["final"] = float(np.mean([final(curve) for curve in curves]))
        row["difference"] = difference([final(one) for one in base], [final(one) for one in curves])
        for name in ("staleness", "staleness_max", "wait_share", "idle_share", "publish_share", "load", "cpu_s"):
            row[name] = float(np.mean([curve[name].iloc[0] for curve in curves]))
        row["step_s"] = float(np.mean([curve["wall_s"].max() / curve["step"].max() for curve in curves]))
        found.append(row)
    return pd.DataFrame(found)


@dataclass(frozen=True)
class MeanCurve:
    """Runs of one system that differ in the seed: accuracies at common steps.

    Attributes:
        seeds: in order.
        steps: at which all runs were evaluated, in order.
        seconds: clock, a row per seed and a column per step.
        accuracy: likewise.
    """

    seeds: tuple[int, ...]
    steps: np.ndarray
    seconds: np.ndarray
    accuracy: np.ndarray

    @classmethod
    def of(cls, runs: dict[int, pd.DataFrame]) -> MeanCurve:
        """Curves by seed, with `step`, `wall_s` and `accuracy`.

        Raises:
            ValueError: they were evaluated at different steps.
        """
        seeds = tuple(sorted(runs))
        tables = [runs[seed].sort_values("step") for seed in seeds]
        steps = tables[0]["step"].to_numpy()
        if any(list(table["step"]) != list(steps) for table in tables):
            raise ValueError(f"seeds={seeds}: evaluated at different steps")
        seconds = np.stack([table["wall_s"].to_numpy(float) for table in tables])
        accuracy = np.stack([table["accuracy"].to_numpy(float) for table in tables])
        return cls(seeds, steps, seconds, accuracy=accuracy)

    def only(self, rows: Sequence[int]) -> MeanCurve:
        """Some of the runs, by position; one may be taken more than once."""
        at = list(rows)
        seeds = tuple(self.seeds[row] for row in at)
        return MeanCurve(seeds, self.steps, self.seconds[at], accuracy=self.accuracy[at])

    @cached_property
    def monotone(self) -> np.ndarray:
        """Least-squares non-decreasing fit to the mean accuracy (isotonic regression)."""
        return np.asarray(isotonic_regression(self.accuracy.mean(axis=0)).x)

    def level(self, share: float) -> float:
        """Accuracy at which the mean curve has made this share of its rise."""
        return float(self.monotone[0] + share * (self.monotone[-1] - self.monotone[0]))

    def time_to(self, level: float, *, in_steps: bool = False) -> float:
        """Seconds until the monotone mean reaches the level, linear between evaluations; inf if it never does."""
        at = self.steps.astype(float) if in_steps else self.seconds.mean(axis=0)
        reached = np.flatnonzero(self.monotone >= level)
        if not len(reached):
            return math.inf
        n = int(reached[0])
        if n == 0:
            return float(at[0])
        before = self.monotone[n - 1]
        share = (level - before) / (self.monotone[n] - before)
        return float(at[n - 1] + share * (at[n] - at[n - 1]))


def mean_speedup(reference: MeanCurve, other: MeanCurve, share: float, *, in_steps: bool = False) -> float:
    """S of mean curves, to the level at which the reference has made this share of its rise; 0 if it is not reached."""
    level = reference.level(share)
    return ratio([reference.time_to(level, in_steps=in_steps)], [other.time_to(level, in_steps=in_steps)])


def paired_speedup(
    reference: MeanCurve, other: MeanCurve, share: float, *, in_steps: bool = False, seed: int = 0
) -> tuple[float, float, float]:
    """S of mean curves with its 95 % bootstrap interval: pairs of runs of one seed are drawn with replacement.

    The level is that of the drawn reference, so that the interval contains its uncertainty. One pair has no interval.

    Raises:
        ValueError: the seeds are not the same.
    """
    if reference.seeds != other.seeds:
        raise ValueError(f"seeds={reference.seeds} and {other.seeds}: pairs are of the same seed")
    value = mean_speedup(reference, other, share, in_steps=in_steps)
    n = len(reference.seeds)
    if n < 2:
        return value, math.nan, math.nan
    drawn = np.sort(np.random.default_rng(seed).integers(0, n, (NUM_RESAMPLED, n)), axis=1)
    different, times = np.unique(drawn, axis=0, return_counts=True)  # a mean has no order: 126 draws of five pairs
    found = [mean_speedup(reference.only(rows), other.only(rows), share, in_steps=in_steps) for rows in different]
    low, high = np.nanpercentile(np.repeat(found, times), [2.5, 97.5], method="nearest")
    return value, float(low), float(high)


def halves(n: int) -> Iterator[tuple[list[int], list[int]]]:
    """All ways to split n runs into two parts, of which one has n // 2."""
    for first in combinations(range(n), n // 2):
        yield list(first), [row for row in range(n) if row not in first]


def self_speedup(curve: MeanCurve, share: float, *, in_steps: bool = False) -> tuple[float, float, float]:
    """S of a system against itself, which is 1 but for the seeds: median and range of 95 % over all splits of the runs.

    Each split counts in both directions. One run cannot be split.
    """
    if len(curve.seeds) < 2:
        return math.nan, math.nan, math.nan
    splits = [(curve.only(first), curve.only(second)) for first, second in halves(len(curve.seeds))]
    level = curve.level(share)
    times = [[part.time_to(level, in_steps=in_steps) for part in split] for split in splits]
    found = [value for first, second in times for value in (ratio([first], [second]), ratio([second], [first]))]
    if all(map(math.isnan, found)):
        return math.nan, math.nan, math.nan
    low, high = np.nanpercentile(found, [2.5, 97.5], method="nearest")
    return float(np.nanmedian(found)), float(low), float(high)
