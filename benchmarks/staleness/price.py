"""The price of a lag: how many rollouts stale data cost a method until its accuracy is that of a synchronous run."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from scipy.stats import t as student

from benchmarks.staleness.shown_runs import FOLDER, markdown, pm
from benchmarks.staleness.statistics import gain_share, generations, interval, per_cell
from benchmarks.staleness.suite import FIRST_SEARCH_SEED
from benchmarks.staleness.table import read_table
from benchmarks.time_to_accuracy.statistics import MeanCurve, paired_speedup

SHARES = (0.8, 0.95)  # of the synchronous gain, at which rollouts are counted
SETTING = ["method", "lag", "learning_rate_scale"]


def price_of(name: str) -> str:
    """Table of the runs in `docs/results/NAME.parquet`, which are of one regime."""
    steps = read_table(FOLDER / f"{name}.parquet")
    steps = steps[steps["seed"] < FIRST_SEARCH_SEED]  # a search is not a result
    return price_table(steps, per_cell(steps))


def price_table(steps: pd.DataFrame, runs: pd.DataFrame) -> str:
    """A row for each method, lag and rate with as many seeds as the best synchronous method, which it is set against.

    Args:
        steps: of the runs of one regime, with `accuracy` where they were evaluated.
        runs: one row for each, see `per_cell`.
    """
    reference = _reference(runs)
    num_seeds = len(_runs_of(runs, reference))
    rows = []
    for key, group in runs.groupby(SETTING):
        if len(group) < num_seeds:
            continue  # not all of its runs have ended
        method, lag, scale = key
        paired, same = _paired(runs, key)
        share, half = gain_share(paired["final"], float(paired["start"].mean()), same["final"])
        seeds = set(paired["seed"])
        n = len(seeds)
        least = share - half * student.ppf(0.95, n - 1) / student.ppf(0.975, n - 1) if n > 1 else math.nan
        is_reference = key == reference
        curves = _curve(steps, reference, seeds=seeds), _curve(steps, key, seeds=seeds)
        prices = [_price(paired_speedup(*curves, level, in_steps=True)) for level in SHARES]
        rows.append(
            [
                str(method),
                str(lag),
                generations(group["steps"].max(), int(lag)),
                f"{scale:g}",
                str(n),
                pm(*interval(paired["final"]), 3),
                "" if is_reference else pm(share, half),
                "" if is_reference or math.isnan(least) else f"{least:.2f}",
                *("" if is_reference else price for price in prices),
            ]
        )
    head = ["method", "lag", "generations", "rate ×", "seeds", "accuracy", "share kept", "at least (one-sided 95 %)"]
    return markdown([*head, *(f"price at {share:g}" for share in SHARES)], rows)


def kept_beside(runs: pd.DataFrame, method: str, lag: int, scale: float) -> str:
    """Share of the best synchronous method's gain that a method keeps, for a sentence."""
    paired, same = _paired(runs, (method, lag, scale))
    return pm(*gain_share(paired["final"], float(paired["start"].mean()), same["final"]))


def _reference(runs: pd.DataFrame) -> tuple[object, ...]:
    """The best synchronous method, and its rate, of those with the most seeds."""
    finals = runs[runs["lag"] == 0].groupby(SETTING)["final"]
    best: tuple[object, ...] = finals.mean()[finals.count() == finals.count().max()].idxmax()
    return best


def _paired(runs: pd.DataFrame, key: tuple[object, ...]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Runs of a method and of the best synchronous one, with the seeds that both have."""
    own = _runs_of(runs, key)
    same = _runs_of(runs, _reference(runs))
    return own[own["seed"].isin(same["seed"])], same[same["seed"].isin(own["seed"])]


def _runs_of(runs: pd.DataFrame, key: tuple[object, ...]) -> pd.DataFrame:
    is_own = pd.Series(True, index=runs.index)
    for name, value in zip(SETTING, key, strict=True):
        is_own &= runs[name] == value
    return runs[is_own]


def _curve(steps: pd.DataFrame, key: tuple[object, ...], seeds: set[int]) -> MeanCurve:
    """Mean curve over seeds, whose steps are counted from step `lag` on: before, all data are of the first policy.

    A level that is reached before step `lag` costs nothing. A run that broke has an accuracy of 0 from then on.
    """
    evaluated = _runs_of(steps[steps["accuracy"].notna()], key)
    at = np.unique(evaluated["step"])
    counted = (at - int(evaluated["lag"].iloc[0])).clip(min=0)
    accuracies = {int(seed): rows.set_index("step")["accuracy"] for seed, rows in evaluated.groupby("seed")}
    return MeanCurve.of(
        {
            seed: pd.DataFrame(
                {"step": counted, "wall_s": counted, "accuracy": own.reindex(at, fill_value=0.0).to_numpy()}
            )
            for seed, own in accuracies.items()
            if seed in seeds
        }
    )


def _price(speedup: tuple[float, float, float]) -> str:
    value, most, least = (1 / one if one != 0 else math.inf for one in speedup)
    if math.isinf(value):
        return "not reached"
    if math.isnan(value):
        return "before step `lag`"
    return f"{value:.1f}" if math.isnan(least) else f"{value:.1f} ({least:.1f} to {_shown(most)})"


def _shown(price: float) -> str:
    return "∞" if math.isinf(price) else f"{price:.1f}"
