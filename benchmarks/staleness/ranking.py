"""Tables of methods at their best learning rates, best first."""

from __future__ import annotations

import math

import pandas as pd

from benchmarks.staleness.comparisons import KEY, at_best_rate, compare, robustness
from benchmarks.staleness.shown_runs import markdown, pm, runs_of
from benchmarks.staleness.statistics import gain_share, interval, synchronous

BASELINE = "ppo_clip"
HEAD = [
    *("method", "best rate ×", "accuracy", "share of the gain kept", "difference to PPO-clip", "q", "over rates"),
    *("seeds", "CPU s"),
]


def ranked(runs: pd.DataFrame, reference: pd.Series, areas: pd.DataFrame) -> str:
    """Methods at their best rates; the share of what synchronous runs gain, and differences to PPO-clip by seed.

    Args:
        runs: of one regime and lag, as `per_cell` gives them.
        reference: final accuracies of synchronous runs.
        areas: as `robustness` gives them.
    """
    against = compare(runs, BASELINE).set_index("method")
    over_rates = areas.set_index("method")["robustness"]
    rows = []
    for method, group in at_best_rate(runs).groupby("method"):
        rates = "/".join(f"{scale:g}" for scale in sorted(group["learning_rate_scale"].unique()))
        share, half = gain_share(group["final"], float(group["start"].mean()), reference)
        other = ["", ""]
        if method in against.index:
            o = against.loc[method]
            other = [pm(o["difference"], o["half"], 3), "" if math.isnan(o["q"]) else f"{o['q']:.3f}"]
        area = f"{over_rates[method]:.2f}" if method in over_rates.index else ""
        cells = [str(method), rates, pm(*interval(group["final"]), 3), pm(share, half), *other, area]
        rows.append((share, [*cells, str(len(group)), f"{group['cpu_s'].median():.0f}"]))
    return markdown(HEAD, [cells for _, cells in sorted(rows, key=lambda row: -row[0])])


def equal_tuning() -> str | None:
    """A ranking for each lag of the grid in which every method has the same rates and seeds; None if there is none."""
    runs = runs_of("equal_tuning")
    if runs is None:
        return None
    tables = []
    for (regime, lag), found in runs[runs["lag"] > 0].groupby(KEY[::2]):
        group = finished_by_all(found)
        reference = synchronous(runs, str(regime))["final"]
        rates = group["learning_rate_scale"].nunique()
        tables += [f"Lag {lag} (`{regime}`), {rates} rates, {len(reference)} synchronous runs:"]
        tables += [ranked(group, reference, robustness(group))]
    return "\n\n".join(tables)


def finished_by_all(runs: pd.DataFrame) -> pd.DataFrame:
    """Runs at the rates and seeds that every method has: of a part of a grid, too, the tuning is equal."""
    methods = runs.groupby(["learning_rate_scale", "seed"])["method"].transform("nunique")
    return runs[methods == runs["method"].nunique()]
