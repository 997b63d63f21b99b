"""The tables of the results page, made of the tables of runs in `docs/results/*.parquet`.

    python -m benchmarks.staleness.page                                # writes the page's tables anew
    python -m benchmarks.staleness.page --collect gac runs/bench/gac   # with what that grid has finished
    python -m benchmarks.staleness.page --show gac_map                 # prints a table that the page leaves out

The text between `<!-- results: NAME -->` and `<!-- end -->` is that of the function NAME.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.stats import binomtest
from scipy.stats import t as student

from benchmarks.staleness import first_grid, shown_runs
from benchmarks.staleness.comparisons import at_best_rate, compare
from benchmarks.staleness.price import price_of
from benchmarks.staleness.ranking import equal_tuning
from benchmarks.staleness.shown_runs import markdown, pm, runs_of
from benchmarks.staleness.statistics import (
    HALF,
    gain_share,
    generations,
    interval,
    per_cell,
    synchronous,
    synchronous_gain,
)
from benchmarks.staleness.suite import FIRST_SEARCH_SEED
from benchmarks.staleness.table import CELL, SOURCES, collect, read_table

PAGE = Path(__file__).parents[2] / "docs/results.md"
BLOCK = re.compile(r"(?<=<!-- results: )(?P<name>\w+)( -->\n).*?(?=<!-- end -->)", re.S)
MAP_LAGS = (0, 16, 64)
LANGUAGE_MODEL_METHODS = {
    "uncorrected": "no correction",
    "ppo_clip": "PPO-clip",
    "token_tis": "token TIS",
    "vcpo": "VCPO",
}
CORRECTED = "sequence_tis"  # what the first rung of `StalenessController` switches to
DEVICES = {"cuda": "GPU", "cpu": "CPU"}
ENGINES = {"bf16": "bfloat16", "int8": "INT8 weights", "int8_cache": "INT8 keys, values", "noise": "noise of 2 %"}


def _not_run(suite: str) -> str:
    return f"Not run yet: `python scripts/staleness_bench.py --suite {suite} --out runs/bench/{suite}`."


def paired(name: str, regime: str, baseline: str, only: str = "lag >= 0") -> str:
    """Paired differences of one table to a baseline, with what has been run of it; `only` selects runs."""
    runs = runs_of(name)
    if runs is None:
        return _not_run(name)
    runs = runs[runs["regime"] == regime].query(only)
    against = compare(runs, baseline).set_index(["lag", "method"])
    rows = []
    for (lag, method), group in at_best_rate(runs).groupby(["lag", "method"]):
        other = ["", "", ""]
        if (lag, method) in against.index:
            o = against.loc[(lag, method)]
            pairs = f"{o['seeds']} pair{'s' if o['seeds'] > 1 else ''}"
            other = [f"{pm(o['difference'], o['half'], 3)} ({pairs})", _probability(o["p"]), _probability(o["q"])]
        accuracy = pm(*interval(group["final"]), 3)
        worst = f"{group['final'].min():.3f}"
        cosine = pm(*interval(group["cosine"]))
        counted = generations(group["steps"].max(), int(lag))
        rows.append([str(method), str(lag), counted, str(len(group)), accuracy, worst, cosine, *other])
    head = [
        "method",
        "lag",
        "generations",
        "seeds",
        "accuracy",
        "worst seed",
        "cosine",
        f"difference to {baseline}",
        "p",
        "q",
    ]
    return markdown(head, rows)


def _probability(p: float) -> str:
    """For a table; nothing for a single pair."""
    if math.isnan(p):
        return ""
    return f"{p:.3f}" if p >= 0.0005 else "< 0.001"


def language_model(name: str) -> str:
    """Accuracy of SmolLM2 in the course of a table's runs; signals are medians over their stale steps."""
    runs = runs_of(name)
    if runs is None:
        return _not_run(name)
    steps = read_table(shown_runs.FOLDER / f"{name}.parquet")
    setting = ["lag", "method", "learning_rate_scale", "device"]
    evaluations = steps[steps["accuracy"].notna()].groupby([*setting, "step"])["accuracy"]
    rows = []
    for key, group in runs.groupby(setting):
        lag, method, scale, device = key
        course = evaluations.mean().loc[key]
        accuracies = [f"{accuracy:.2f}" for accuracy in course]
        signals = [f"{group[name].mean():.2f}" for name in ("ess_ratio", "cosine")]
        counted = generations(group["steps"].max(), int(lag))
        rows.append(
            [str(lag), counted, str(method), f"{scale:g}", DEVICES[str(device)], str(len(group)), *accuracies, *signals]
        )
    at = [
        f"accuracy, step {step}" if step == 0 else str(step)
        for step in sorted(steps["step"][steps["accuracy"].notna()].unique())
    ]
    return markdown(
        ["lag", "generations", "method", "rate ×", "on a", "runs", *at, "effective sample size", "cosine"], rows
    )


def language_model_kept() -> str:
    """Share of the synchronous gain that SmolLM2 keeps, over seeds that did not choose the rate, by kind of device."""
    runs = runs_of("smollm2")
    if runs is None:
        return _not_run("smollm2")
    columns = [(lag, device) for lag in (16, 64) for device in DEVICES]
    shares = {
        (title, lag): first_grid.kept_by_language_model(method, lag)
        for method, title in LANGUAGE_MODEL_METHODS.items()
        for lag in (16, 64)
    }
    columns = [
        (lag, device) for lag, device in columns if any(device in shares[key] for key in shares if key[1] == lag)
    ]
    rows = [
        [title, *(shares[title, lag].get(device, "") for lag, device in columns)]
        for title in LANGUAGE_MODEL_METHODS.values()
    ]
    head = [
        f"lag {lag} ({generations(runs['steps'].max(), lag)} generations), {DEVICES[device]}" for lag, device in columns
    ]
    return markdown(["method, at the better of two rates", *head], rows)


def controller() -> str:
    """Runs at rates that are too high, with `StalenessController` and without it."""
    runs = runs_of("controller")
    if runs is None:
        return _not_run("controller")
    tables = {name: found for name in ("results", "smollm2") if (found := runs_of(name)) is not None}
    hard = runs[runs["method"].str.contains("controller") & (runs["learning_rate_scale"] > 1)]
    rows = []
    for key, group in hard.groupby(["regime", "method", "lag"]):
        regime, method, lag = key
        loss = str(method).split("+")[0]
        reference = synchronous(tables["smollm2" if regime == "smollm2" else "results"], str(regime))
        gain = synchronous_gain(reference)
        means = group.groupby("learning_rate_scale")["final"].mean()
        apart = runs[(runs["regime"] == regime) & (runs["method"] == loss) & (runs["lag"] == lag)]
        without = apart[apart["learning_rate_scale"] > 1]
        rows.append(
            [
                str(regime),
                loss,
                str(lag),
                generations(group["steps"].max(), int(lag)),
                *(f"{means[scale]:.2f}" for scale in (2.0, 4.0, 8.0)),
                *lost(group, gain),
                f"{without['final'].mean():.2f}" if len(without) else "",
                *(lost(without, gain) if len(without) else ("", "")),
            ]
        )
    head = ["regime", "loss", "lag", "generations", "with it, rate × 2", "× 4", "× 8", "end below half", "collapsed"]
    head += ["without it, × 2 to 8", "end below half without it", "collapsed without it"]
    return markdown(head, rows)


def hard() -> str:
    """Of runs at rates that are too high, how many keep half of the synchronous gain, with a controller and without."""
    runs = runs_of("hard")
    before = runs_of("controller")
    results = runs_of("results")
    if runs is None or before is None or results is None:
        return _not_run("hard")
    corrected = runs.set_index(CELL)
    earlier = before.set_index(CELL)
    rows = []
    total = [0, 0, 0, 0, 0]
    new = runs[runs["method"].str.contains("controller")]
    for (regime, method, lag), group in new.groupby(["regime", "method", "lag"]):
        gain = synchronous_gain(synchronous(results, str(regime)))
        loss = str(method).split("+")[0]
        keys = [tuple(key) for key in group[CELL].itertuples(index=False)]
        alone, fixed = ([(key[0], other, *key[2:]) for key in keys] for other in (loss, CORRECTED))
        tables = [group, earlier.loc[keys], earlier.loc[alone], corrected.loc[fixed]]
        counts = [len(keys), *(_keeping(table, gain) for table in tables)]
        total = [a + b for a, b in zip(total, counts, strict=True)]
        rows.append([str(regime), loss, str(lag), generations(group["steps"].max(), int(lag)), *map(str, counts)])
    low, high = binomtest(total[1], total[0]).proportion_ci(method="exact")
    rows.append(["all", "", "", "", *map(str, total)])
    head = ["regime", "loss", "lag", "generations", "runs", "with the controller", "with an earlier version"]
    table = markdown([*head, "without it", f"`{CORRECTED}` from the start"], rows)
    kept, lowest, highest = (round(100 * value) for value in (total[1] / total[0], low, high))
    share = f"{total[1]} of {total[0]} runs ({kept} %, 95 % interval {lowest} to {highest} %)"
    return f"{table}\n\nWith the controller, {share} keep at least half of the synchronous gain."


def _keeping(runs: pd.DataFrame, gain: float) -> int:
    """How many end at half of the synchronous gain or above."""
    return int((runs["final"] - runs["start"] >= HALF * gain).sum())


def lost(runs: pd.DataFrame, gain: float) -> tuple[str, str]:
    """How many of them end below half of the synchronous gain, and how many of these had risen and fallen again."""
    is_below = runs["final"] - runs["start"] < HALF * gain
    return f"{is_below.sum()} of {len(runs)}", str((is_below & runs["collapsed"]).sum())


def controller_pairs(name: str) -> str:
    """Pairs of runs of a table at the stable rate, with `StalenessController` and without it."""
    runs = runs_of(name)
    if runs is None:
        return _not_run(name)
    healthy = runs[runs["learning_rate_scale"] == 1]
    model = runs_of("smollm2")
    both = healthy if model is None else pd.concat([healthy, model[model["learning_rate_scale"] == 1]])
    finals = both.set_index(["regime", "lag", "seed", "method"])["final"]
    rows = []
    for (regime, lag, method), group in healthy[healthy["method"].str.contains("controller")].groupby(
        ["regime", "lag", "method"]
    ):
        loss = str(method).split("+")[0]
        keys = [(regime, lag, seed) for seed in group["seed"] if (regime, lag, seed, loss) in finals.index]
        pairs = pd.Series([finals[(*key, method)] - finals[(*key, loss)] for key in keys], dtype=float)
        changes = group["controller_changes"].dropna()  # not in old tables
        changed = f"{(changes > 0).sum()} of {len(changes)}" if len(changes) else ""
        counted = [str(len(keys)), pm(*interval(pairs), 4), f"{pairs.abs().max():.4f}", changed]
        rows.append([str(regime), loss, str(lag), *counted])
    return markdown(["regime", "loss", "lag", "pairs", "difference of the accuracy", "largest", "changed"], rows)


def blend() -> str:
    """The blend of two estimators beside each of them alone, and the difference to the better one, seed by seed."""
    rows = []
    for name, blended, least_samples in (("blend", "estimator_blend", 32), ("blend_quarter", "blend_8", 8)):
        if (runs := runs_of(name)) is not None:
            rows += _blended(runs, blended, least_samples)
    head = ["rollouts", "minimum ESS", "lag", "generations", "sequence weights", "token weights", "blend"]
    return markdown([*head, "share of sequence weights", "blend less the better", "at least (one-sided 95 %)"], rows)


def _blended(runs: pd.DataFrame, blended: str, least_samples: int) -> list[list[str]]:
    parts = runs["method"].str.replace("+steps_400", "").str.split("+", expand=True).reindex(columns=[0, 1])
    runs = runs.assign(estimator=parts[0], rollouts=np.where(parts[1] == "batch_32", 32, 128))
    rows = []
    for (rollouts, lag), group in runs.groupby(["rollouts", "lag"]):
        finals = group.pivot(index="seed", columns="estimator", values="final")
        better = finals[["blend_sequence", "blend_token"]].mean().idxmax()
        pairs = (finals[blended] - finals[better]).dropna()
        least = pairs.mean() - student.ppf(0.95, len(pairs) - 1) * pairs.std(ddof=1) / math.sqrt(len(pairs))
        share = group[group["estimator"] == blended]["blend_share"].mean()
        accuracies = [pm(*interval(finals[name]), 3) for name in ("blend_sequence", "blend_token", blended)]
        counted = generations(group["steps"].max(), int(lag))
        against = [f"{share:.2f}", f"{pairs.mean():.3f}", f"{least:.3f}"]
        rows.append([str(rollouts), str(least_samples), str(lag), counted, *accuracies, *against])
    return rows


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
            cells.append(f"{pm(*interval(found), 3)} ({len(found)})" if len(found) else "")
        rows.append([method, *cells])
    return markdown(["method", *(f"{ENGINES[engine]}, lag {lag}" for engine, lag in columns)], rows)


def very_stale() -> str:
    """Share of the synchronous gain kept at lag 256, at each rate."""
    runs = runs_of("very_stale")
    if runs is None:
        return _not_run("very_stale")
    reference = synchronous(runs, "very_stale")["final"]
    stale = runs[runs["lag"] > 0]
    rows = []
    for (method, scale), group in stale.groupby(["method", "learning_rate_scale"]):
        share = gain_share(group["final"], float(group["start"].mean()), reference)
        counted = generations(group["steps"].max(), 256)
        rows.append([str(method), counted, f"{scale:g}", str(len(group)), pm(*interval(group["final"]), 3), pm(*share)])
    return markdown(["method", "generations", "rate ×", "seeds", "accuracy", "share of the gain kept"], rows)


def gac_search() -> str:
    """Settings of GAC at two rates, on the seeds of the search, and how aligned consecutive gradients are."""
    runs = runs_of("gac_search")
    if runs is None:
        return _not_run("gac_search")
    scales = sorted(runs["learning_rate_scale"].unique())
    rows = []
    for method, group in runs.groupby("method"):
        cells = []
        for scale in scales:
            found = group[group["learning_rate_scale"] == scale]
            accuracy = found["final"].mean()
            cosine = found["cosine"].mean()
            cells += [f"{accuracy:.3f} ({len(found)})", f"{cosine:.2f}"] if len(found) else ["", ""]
        rows.append([str(method), *cells])
    head = [part for scale in scales for part in (f"accuracy, rate × {scale:g}", "cosine")]
    return markdown(["method", *head], rows)


def gac_map() -> str:
    """How aligned consecutive gradients are, by lag, where weights move far while data wait, and where not.

    Over the first half of a run, in which most that will collapse have not, from when its data are as old as the lag,
    or as a quarter of the run; a cosine is the median over these steps, and a lag's the mean over runs.
    """
    path = shown_runs.FOLDER / "gac_map.parquet"
    if not path.is_file():
        return _not_run("gac_map")
    steps = read_table(path)
    ends = per_cell(steps).set_index(CELL)["final"]
    length = steps.groupby(CELL)["step"].transform("max")
    is_stale = steps["staleness_mean"] >= np.minimum(steps["lag"], length / 4)
    half = steps[is_stale & (steps["step"] < length / 2)]
    half = half.assign(relative=half["drift_stale"] / half["drift_radius"])
    medians = half.groupby(CELL)[["cosine", "relative"]].median().join(ends)
    by_lag = medians.groupby(["regime", "method", "learning_rate_scale", "lag"]).mean()
    rows = []
    for (regime, method, scale), group in by_lag.groupby(["regime", "method", "learning_rate_scale"]):
        lags = group.droplevel(["regime", "method", "learning_rate_scale"])
        cells = [
            ", ".join(f"{lags.loc[lag, name]:.{digits}f}" if lag in lags.index else "–" for lag in which)
            for name, digits, which in (
                ("cosine", 2, MAP_LAGS),
                ("relative", 1, MAP_LAGS[1:]),
                ("final", 2, MAP_LAGS),
            )
        ]
        longest = steps.loc[steps["regime"] == regime, "step"].max()
        counted = ", ".join(generations(longest, lag) for lag in MAP_LAGS[1:])
        rows.append([str(regime), *_variant(str(regime), str(method)), f"{scale:g}", counted, *cells])
    head = ["regime", "trained", "optimizer", "rollouts a step", "rate ×", "generations at 16, 64"]
    head += ["cosine at lag 0, 16, 64"]
    return markdown([*head, "`drift/stale` over R at 16, 64", "accuracy at lag 0, 16, 64"], rows)


def _variant(regime: str, method: str) -> list[str]:
    """Trained weights, optimizer and batch size of a method in the map."""
    parts = method.split("+")
    of_regime = {"heavy_tails": ("all weights", "128"), "smollm2": ("adapters", "32")}
    trained, batch = of_regime[regime]
    batches = [part.removeprefix("batch_") for part in parts if part.startswith("batch_")]
    return [
        "all weights" if "all_weights" in parts else trained,
        "SGD" if "sgd" in parts else "Adam",
        *(batches or [batch]),
    ]


def sources() -> str:
    """Which suite of `scripts/staleness_bench.py` at which commit made which table."""
    rows = []
    for name, source in json.loads((shown_runs.FOLDER / SOURCES).read_text()).items():
        runs = runs_of(name)
        cells = [f"[`{name}.parquet`](results/{name}.parquet)", "" if runs is None else str(len(runs))]
        rows.append([*cells, f"`{source['command'].rpartition(' ')[2]}`", source["commit"]])
    return markdown(["table", "runs", "suite", "commit"], rows)


BLOCKS: dict[str, Callable[[], str]] = {
    "decision": first_grid.decision,
    "warning": first_grid.warning,
    "ranking": first_grid.ranking,
    "lags": first_grid.lags,
    "language_model": partial(language_model, "smollm2"),
    "language_model_long": partial(language_model, "smollm2_long"),
    "language_model_kept": language_model_kept,
    "language_model_price": partial(price_of, "smollm2_arithmetic"),
    "controller": controller,
    "controller_on_healthy_runs": partial(controller_pairs, "controller"),
    "hard": hard,
    "controller_pairs": partial(controller_pairs, "controller_pairs"),
    "blend": blend,
    "very_stale": very_stale,
    "mismatch": mismatch,
    "gac": partial(paired, "gac", "quickstart_constant", "ppo_clip"),
    "gac_search": gac_search,
    "gac_half": partial(paired, "gac_half", "quickstart_constant", "ppo_clip"),
    "gac_language_model": partial(
        paired,
        "smollm2",
        "smollm2",
        "uncorrected",
        only="lag == 16 and learning_rate_scale == 1 and method.str.startswith('uncorrected')"
        f" and seed < {FIRST_SEARCH_SEED}",
    ),
    "gac_map": gac_map,
    "gac_pairs": partial(
        paired, "gac_pairs", "heavy_tails", "uncorrected", only="method.str.startswith('uncorrected')"
    ),
    "gac_pairs_control": partial(
        paired,
        "gac_pairs",
        "heavy_tails",
        "uncorrected+gac_project_norm_only",
        only="method.str.startswith('uncorrected+')",
    ),
    "gac_pairs_corrected": partial(
        paired, "gac_pairs", "heavy_tails", "token_tis", only="method.str.startswith('token_tis')"
    ),
    "gac_before": first_grid.gac_before,
    "equal_tuning": lambda: equal_tuning(16) or _not_run("equal_tuning"),
    "equal_tuning_lag_64": lambda: equal_tuning(64) or _not_run("equal_tuning"),
    "sources": sources,
}


def fill(text: str) -> str:
    """The page with its tables made anew."""
    return BLOCK.sub(lambda block: f"{block['name']} -->\n\n{BLOCKS[block['name']]()}\n\n", text)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collect", nargs=2, metavar=("SUITE", "FOLDER"), help="a suite, and its folder of results")
    parser.add_argument("--show", choices=sorted(BLOCKS), help="prints this table, and writes nothing")
    args = parser.parse_args()
    if args.show:
        print(BLOCKS[args.show]())
        return
    if args.collect:
        collect(args.collect[0], Path(args.collect[1]), shown_runs.FOLDER)
    PAGE.write_text(fill(PAGE.read_text()))


if __name__ == "__main__":
    main()
