"""From rows per step to numbers per run, and from runs to means with 95 % intervals over seeds."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.stats import t as student

from benchmarks.staleness.suite import FIRST_SEARCH_SEED
from benchmarks.staleness.table import CELL
from lit_async_rl.stabilizers.collapse import GainWatch

LAST_EVALUATIONS = 2  # `final` is their mean: one has a sampling error of 3 points
NAIVE = ("uncorrected", "ppo_clip")  # what stands for "no cure" in a regime: the first of these that it has
HALF = 0.5  # of the synchronous gain: a run that ends below it has collapsed, or is slow
ENOUGH_GENERATIONS = 6  # of data that a run needs for a claim about its lag
TOO_FEW = " †"  # marks fewer
LOW_ESS = 0.5


def interval(values: pd.Series) -> tuple[float, float]:
    """Mean and half the width of its 95 % interval (Student's t); nan for a single value."""
    values = values.dropna()
    if len(values) < 2:
        return float(values.mean()), math.nan
    return float(values.mean()), float(
        student.ppf(0.975, len(values) - 1) * values.std(ddof=1) / math.sqrt(len(values))
    )


def per_cell(table: pd.DataFrame) -> pd.DataFrame:
    """One row for each run.

    `final` is the mean of the last evaluations (0 for a run that broke), `start` the accuracy before training,
    `collapsed` whether it has lost half of its gain in between; the signals are medians over the steps from `lag` on
    (before, all data are of the first policy), and `staleness` is the mean over these; `low_ess_step` is when the
    effective sample size (mean of 5 steps) first fell below half, `fall_step` the first evaluation below half of the
    best one so far.
    """
    return pd.DataFrame([_cell(dict(zip(CELL, key, strict=True)), rows) for key, rows in table.groupby(CELL)])


def _cell(settings: dict[str, object], rows: pd.DataFrame) -> dict[str, object]:
    accuracy = rows.dropna(subset=["accuracy"]).set_index("step")["accuracy"]
    failed = isinstance(rows["error"].iloc[0], str)
    steps = rows.set_index("step")
    stale = steps[steps.index >= min(rows["lag"].iloc[0], steps.index.max())]
    low = steps["ess_ratio"].dropna().rolling(5).mean()
    fallen = accuracy[accuracy < 0.5 * accuracy.cummax()]
    start = float(accuracy.iloc[0]) if len(accuracy) else math.nan
    final = 0.0 if failed or accuracy.empty else float(accuracy.iloc[-LAST_EVALUATIONS:].mean())
    return {
        **settings,
        "start": start,
        "final": final,
        "best": accuracy.max(),
        "collapsed": has_collapsed(start, accuracy.max(), final),
        "error": rows["error"].iloc[0],
        "device": rows["device"].iloc[0],
        "steps": rows["step"].max(),
        **{name: stale[name].median() for name in ("cosine", "ess_ratio", "kl", "grad_norm")},
        "staleness": stale["staleness_mean"].mean(),
        "low_ess_step": low[low < LOW_ESS].index.min(),
        "fall_step": fallen.index.min(),
        "controller_changes": rows["controller_changes"].max(),
        "blend_share": rows["blend_share"].mean(),
        "tokens": rows["tokens"].max(),
        "cpu_s": rows["cpu_s"].max(),
    }


def has_collapsed(start: float, best: float, final: float) -> bool:
    """Whether a run has lost half of its gain, or, if it never gained much, half of its start: as `GainWatch` counts.

    A run that ends low without it is slow: it has not risen.
    """
    gain = best - start
    if gain >= GainWatch.MIN_GAIN:
        return best - final > GainWatch.COLLAPSE * gain
    return start - final > GainWatch.COLLAPSE * start


def generations(steps: float, lag: int) -> str:
    """Steps over the lag, for a table, marked where they are too few for a claim about the lag.

    It is how many times a run has trained on what its own earlier policies sampled. With `FixedLag` the first `lag`
    steps train on what the first policy sampled: one generation is offline learning.
    """
    if not lag:
        return ""
    return f"{steps / lag:.1f}" + (TOO_FEW if steps < ENOUGH_GENERATIONS * lag else "")


def is_slow(runs: pd.DataFrame, gain: float) -> pd.Series:
    """Which runs end below half of the synchronous gain without a collapse."""
    return ~runs["collapsed"].astype(bool) & (runs["final"] - runs["start"] < HALF * gain)


def naive_method(runs: pd.DataFrame, regime: str) -> str:
    """The method that stands for no cure in a regime, and that others are compared with.

    Where the regime has none, as in the middle of a suite or with settings of their own (`uncorrected+steps_300`), it
    is the method with the fewest parts that begins with one, or at all.
    """
    methods = sorted(set(runs[runs["regime"] == regime]["method"]), key=lambda method: (method.count("+"), method))
    for name in NAIVE:
        if name in methods:
            return name
    return next((method for name in NAIVE for method in methods if method.split("+")[0] == name), methods[0])


def synchronous(runs: pd.DataFrame, regime: str) -> pd.DataFrame:
    """The regime's reference runs: the naive method at lag 0, at the rate that won its search, if it had one.

    The runs of the search are not among them.
    """
    naive = naive_method(runs, regime)
    own = runs[(runs["regime"] == regime) & (runs["method"] == naive) & (runs["lag"] == 0)]
    is_searched = own["seed"] >= FIRST_SEARCH_SEED
    scale = best_scales(own[is_searched]).get((regime, naive, 0), 1.0)
    return own[~is_searched & np.isclose(own["learning_rate_scale"], scale)]


def gain_share(finals: pd.Series, start: float, reference: pd.Series) -> tuple[float, float]:
    """Share of the synchronous gain and half its 95 % interval; both means are uncertain (delta method)."""
    gain, gain_half = interval(finals - start)
    full, full_half = interval(reference - start)
    share = float(gain / full)
    return share, math.hypot(gain_half, share * full_half) / full


def summarize(runs: pd.DataFrame) -> pd.DataFrame:
    """One row for each (regime, method, lag, learning rate): means over seeds with intervals, and what was kept.

    Runs of a search for learning rates are left out.
    """
    runs = runs[runs["seed"] < FIRST_SEARCH_SEED]
    rows = []
    for key, group in runs.groupby(CELL[:-1]):
        regime = key[0]
        reference = synchronous(runs, regime)
        row: dict[str, object] = dict(zip(CELL[:-1], key, strict=True)) | {"seeds": len(group)}
        row["steps"] = int(group["steps"].max())
        for name in ("final", "best", "cosine", "ess_ratio", "kl", "staleness"):
            row[name], row[f"{name}_half"] = interval(group[name])
        start = float(group["start"].mean())
        row["gain_share"], row["gain_share_half"] = gain_share(group["final"], start, reference["final"])
        row["collapsed"] = int(group["collapsed"].sum())
        row["slow"] = int(is_slow(group, synchronous_gain(reference)).sum())
        row["failed"] = int(group["error"].notna().sum())
        rows.append(row)
    return pd.DataFrame(rows)


def synchronous_gain(reference: pd.DataFrame) -> float:
    """Mean gain of the reference runs."""
    return float((reference["final"] - reference["start"]).mean())


def best_scales(runs: pd.DataFrame) -> dict[tuple[str, str, int], float]:
    """The learning-rate scale of the best mean final accuracy, by (regime, method, lag); ties go to the lower."""
    means = runs.groupby(["regime", "method", "lag", "learning_rate_scale"])["final"].mean().reset_index()
    best = means.loc[means.groupby(["regime", "method", "lag"])["final"].idxmax()]
    return {(r.regime, r.method, int(r.lag)): float(r.learning_rate_scale) for r in best.itertuples()}


@dataclass(frozen=True, kw_only=True)
class EarlySign:
    """How well a small effective sample size tells that the accuracy will fall by half.

    Attributes:
        fallen: runs whose accuracy fell by half.
        warned: of these, those whose effective sample size had fallen below one half before.
        lead: median of the steps in between.
        others: runs whose accuracy did not fall by half.
        warned_others: of these, those whose effective sample size fell below one half all the same.
    """

    fallen: int
    warned: int
    lead: float
    others: int
    warned_others: int

    def __str__(self) -> str:
        share = f"all {self.fallen}" if self.warned == self.fallen else f"{self.warned} of them"
        return (
            f"{self.fallen} runs on stale data lost half of their accuracy; in {share}, `importance/ess_ratio` had "
            f"fallen below one half a median of {self.lead:.0f} steps earlier. `importance/ess_ratio` also fell below "
            f"one half in {self.warned_others} of the {self.others} runs that kept more than half of their accuracy."
        )


def warning_time(runs: pd.DataFrame) -> EarlySign:
    """The effective sample size as a warning, with its base rate."""
    has_fallen = runs["fall_step"].notna()
    fallen = runs[has_fallen]
    others = runs[~has_fallen]
    ahead = fallen["fall_step"] - fallen["low_ess_step"]
    return EarlySign(
        fallen=len(fallen),
        warned=int((ahead > 0).sum()),
        lead=float(np.nanmedian(ahead)) if len(fallen) else math.nan,
        others=len(others),
        warned_others=int(others["low_ess_step"].notna().sum()),
    )
