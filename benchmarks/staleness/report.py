"""Report of the staleness benchmark: tables, figures, and a ranking in words, from the table alone."""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd

from benchmarks.common.page import as_html
from benchmarks.staleness import figures
from benchmarks.staleness.comparisons import comparison_table
from benchmarks.staleness.ranking import searched_rates
from benchmarks.staleness.statistics import (
    LAST_EVALUATIONS,
    generations,
    naive_method,
    per_cell,
    summarize,
    synchronous,
    warning_time,
)
from benchmarks.staleness.suite import FIRST_SEARCH_SEED

PICTURES = "pictures"
SHOWN = 6  # methods in a picture of learning curves: the naive one, the best ones


def write_report(table: pd.DataFrame, out: Path, command: str) -> str:
    """Writes `report.html`, `report.md` and pictures into `out`; returns the ranking in words.

    Args:
        table: as `read_cells` or `read_table` give it.
        out: folder.
        command: what made the table; printed in the report.
    """
    (out / PICTURES).mkdir(parents=True, exist_ok=True)
    runs = per_cell(table)
    summary = summarize(runs)
    failed = int(runs["error"].notna().sum())
    lines = ["# Staleness benchmark", f"{len(runs)} runs, {failed} of them broke. Made by `{command}`."]
    if len(searched := table[table["seed"] >= FIRST_SEARCH_SEED]):
        scales = ", ".join(f"{scale:g}" for scale in sorted(searched["learning_rate_scale"].unique()))
        seeds = searched["seed"].nunique()
        lines.append(f"Search budget, the same for every method: {seeds} seed(s) x learning rate times {scales}.")
    said = []
    if summary.empty:
        said.append(searched_rates(runs))
        lines += ["Nothing but the search was run.", *said]
    else:
        for regime, rows in summary.groupby("regime", sort=False):
            if set(rows[rows["learning_rate_scale"] == 1.0]["lag"]) - {0} and not synchronous(runs, regime).empty:
                lines += [f"## {regime}", *_regime(table, runs, summary, regime=regime, out=out)]
                said += [f"{regime}:", *words(runs, summary, regime)]
            else:
                compared = comparison_table(runs, regime)
                lines += [
                    f"## {regime}",
                    "Without a synchronous run and stale ones at the regime's own rate.",
                    compared,
                ]
                said += [f"{regime}:", compared]
        lines += ["## What each stabilizer does", *_effects(table, out)]
    (out / "report.md").write_text("\n\n".join(lines) + "\n")
    (out / "report.html").write_text(as_html("Staleness benchmark", lines, out))
    return "\n".join([*said, f"report: {out / 'report.html'}"])


def words(runs: pd.DataFrame, summary: pd.DataFrame, regime: str) -> list[str]:
    """Summary of a regime in sentences."""
    rows = summary[(summary["regime"] == regime) & (summary["learning_rate_scale"] == 1.0)]
    naive = naive_method(runs, regime)
    reference = rows[(rows["method"] == naive) & (rows["lag"] == 0)].iloc[0]
    start = synchronous(runs, regime)["start"].mean()
    said = [f"Synchronous training goes from {start:.3f} to {_pm(reference, 'final', 3)} ({reference['seeds']} seeds)."]
    for lag in sorted(set(rows["lag"]) - {0}):
        at = rows[rows["lag"] == lag].sort_values("gain_share", ascending=False)
        alone = at[at["method"] == naive]
        if len(alone):
            one = alone.iloc[0]
            fates = f"of {one['seeds']} runs {one['collapsed']} collapse and {one['slow']} are slow"
            said.append(
                f"Lag {lag}: {naive} keeps {_pm(one, 'gain_share')} of the gain, {fates}; its consecutive gradients "
                f"have cosine {_pm(one, 'cosine')} (synchronous: {_pm(reference, 'cosine')}), its effective sample "
                f"size is {_pm(one, 'ess_ratio')} of the rollouts."
            )
        kept = [f"{r['method']} {_pm(r, 'gain_share')}" for _, r in at[at["method"] != naive].iterrows()]
        if kept:
            said.append(f"Lag {lag}, share of the gain kept: {', '.join(kept)}.")
    warning = warning_time(runs[(runs["regime"] == regime) & (runs["lag"] > 0)])
    if warning.fallen:
        said.append(str(warning))
    return said


def _pm(row: pd.Series, name: str, digits: int = 2) -> str:
    half = row[f"{name}_half"]
    return f"{row[name]:.{digits}f}" + ("" if math.isnan(half) else f" ± {half:.{digits}f}")


def _regime(table: pd.DataFrame, runs: pd.DataFrame, summary: pd.DataFrame, regime: str, out: Path) -> list[str]:
    """Markdown of one regime."""
    rows = summary[summary["regime"] == regime]
    own = table[
        (table["regime"] == regime) & (table["learning_rate_scale"] == 1.0) & (table["seed"] < FIRST_SEARCH_SEED)
    ]
    naive = naive_method(runs, regime)
    plain = rows[rows["learning_rate_scale"] == 1.0]
    lag = int(plain[plain["lag"] > 0].groupby("lag")["method"].nunique().sort_values(kind="stable").index[-1])
    best = plain[(plain["lag"] == lag) & (plain["method"] != naive)].nlargest(SHOWN - 1, "gain_share")["method"]
    shown = [naive, *best]
    several = plain.groupby("method")["lag"].nunique()
    pictures = {
        "accuracy": figures.accuracy_by_lag(own, shown),
        "signals": figures.signals_by_lag(own, naive),
        "ranking": figures.ranking(rows, lag),
        "cost": figures.equal_cost(own, shown, lag),
    }
    if (several > 1).any():
        pictures["lags"] = figures.final_against_lag(plain)
    pictures |= {f"signals_{m}": figures.signals_by_lag(own, m) for m in best[:1] if several[m] > 1}
    for name, figure in pictures.items():
        figures.save(figure, str(out / PICTURES / f"{regime}_{name}.png"))
    images = [f"![{regime}: {name}]({PICTURES}/{regime}_{name}.png)" for name in pictures]
    compared = ["Each seed at the rate that is best for the other seeds:", comparison_table(runs, regime)]
    return [*(f"* {line}" for line in words(runs, summary, regime)), *images, _table(rows), *compared]


def _effects(table: pd.DataFrame, out: Path) -> list[str]:
    """Pictures of single stabilizers, as far as the table has them."""
    lines = []
    own = table[(table["learning_rate_scale"] == 1.0) & (table["seed"] < FIRST_SEARCH_SEED)]
    for method, (regime, without, signals) in figures.EFFECTS.items():
        rows = own[own["regime"] == regime]
        both = set(rows[rows["method"] == method]["lag"]) & set(rows[rows["method"] == without]["lag"]) - {0}
        if both:
            lag = sorted(both)[len(both) // 2]
            name = f"effect_{method.replace('+', '_')}"
            figures.save(
                figures.effect(rows, without, method, lag=lag, signals=signals), str(out / PICTURES / f"{name}.png")
            )
            lines += [f"{method} against {without}, {regime}, lag {lag}:", f"![{method}]({PICTURES}/{name}.png)"]
    return lines


def _table(rows: pd.DataFrame) -> str:
    """Markdown table, a row for each (method, lag, learning rate)."""
    head = (
        f"method | lag | generations | lr × | seeds | accuracy, last {LAST_EVALUATIONS} evaluations | gain kept | "
        "collapsed | slow | cosine | ESS ratio | KL | staleness"
    )
    lines = [f"| {head} |", "|" + "---|" * 13]
    for _, r in rows.sort_values(["lag", "gain_share"], ascending=[True, False]).iterrows():
        cells = [
            *(r["method"], r["lag"], generations(r["steps"], r["lag"])),
            *(f"{r['learning_rate_scale']:g}", r["seeds"], _pm(r, "final", 3), _pm(r, "gain_share")),
            *(f"{r['collapsed']}/{r['seeds']}", f"{r['slow']}/{r['seeds']}"),
            *(_pm(r, "cosine"), _pm(r, "ess_ratio"), f"{r['kl']:.3f}", f"{r['staleness']:.1f}"),
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)
