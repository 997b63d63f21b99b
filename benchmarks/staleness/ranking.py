"""Tables of methods at their best learning rates, best first."""

from __future__ import annotations

import math

import pandas as pd

from benchmarks.staleness.comparisons import KEY, at_best_rate, compare
from benchmarks.staleness.shown_runs import markdown, pm, runs_of
from benchmarks.staleness.statistics import best_scales, gain_share, generations, synchronous
from benchmarks.staleness.suite import FIRST_SEARCH_SEED

BASELINE = "ppo_clip"
HEAD = ["method", "best rate ×", "share kept", "accuracy above PPO-clip's", "q"]


def ranked(runs: pd.DataFrame, reference: pd.Series) -> str:
    """Methods at their best rates; the share of what synchronous runs gain, and differences to PPO-clip by seed.

    Args:
        runs: of one regime and lag, as `per_cell` gives them.
        reference: final accuracies of synchronous runs.
    """
    against = compare(runs, BASELINE).set_index("method")
    rows = []
    for method, group in at_best_rate(runs).groupby("method"):
        rates = "/".join(f"{scale:g}" for scale in sorted(group["learning_rate_scale"].unique()))
        share, half = gain_share(group["final"], float(group["start"].mean()), reference)
        other = ["", ""]
        if method in against.index:
            o = against.loc[method]
            other = [pm(o["difference"], o["half"], 3), "" if math.isnan(o["q"]) else f"{o['q']:.3f}"]
        rows.append((share, [str(method), rates, pm(share, half), *other]))
    return markdown(HEAD, [cells for _, cells in sorted(rows, key=lambda row: -row[0])])


def equal_tuning(at_lag: int) -> str | None:
    """The ranking at a lag of the grid in which every method has the same search and seeds; None if there is none.

    Where the seeds have not been run yet, what the search found.
    """
    runs = runs_of("equal_tuning")
    if runs is None:
        return None
    tables = []
    for (regime, lag), found in runs[runs["lag"] == at_lag].groupby(KEY[::2]):
        searched = found[found["seed"] >= FIRST_SEARCH_SEED]
        counted = tuned_alike(found)
        title = f"Lag {lag} (`{regime}`, {generations(found['steps'].max(), int(lag))} generations)"
        if counted.empty:
            tables += [f"{title}, the search alone:", searched_rates(searched)]
        else:
            reference = synchronous(runs, str(regime))["final"]
            tables += [f"{title}:", ranked(counted, reference)]
    return "\n\n".join(tables) or None


def tuned_share(method: str, lag: int, regime: str = "heavy_tails") -> str:
    """Share of the synchronous gain that a method keeps at the rate that won its search."""
    runs = runs_of("equal_tuning")
    if runs is None:
        return "not run"
    found = at_best_rate(tuned_alike(runs[(runs["regime"] == regime) & (runs["lag"] == lag)]))
    own = found[found["method"] == method]
    return pm(*gain_share(own["final"], float(own["start"].mean()), synchronous(runs, regime)["final"]))


def tuned_alike(runs: pd.DataFrame) -> pd.DataFrame:
    """Of a grid of one lag that is not finished, the runs at rates and seeds that every method has.

    The rate that won a method's search counts as the same for all, a further one only once all methods have it.
    """
    methods = runs["method"].nunique()
    best = best_scales(runs[runs["seed"] >= FIRST_SEARCH_SEED])
    own = runs[runs["seed"] < FIRST_SEARCH_SEED]
    keys = own[KEY].itertuples(index=False, name=None)
    is_best = own["learning_rate_scale"] == [best.get(key) for key in keys]
    has_all = own[is_best].groupby("seed")["method"].nunique() == methods
    everywhere = own.groupby(["learning_rate_scale", "seed"])["method"].transform("nunique") == methods
    return own[everywhere | (is_best & own["seed"].map(has_all).eq(True))]


def searched_rates(runs: pd.DataFrame) -> str:
    """Accuracy of each method at each rate of the search, the best first."""
    means = runs.pivot_table(index=KEY, columns="learning_rate_scale", values="final")
    rows = []
    for key in sorted(means.index, key=lambda key: (key[0], key[2], -means.loc[key].max())):
        rows.append([*map(str, key), *("" if math.isnan(mean) else f"{mean:.3f}" for mean in means.loc[key])])
    return markdown([*KEY, *(f"rate × {scale:g}" for scale in means.columns)], rows)
