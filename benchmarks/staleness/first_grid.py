"""Tables of the results page from the first grid, `docs/results/results.parquet`."""

from __future__ import annotations

import numpy as np
import pandas as pd

from benchmarks.staleness.price import kept_beside
from benchmarks.staleness.ranking import ranked, tuned_share
from benchmarks.staleness.shown_runs import FOLDER, markdown, pm, runs_of
from benchmarks.staleness.statistics import (
    LAST_EVALUATIONS,
    best_scales,
    gain_share,
    generations,
    summarize,
    synchronous,
    warning_time,
)
from benchmarks.staleness.suite import FIRST_SEARCH_SEED
from benchmarks.staleness.table import read_table

TRIED_WITH_GAC = (
    ("heavy_tails", 32, "uncorrected", 1.0),
    ("heavy_tails", 32, "uncorrected", 0.3),
    ("heavy_tails", 32, "vcpo", 1.0),
    ("heavy_tails", 64, "vcpo", 1.0),
    ("aligned_gradients", 16, "ppo_clip", 1.0),
    ("aligned_gradients", 16, "vcpo", 1.0),
)
DEVICES = {"cpu": "a CPU", "cuda": "a GPU"}
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


def kept_by_language_model(method: str, lag: int) -> dict[str, str]:
    """Share of the synchronous gain that SmolLM2 keeps at the rate that won the search, by device.

    Runs are compared with synchronous ones of the same kind of device: the same seed ends elsewhere on another.
    """
    runs = runs_of("smollm2")
    if runs is None:
        return {}
    best = best_scales(runs[runs["seed"] >= FIRST_SEARCH_SEED])
    chosen = (runs["method"] == method) & (runs["lag"] == lag) & (runs["seed"] < FIRST_SEARCH_SEED)
    found = runs[chosen & np.isclose(runs["learning_rate_scale"], best.get(("smollm2", method, lag), 1.0))]
    shares = {}
    for device, group in found.groupby("device"):
        reference = synchronous_language_model(str(device))["final"]
        share = gain_share(group["final"], float(group["start"].mean()), reference)
        shares[str(device)] = f"{pm(*share)} ({len(group)} seed{'s' if len(group) > 1 else ''})"
    return shares


def synchronous_language_model(device: str) -> pd.DataFrame:
    """Synchronous runs of SmolLM2 on a kind of device, at the rate that won the search.

    Where fewer than two seeds ran that the search has not seen, that of the search is among them.
    """
    tables = [runs_of("smollm2"), runs_of("gac_map")]
    runs = pd.concat([table for table in tables if table is not None], ignore_index=True)
    is_plain = runs["method"].isin(["uncorrected", "uncorrected+drift"])  # which measures, and changes nothing
    own = runs[(runs["regime"] == "smollm2") & is_plain & (runs["lag"] == 0)]
    is_searched = own["seed"] >= FIRST_SEARCH_SEED
    scale = best_scales(own[is_searched].assign(method="uncorrected")).get(("smollm2", "uncorrected", 0), 1.0)
    own = own[(own["device"] == device) & np.isclose(own["learning_rate_scale"], scale)]
    others = own[own["seed"] < FIRST_SEARCH_SEED]
    return others if len(others) > 1 else own


def decision() -> str:
    """Recommended method, by situation."""
    tails = "heavy_tails"

    def model(method: str, lag: int) -> str:
        return ", ".join(f"{share} on {DEVICES[on]}" for on, share in kept_by_language_model(method, lag).items())

    easier = runs_of("smollm2_arithmetic")

    def arithmetic(method: str, lag: int, scale: float = 1.0) -> str:
        return "" if easier is None else kept_beside(easier, method, lag, scale=scale)

    language_model = "SmolLM2-135M"
    small = "88 thousand parameters"
    clip = "a clip (PPO, M2PO, DPPO) that you want to keep"
    rows = [
        [f"{language_model}, [easier task](#a-language-model)", "4 or 16 versions old", "VCPO with `SCORE` norms",
         f"lag 4: {arithmetic('vcpo_score', 4)}; lag 16: {arithmetic('vcpo_score', 16)}, "
         f"PPO-clip {arithmetic('ppo_clip', 16)}, token TIS {arithmetic('token_tis', 16, 0.3)}"],
        [language_model, "16 versions old",
         "a lower bound; if it must be 16, token TIS at a third of the learning rate",
         f"token TIS {model('token_tis', 16)}; VCPO {model('vcpo', 16)}; "
         f"without correction {model('uncorrected', 16)}"],
        [language_model, "64 versions old (1.6 generations †)", "a lower bound: none of four methods keeps half",
         f"token TIS {model('token_tis', 64)}; VCPO {model('vcpo', 64)}; "
         f"without correction {model('uncorrected', 64)}"],
        [small, "4 versions old", "VCPO: `configs/stabilizers/vcpo.yaml`",
         f"{kept(tails, 'vcpo', 4)}; without correction {kept(tails, 'uncorrected', 4)}"],
        [small, "16 or 32 versions old",
         "VCPO, or its baseline alone (`opob`), at the learning rate of a synchronous run",
         f"lag 16: {tuned_share('vcpo', 16)} and {tuned_share('opob', 16)} ([table](#equal-tuning)); "
         f"lag 32: {kept(tails, 'vcpo', 32)} and {kept(tails, 'opob', 32)}"],
        [small, "64 versions old or more", "not known: no run had six generations",
         "VCPO after 1.6 to 3.8 generations †: 0.88 to 1.00 ([every lag](#every-lag))"],
        [small, "of several versions, as weights change in flight", "VCPO",
         f"{kept('mixed_lag', 'vcpo', 16)}; without correction {kept('mixed_lag', 'uncorrected', 16)}"],
        [small, "sampled by an engine in bfloat16 or INT8", "for stale data VCPO, for fresh data no correction",
         f"lag 32: {kept_by_other_engines('vcpo')}, without correction {kept_by_other_engines('uncorrected')}"],
        [small, f"stale, with {clip}", "a third of the learning rate",
         f"PPO-clip, lag 32: {kept(tails, 'ppo_clip', 32, scale=0.3)} instead of {kept(tails, 'ppo_clip', 32)}; "
         f"M2PO: {kept(tails, 'm2po', 32, scale=0.3)} instead of {kept(tails, 'm2po', 32)}"],
        [small, "stale, and the loss must not change", "`AdaptiveStaleness`: a bound by effective sample size",
         f"{kept('mixed_lag', 'uncorrected+adaptive_staleness', 16)} instead of "
         f"{kept('mixed_lag', 'uncorrected', 16)}"],
        [small, "dropped when it is late", "a bound by admission, which drops no rollouts",
         f"VCPO with drops {kept('length_bias', 'vcpo+drop_longest', 16)}, without {kept('length_bias', 'vcpo', 16)}"],
        ["both", "stale, and you consider GAC", "VCPO or token TIS", "see [GAC](#gac)"],
    ]  # fmt: skip
    return markdown(["policy", "its data is", "use", "share of the synchronous gain kept"], rows)


def lags() -> str:
    """Every lag of the first grid: no correction, PPO-clip and VCPO at the regime's rate."""
    summary = summarize(old())
    summary = summary[(summary["learning_rate_scale"] == 1.0) & (summary["lag"] > 0)]
    steps = read_table(FOLDER / "results.parquet")
    rows = []
    for (regime, lag), group in summary.groupby(["regime", "lag"]):
        by = group.set_index("method")
        cells = [pm(by.loc[m, "gain_share"], by.loc[m, "gain_share_half"]) if m in by.index else "not run"
                 for m in ("uncorrected", "ppo_clip", "vcpo")]  # fmt: skip
        counted = generations(group["steps"].max(), int(lag))
        first = f"{made_in_the_first_generation(steps, str(regime), int(lag)):.2f}"
        rows.append([str(regime), str(lag), counted, *cells, first])
    head = ["regime", "lag", "generations", "uncorrected", "PPO-clip", "VCPO", "of VCPO's gain, by step `lag`"]
    return markdown(head, rows)


def made_in_the_first_generation(steps: pd.DataFrame, regime: str, lag: int) -> float:
    """Share of VCPO's gain that it has made by step `lag`, on what the first policy sampled: mean over seeds."""
    runs = steps[(steps["regime"] == regime) & (steps["method"] == "vcpo") & (steps["lag"] == lag)
                 & (steps["learning_rate_scale"] == 1.0) & (steps["seed"] < FIRST_SEARCH_SEED)]  # fmt: skip
    accuracy = runs.dropna(subset=["accuracy"]).groupby("step")["accuracy"].mean()
    gain = accuracy.iloc[-LAST_EVALUATIONS:].mean() - accuracy.iloc[0]
    return float((np.interp(lag, accuracy.index, accuracy) - accuracy.iloc[0]) / gain)


def ranking() -> str:
    """Each method at its best rate, lag 32 of the first grid, whose rates were searched with a seed of its own."""
    regime, lag = TUNED
    runs = old()
    at_lag = runs[(runs["regime"] == regime) & (runs["lag"] == lag)]
    return ranked(at_lag, synchronous(runs, regime)["final"])


def gac_before() -> str:
    """GAC in the first grid."""
    rows = []
    for regime, lag, method, scale in TRIED_WITH_GAC:
        variants = [f"{method}+{kind}" for kind in ("gradient_alignment_control", "gac_project")]
        known = set(old().loc[(old()["regime"] == regime) & (old()["lag"] == lag), "method"])
        shown = [kept(regime, v, lag, scale=scale) if v in known else "not run" for v in variants]
        steps = old().loc[old()["regime"] == regime, "steps"].max()
        said = f"{method}, {regime}, lag {lag}, rate × {scale:g}"
        rows.append([said, generations(steps, lag), kept(regime, method, lag, scale=scale), *shown])
    return markdown(["", "generations", "without", "GAC", "GAC, projection only"], rows)


def warning() -> str:
    """How often the effective sample size falls first, and how often it falls without a loss that follows."""
    return f"In the first series of runs, {warning_time(old()[old()['lag'] > 0])}"
