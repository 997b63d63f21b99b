"""The tables of `docs/results.md`, made of the tables of runs in `docs/results/*.parquet`.

    python -m benchmarks.staleness.page                                # writes the page's tables anew
    python -m benchmarks.staleness.page --collect gac runs/bench/gac   # with what that grid has finished

The text between `<!-- results: NAME -->` and `<!-- end -->` is that of the function NAME.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import numpy as np
import pandas as pd

from benchmarks.staleness.comparisons import at_best_rate, compare
from benchmarks.staleness.statistics import gain_share, interval, per_cell, summarize, synchronous, warning_time
from benchmarks.staleness.suite import FIRST_SEARCH_SEED
from benchmarks.staleness.table import SOURCES, collect, read_table

ROOT = Path(__file__).parents[2]
FOLDER, PAGE = ROOT / "docs/results", ROOT / "docs/results.md"
BLOCK = re.compile(r"(?<=<!-- results: )(?P<name>\w+)( -->\n).*?(?=<!-- end -->)", re.S)
ENGINES = {"bf16": "bfloat16", "int8": "INT8 weights", "int8_cache": "INT8 keys, values", "noise": "noise of 2 %"}
TRIED_WITH_GAC = (
    ("heavy_tails", 32, "uncorrected", 1.0),
    ("heavy_tails", 32, "uncorrected", 0.3),
    ("heavy_tails", 32, "vcpo", 1.0),
    ("heavy_tails", 64, "vcpo", 1.0),
    ("aligned_gradients", 16, "ppo_clip", 1.0),
    ("aligned_gradients", 16, "vcpo", 1.0),
)
TUNED = "heavy_tails", 32  # regime and lag at which the old grid tried three rates


@cache
def runs_of(name: str) -> pd.DataFrame | None:
    """The runs of a table, None where there is no such table yet."""
    path = FOLDER / f"{name}.parquet"
    return per_cell(read_table(path)) if path.is_file() else None


def old() -> pd.DataFrame:
    """The runs of the first grid."""
    found = runs_of("results")
    if found is None:
        raise FileNotFoundError(f"{FOLDER / 'results.parquet'}: there is no such table")
    return found


def _pm(value: float, half: float, digits: int = 2) -> str:
    return f"{value:.{digits}f}" + ("" if math.isnan(half) else f" ± {half:.{digits}f}")


def _markdown(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows))


def kept(regime: str, method: str, lag: int, scale: float = 1.0) -> str:
    """Share of the synchronous gain that a method keeps in the first grid, with its interval."""
    runs = old()
    found = runs[
        (runs["regime"] == regime) & (runs["method"] == method) & (runs["lag"] == lag)
        & np.isclose(runs["learning_rate_scale"], scale) & (runs["seed"] < FIRST_SEARCH_SEED)
    ]  # fmt: skip
    return _pm(*gain_share(found["final"], float(found["start"].mean()), synchronous(runs, regime)["final"]))


def decision() -> str:
    """What to use, by situation."""
    tails, clip = "heavy_tails", "a clip (PPO, M2PO, DPPO) that you want to keep"
    rows = [
        ["a few versions old", "VCPO: `configs/stabilizers/vcpo.yaml`",
         f"{kept(tails, 'vcpo', 4)} at lag 4; without correction {kept(tails, 'uncorrected', 4)}"],
        ["16 to 64 versions old", "VCPO, or its baseline alone (`opob`), at the rate of a synchronous run",
         f"lag 32: {kept(tails, 'vcpo', 32)} and {kept(tails, 'opob', 32)}; "
         f"lag 64: {kept(tails, 'vcpo', 64)} and {kept(tails, 'opob', 64)}"],
        ["128 versions or more", "VCPO; from 256 at half of the rate", f"lag 128: {kept('very_stale', 'vcpo', 128)}; "
         f"lag 256: {kept('very_stale', 'vcpo', 256)}, at half of the rate see [every lag](#every-lag)"],
        ["of several versions, as weights change in flight", "VCPO",
         f"{kept('mixed_lag', 'vcpo', 16)}; without correction {kept('mixed_lag', 'uncorrected', 16)}"],
        [f"stale, with {clip}", "a third of the learning rate",
         f"PPO-clip, lag 32: {kept(tails, 'ppo_clip', 32, 0.3)} instead of {kept(tails, 'ppo_clip', 32)}; "
         f"M2PO: {kept(tails, 'm2po', 32, 0.3)} instead of {kept(tails, 'm2po', 32)}"],
        ["stale, and nothing about the loss may change", "`AdaptiveStaleness`: a bound by effective sample size",
         f"{kept('mixed_lag', 'uncorrected+adaptive_staleness', 16)} instead of "
         f"{kept('mixed_lag', 'uncorrected', 16)}"],
        ["too old for the system, which drops late rollouts", "a bound by admission, which drops nothing",
         f"VCPO with drops {kept('length_bias', 'vcpo+drop_longest', 16)}, without {kept('length_bias', 'vcpo', 16)}"],
        ["stale, and you think of GAC", "VCPO", "see [GAC](#gac)"],
    ]  # fmt: skip
    return _markdown(["your data is", "use", "share of the synchronous gain kept, 95 % interval"], rows)


def lags() -> str:
    """Every lag of the first grid: no correction, VCPO, and the best of all methods at the regime's rate."""
    summary = summarize(old())
    summary = summary[(summary["learning_rate_scale"] == 1.0) & (summary["lag"] > 0)]
    rows = []
    for (regime, lag), group in summary.groupby(["regime", "lag"]):
        by = group.set_index("method")
        cells = [_pm(by.loc[m, "gain_share"], by.loc[m, "gain_share_half"]) if m in by.index else "not run"
                 for m in ("uncorrected", "ppo_clip", "vcpo")]  # fmt: skip
        best = by.loc[by["gain_share"].idxmax()]
        best_cell = f"{best.name} {_pm(best['gain_share'], best['gain_share_half'])}" if len(by) > 2 else ""
        rows.append([str(regime), str(lag), *cells, best_cell, str(len(by))])
    return _markdown(["regime", "lag", "uncorrected", "PPO-clip", "VCPO", "best", "of methods"], rows)


def ranking() -> str:
    """Each method at its best rate, lag 32 of the first grid; differences to PPO-clip at its best rate."""
    regime, lag = TUNED
    runs = old()
    at_lag = runs[(runs["regime"] == regime) & (runs["lag"] == lag)]
    searched, reference = at_lag[at_lag["seed"] >= FIRST_SEARCH_SEED], synchronous(runs, regime)["final"]
    best = at_best_rate(at_lag)
    against = compare(at_lag, "ppo_clip").set_index("method")
    rows = []
    for method, group in best.groupby("method"):
        rates = "/".join(f"{scale:g}" for scale in sorted(group["learning_rate_scale"].unique()))
        share, half = gain_share(group["final"], float(group["start"].mean()), reference)
        tried = searched[searched["method"] == method].sort_values("learning_rate_scale")
        area = np.trapezoid(tried["final"], np.log(tried["learning_rate_scale"])) / np.log(
            tried["learning_rate_scale"].max() / tried["learning_rate_scale"].min()
        )
        other = ["", ""]
        if method in against.index:
            o = against.loc[method]
            other = [_pm(o["difference"], o["half"], 3), f"{o['q']:.3f}"]
        cells = [str(method), rates, _pm(*interval(group["final"]), 3), _pm(share, half), *other, f"{area:.2f}"]
        rows.append((share, cells))
    head = ["method", "best rate ×", "accuracy", "share of the gain kept", "difference to PPO-clip", "q", "over rates"]
    return _markdown(head, [cells for _, cells in sorted(rows, key=lambda row: -row[0])])


def _not_run(suite: str) -> str:
    return f"Not run yet: `python scripts/staleness_bench.py --suite {suite} --out runs/bench/{suite}`."


def paired(name: str, regime: str, baseline: str) -> str:
    """Paired differences of one table to a baseline, with what has been run of it."""
    runs = runs_of(name)
    if runs is None:
        return _not_run(name)
    runs = runs[runs["regime"] == regime]
    against = compare(runs, baseline).set_index(["lag", "method"])
    rows = []
    for (lag, method), group in at_best_rate(runs).groupby(["lag", "method"]):
        other = ["", "", ""]
        if (lag, method) in against.index:
            o = against.loc[(lag, method)]
            other = [f"{_pm(o['difference'], o['half'], 3)} ({o['seeds']} pairs)", f"{o['p']:.3f}", f"{o['q']:.3f}"]
        accuracy, worst = _pm(*interval(group["final"]), 3), f"{group['final'].min():.3f}"
        cosine = _pm(*interval(group["cosine"]))
        rows.append([str(method), str(lag), str(len(group)), accuracy, worst, cosine, *other])
    head = ["method", "lag", "seeds", "accuracy", "worst seed", "cosine", f"difference to {baseline}", "p", "q"]
    return _markdown(head, rows)


def gac_before() -> str:
    """GAC in the first grid."""
    rows = []
    for regime, lag, method, scale in TRIED_WITH_GAC:
        variants = [f"{method}+{kind}" for kind in ("gradient_alignment_control", "gac_project")]
        known = set(old().loc[(old()["regime"] == regime) & (old()["lag"] == lag), "method"])
        shown = [kept(regime, v, lag, scale) if v in known else "not run" for v in variants]
        rows.append([f"{method}, {regime}, lag {lag}, rate × {scale:g}", kept(regime, method, lag, scale), *shown])
    return _markdown(["", "without", "GAC", "GAC, projection only"], rows)


def mismatch() -> str:
    """Accuracy with engines that are not quite the trainer."""
    runs = runs_of("mismatch")
    if runs is None:
        return _not_run("mismatch")
    columns = [(engine, lag) for engine in ENGINES for lag in sorted(runs["lag"].unique())]
    rows = []
    for method in sorted({m.partition("+")[0] for m in runs["method"] if "+" in m}):
        cells = []
        for engine, lag in columns:
            found = runs[(runs["method"] == f"{method}+engine_{engine}") & (runs["lag"] == lag)]["final"]
            cells.append(f"{_pm(*interval(found), 3)} ({len(found)})" if len(found) else "")
        rows.append([method, *cells])
    return _markdown(["method", *(f"{ENGINES[engine]}, lag {lag}" for engine, lag in columns)], rows)


def very_stale() -> str:
    """Share of the synchronous gain kept at lag 256, at each rate."""
    runs = runs_of("very_stale")
    if runs is None:
        return _not_run("very_stale")
    reference, stale = synchronous(runs, "very_stale")["final"], runs[runs["lag"] > 0]
    rows = []
    for (method, scale), group in stale.groupby(["method", "learning_rate_scale"]):
        share = gain_share(group["final"], float(group["start"].mean()), reference)
        rows.append([str(method), f"{scale:g}", str(len(group)), _pm(*interval(group["final"]), 3), _pm(*share)])
    return _markdown(["method", "rate ×", "seeds", "accuracy", "share of the gain kept"], rows)


def warning() -> str:
    """How often the effective sample size falls first."""
    fallen, first, ahead = warning_time(old()[old()["lag"] > 0])
    return (
        f"In {first} of the {fallen} stale runs of the first grid that lost half of their accuracy, the effective "
        f"sample size (`importance/ess_ratio`) had fallen below one half, at the median {ahead:.0f} steps before."
    )


def sources() -> str:
    """Which command at which commit made which table."""
    rows = []
    for name, source in json.loads((FOLDER / SOURCES).read_text()).items():
        runs = runs_of(name)
        cells = [f"[`{name}.parquet`](results/{name}.parquet)", "" if runs is None else str(len(runs))]
        rows.append([*cells, f"`{source['command']}`", source["commit"]])
    return _markdown(["table", "runs", "command", "commit"], rows)


BLOCKS: dict[str, Callable[[], str]] = {
    block.__name__: block for block in (decision, lags, ranking, gac_before, mismatch, very_stale, warning, sources)
} | {
    "gac": partial(paired, "gac", "quickstart_constant", "ppo_clip"),
    "equal_tuning": partial(paired, "equal_tuning", "heavy_tails", "ppo_clip"),
}


def fill(text: str) -> str:
    """The page with its tables made anew."""
    return BLOCK.sub(lambda block: f"{block['name']} -->\n\n{BLOCKS[block['name']]()}\n\n", text)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collect", nargs=2, metavar=("SUITE", "FOLDER"), help="a suite, and its folder of results")
    if collected := parser.parse_args().collect:
        collect(collected[0], Path(collected[1]), FOLDER)
    PAGE.write_text(fill(PAGE.read_text()))


if __name__ == "__main__":
    main()
