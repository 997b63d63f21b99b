"""Tables of the results page from the first grid, `docs/results/results.parquet`."""

from __future__ import annotations

import numpy as np
import pandas as pd

from benchmarks.staleness.comparisons import robustness
from benchmarks.staleness.ranking import ranked, tuned_share
from benchmarks.staleness.shown_runs import FOLDER, markdown, pm, runs_of
from benchmarks.staleness.statistics import best_scales, gain_share, summarize, synchronous, warning_time
from benchmarks.staleness.suite import FIRST_SEARCH_SEED

TRIED_WITH_GAC = (
    ("heavy_tails", 32, "uncorrected", 1.0),
    ("heavy_tails", 32, "uncorrected", 0.3),
    ("heavy_tails", 32, "vcpo", 1.0),
    ("heavy_tails", 64, "vcpo", 1.0),
    ("aligned_gradients", 16, "ppo_clip", 1.0),
    ("aligned_gradients", 16, "vcpo", 1.0),
)
TUNED = "heavy_tails", 32  # regime and lag at which the old grid tried three rates


def old() -> pd.DataFrame:
    """The runs of the first grid."""
    found = runs_of("results")
    if found is None:
        raise FileNotFoundError(f"{FOLDER / 'results.parquet'}: there is no such table")
    return found


def kept(regime: str, method: str, lag: int, scale: float = 1.0) -> str:
    """Share of the synchronous gain that a method keeps in the first grid, with its interval."""
    runs = old()
    found = runs[
        (runs["regime"] == regime) & (runs["method"] == method) & (runs["lag"] == lag)
        & np.isclose(runs["learning_rate_scale"], scale) & (runs["seed"] < FIRST_SEARCH_SEED)
    ]  # fmt: skip
    return pm(*gain_share(found["final"], float(found["start"].mean()), synchronous(runs, regime)["final"]))


def kept_by_other_engines(method: str) -> str:
    """The same at lag 32 where the engine is not quite the trainer; the mean of its kinds for each seed."""
    runs = runs_of("mismatch")
    if runs is None:
        return "not run"
    found = runs[runs["method"].str.startswith(f"{method}+engine") & (runs["lag"] == 32)].groupby("seed")["final"]
    exact = runs[(runs["method"] == "uncorrected") & (runs["lag"] == 0)]["final"]
    return pm(*gain_share(found.mean(), float(runs["start"].mean()), exact))


def kept_by_language_model(method: str, lag: int) -> str:
    """Share of the synchronous gain that SmolLM2 keeps, each at the rate that won the search.

    Of the seeds that the search has not seen, as soon as these are there for the synchronous run, too.
    """
    runs = runs_of("smollm2")
    if runs is None:
        return "not run"
    is_searched = runs["seed"] >= FIRST_SEARCH_SEED
    best = best_scales(runs[is_searched])

    def at_best(method: str, lag: int, searched: bool) -> pd.DataFrame:
        scale = best.get(("smollm2", method, lag), 1.0)
        chosen = (runs["method"] == method) & (runs["lag"] == lag) & np.isclose(runs["learning_rate_scale"], scale)
        return runs[chosen & (is_searched == searched)]

    searched = at_best(method, lag, searched=False).empty or at_best("uncorrected", 0, searched=False).empty
    found = at_best(method, lag, searched)
    synchronous_runs = at_best("uncorrected", 0, searched)
    share, half = gain_share(found["final"], float(runs["start"].mean()), synchronous_runs["final"])
    return f"{pm(share, half)} ({len(found)} seed{'s' if len(found) > 1 else ''})"


def decision() -> str:
    """Recommended method, by situation."""
    tails = "heavy_tails"
    model = kept_by_language_model
    tables = "results_small_policies.md"
    clip = "a clip (PPO, M2PO, DPPO) that you want to keep"
    rows = [
        ["of a language model, 16 versions old", "a lower bound; if it must be, token TIS at a third of the rate",
         f"SmolLM2: {model('token_tis', 16)}; VCPO {model('vcpo', 16)}; without correction {model('uncorrected', 16)}"],
        ["of a language model, 64 versions old", "a lower bound; if it must be, token TIS or VCPO",
         f"SmolLM2: {model('token_tis', 64)}, {model('vcpo', 64)}; without correction {model('uncorrected', 64)}"],
        ["of a small policy, a few versions old", "VCPO: `configs/stabilizers/vcpo.yaml`",
         f"{kept(tails, 'vcpo', 4)} at lag 4; without correction {kept(tails, 'uncorrected', 4)}"],
        ["of a small policy, 16 to 64 versions old",
         "VCPO, or its baseline alone (`opob`), at the rate of a synchronous run",
         f"lag 16: {tuned_share('vcpo', 16)} and {tuned_share('opob', 16)}; "
         f"lag 64: {tuned_share('vcpo', 64)} and {tuned_share('opob', 64)} ([tables]({tables}#equal-tuning))"],
        ["of a small policy, 128 versions old or more", "VCPO; from 256 at half of the rate",
         f"lag 128: {kept('very_stale', 'vcpo', 128)}; lag 256: {kept('very_stale', 'vcpo', 256)}, "
         f"at half of the rate see [every lag]({tables}#every-lag)"],
        ["of several versions, as weights change in flight", "VCPO",
         f"{kept('mixed_lag', 'vcpo', 16)}; without correction {kept('mixed_lag', 'uncorrected', 16)}"],
        ["sampled by an engine in bfloat16 or INT8", "VCPO where it is stale, too; nothing where it is fresh",
         f"lag 32: {kept_by_other_engines('vcpo')}, without correction {kept_by_other_engines('uncorrected')}"],
        [f"stale, with {clip}", "a third of the learning rate",
         f"PPO-clip, lag 32: {kept(tails, 'ppo_clip', 32, scale=0.3)} instead of {kept(tails, 'ppo_clip', 32)}; "
         f"M2PO: {kept(tails, 'm2po', 32, scale=0.3)} instead of {kept(tails, 'm2po', 32)}"],
        ["stale, and nothing about the loss may change", "`AdaptiveStaleness`: a bound by effective sample size",
         f"{kept('mixed_lag', 'uncorrected+adaptive_staleness', 16)} instead of "
         f"{kept('mixed_lag', 'uncorrected', 16)}"],
        ["too old for the system, which drops late rollouts", "a bound by admission, which drops nothing",
         f"VCPO with drops {kept('length_bias', 'vcpo+drop_longest', 16)}, without {kept('length_bias', 'vcpo', 16)}"],
        ["stale, and you think of GAC", "VCPO", "see [GAC](#gac)"],
    ]  # fmt: skip
    return markdown(["your data is", "use", "share of the synchronous gain kept, 95 % interval"], rows)


def lags() -> str:
    """Every lag of the first grid: no correction, VCPO, and the best of all methods at the regime's rate."""
    summary = summarize(old())
    summary = summary[(summary["learning_rate_scale"] == 1.0) & (summary["lag"] > 0)]
    rows = []
    for (regime, lag), group in summary.groupby(["regime", "lag"]):
        by = group.set_index("method")
        cells = [pm(by.loc[m, "gain_share"], by.loc[m, "gain_share_half"]) if m in by.index else "not run"
                 for m in ("uncorrected", "ppo_clip", "vcpo")]  # fmt: skip
        best = by.loc[by["gain_share"].idxmax()]
        best_cell = f"{best.name} {pm(best['gain_share'], best['gain_share_half'])}" if len(by) > 2 else ""
        rows.append([str(regime), str(lag), *cells, best_cell, str(len(by))])
    return markdown(["regime", "lag", "uncorrected", "PPO-clip", "VCPO", "best", "of methods"], rows)


def ranking() -> str:
    """Each method at its best rate, lag 32 of the first grid, whose rates were searched with a seed of its own."""
    regime, lag = TUNED
    runs = old()
    at_lag = runs[(runs["regime"] == regime) & (runs["lag"] == lag)]
    areas = robustness(at_lag[at_lag["seed"] >= FIRST_SEARCH_SEED])
    return ranked(at_lag, synchronous(runs, regime)["final"], areas)


def gac_before() -> str:
    """GAC in the first grid."""
    rows = []
    for regime, lag, method, scale in TRIED_WITH_GAC:
        variants = [f"{method}+{kind}" for kind in ("gradient_alignment_control", "gac_project")]
        known = set(old().loc[(old()["regime"] == regime) & (old()["lag"] == lag), "method"])
        shown = [kept(regime, v, lag, scale=scale) if v in known else "not run" for v in variants]
        rows.append(
            [f"{method}, {regime}, lag {lag}, rate × {scale:g}", kept(regime, method, lag, scale=scale), *shown]
        )
    return markdown(["", "without", "GAC", "GAC, projection only"], rows)


def warning() -> str:
    """How often the effective sample size falls first."""
    fallen, first, ahead = warning_time(old()[old()["lag"] > 0])
    return (
        f"In {first} of the {fallen} stale runs of the first grid that lost half of their accuracy, the effective "
        f"sample size (`importance/ess_ratio`) had fallen below one half, at the median {ahead:.0f} steps before."
    )
