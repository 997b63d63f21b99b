"""Paired comparisons of methods at their best learning rates, corrected for their number.

Runs of one seed have the same prompts and the same random numbers to begin with, so methods are compared seed by seed.
"""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from scipy.stats import false_discovery_control, ttest_rel

from benchmarks.staleness.statistics import interval, naive_method, synchronous
from benchmarks.staleness.suite import FIRST_SEARCH_SEED

KEY = ["regime", "method", "lag"]


def at_best_rate(runs: pd.DataFrame) -> pd.DataFrame:
    """One run for each (regime, method, lag, seed), at the rate with the best mean accuracy of the *other* seeds.

    Chosen by all seeds, the best of several rates would look better than it is. Ties go to the lower rate.
    """
    rows = []
    for _, group in runs[runs["seed"] < FIRST_SEARCH_SEED].groupby(KEY):
        table = group.pivot(index="seed", columns="learning_rate_scale", values="final").sort_index(axis=1)
        for seed in table.index:
            others = table.drop(index=seed) if len(table) > 1 else table
            means = others[table.columns[table.loc[seed].notna()]].mean()
            scale = means.idxmax() if means.notna().any() else table.loc[seed].first_valid_index()
            rows.append(group[(group["seed"] == seed) & (group["learning_rate_scale"] == scale)].iloc[0])
    return pd.DataFrame(rows).reset_index(drop=True).infer_objects()


def robustness(runs: pd.DataFrame) -> pd.DataFrame:
    """For each (regime, method, lag) with several rates: mean accuracy over the logarithm of the rate (trapezoids)."""
    rows = []
    for key, group in runs.groupby(KEY):
        means = group.groupby("learning_rate_scale")["final"].mean().sort_index()
        if len(means) > 1:
            at = np.log(means.index.to_numpy(dtype=float))
            area = float(np.trapezoid(means.to_numpy(), at) / (at[-1] - at[0]))
            rows.append(dict(zip(KEY, key, strict=True)) | {"rates": len(means), "robustness": area})
    return pd.DataFrame(rows, columns=[*KEY, "rates", "robustness"])


def compare(runs: pd.DataFrame, baseline: str | None = None) -> pd.DataFrame:
    """One row for each (regime, method, lag): difference of the final accuracy to a baseline, seed by seed.

    Args:
        runs: as `per_cell` gives them.
        baseline: method; None is the regime's uncorrected one.

    Returns:
        `difference` with half the width of its 95 % interval (Student's t), `p` of the paired t-test, and `q`, the
        same after the Benjamini-Hochberg correction for all comparisons of the table.
    """
    best = at_best_rate(runs)
    rows = []
    for (regime, lag), group in best.groupby(["regime", "lag"]):
        finals = group.pivot(index="seed", columns="method", values="final")
        name = baseline or naive_method(best, str(regime))
        for method in [m for m in finals.columns if m != name and name in finals.columns]:
            pairs = finals[[method, name]].dropna()
            row = {"regime": regime, "lag": lag, "method": method, "baseline": name, "seeds": len(pairs)}
            row["difference"], row["half"] = interval(pairs[method] - pairs[name])
            varies = len(pairs) > 1 and (pairs[method] - pairs[name]).std() > 0
            row["p"] = float(ttest_rel(pairs[method], pairs[name]).pvalue) if varies else math.nan
            rows.append(row)
    columns = ["regime", "lag", "method", "baseline", "seeds", "difference", "half", "p"]
    found = pd.DataFrame(rows, columns=columns)
    tested = found["p"].notna()
    found["q"] = math.nan
    if tested.any():
        found.loc[tested, "q"] = false_discovery_control(found.loc[tested, "p"])
    return found


def comparison_table(runs: pd.DataFrame, regime: str) -> str:
    """Markdown table of a regime: accuracy at the best rate, difference to the uncorrected method, robustness, cost."""
    best = at_best_rate(runs)
    compared = compare(runs)
    areas = robustness(runs[runs["seed"] < FIRST_SEARCH_SEED]).set_index(KEY)["robustness"]
    reference = synchronous(runs, regime)["final"].mean()
    head = "method | lag | seeds | accuracy at the best rate | of synchronous | difference | p | q | over rates | CPU s"
    lines = [f"| {head} |", "|" + "---|" * 10]
    for (lag, method), group in best[best["regime"] == regime].groupby(["lag", "method"]):
        mean, half = interval(group["final"])
        other = compared[(compared["regime"] == regime) & (compared["lag"] == lag) & (compared["method"] == method)]
        against = [_pm(o["difference"], o["half"]) + f" | {o['p']:.3f} | {o['q']:.3f}" for _, o in other.iterrows()]
        area = areas.get((regime, method, lag), math.nan)
        shown = "" if math.isnan(area) else f"{area:.3f}"
        of = "" if math.isnan(reference) else f"{mean / reference:.2f}"
        cells = [method, lag, len(group), _pm(mean, half), of, *(against or [" | | "]), shown]
        lines.append(f"| {' | '.join(map(str, cells))} | {group['cpu_s'].median():.0f} |")
    return "\n".join(lines)


def _pm(value: float, half: float) -> str:
    return f"{value:.3f}" + ("" if math.isnan(half) else f" ± {half:.3f}")
