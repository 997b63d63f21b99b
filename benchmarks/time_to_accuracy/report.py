"""Report: curves over time, steps and tokens, and the table of S(p), from the results alone."""

from __future__ import annotations

import math
from pathlib import Path

import matplotlib as mpl
import pandas as pd

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from benchmarks.common.page import as_html
from benchmarks.staleness.figures import save
from benchmarks.time_to_accuracy.statistics import LAST, SHARES, level_at, smoothed, summarize
from benchmarks.time_to_accuracy.suite import workloads

AXES = {"wall_s": "seconds of training", "step": "optimizer steps", "tokens": "tokens trained on"}
PICTURES = "pictures"


def write_report(table: pd.DataFrame, out: Path, command: str) -> str:
    """Writes `report.md`, `report.html` and pictures into `out`; returns the tables."""
    (out / PICTURES).mkdir(parents=True, exist_ok=True)
    lines = ["# Time to accuracy", f"{table.groupby(['workload', 'system', 'seed']).ngroups} runs, by `{command}`."]
    for workload in table["workload"].unique():
        reference = workloads()[workload].reference
        if reference not in set(table[table["workload"] == workload]["system"]):
            continue
        picture = f"{PICTURES}/{workload}.png"
        save(curves(table, workload, reference), str(out / picture))
        lines += [f"## {workload}", as_table(summarize(table, workload, reference))]
        lines += [f"![{workload}: accuracy over time, steps and tokens]({picture})"]
    (out / "report.md").write_text("\n\n".join(lines) + "\n")
    (out / "report.html").write_text(as_html("Time to accuracy", lines, out))
    return "\n\n".join(line for line in lines if not line.startswith("!"))


def as_table(summary: pd.DataFrame) -> str:
    """Markdown: a row per system; S(p) with its interval, over time and over steps."""
    head = ["system", "seeds", "s per step"]
    head += [f"{kind} S({share})" for share in SHARES for kind in ("time", "steps")]
    head += [
        f"accuracy, last {LAST} evaluations",
        "less reference",
        "staleness",
        "waiting",
        "engine idle",
        "publishing",
        "load",
    ]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for _, row in summary.iterrows():
        cells = [row["system"], str(row["seeds"]), f"{row['step_s']:.2f}"]
        for share in SHARES:
            cells += [speedup_with_interval(row[f"{kind}_speedup_{share}"]) for kind in ("time", "steps")]
        cells += [f"{row['final']:.3f}", with_interval(row["difference"], 3)]
        cells += [f"{row['staleness']:.1f} (max {row['staleness_max']:.0f})"]
        cells += [as_share(row[f"{name}_share"]) for name in ("wait", "idle", "publish")]
        lines.append("| " + " | ".join([*cells, f"{row['load']:.0f}"]) + " |")
    return "\n".join(lines)


def speedup_with_interval(found: tuple[float, float, float]) -> str:
    """`2.31 (2.10 to 2.55)`; a system that does not get there is worth 0."""
    return with_interval((math.nan, 0.0, 0.0) if found[0] == 0 else found)


def as_share(share: float) -> str:
    """`63%`; empty where it was not measured."""
    return "" if math.isnan(share) else f"{share:.0%}"


def with_interval(found: tuple[float, float, float], digits: int = 2) -> str:
    """`2.31 (2.10 to 2.55)`, or `2.31` without an interval."""
    value, low, high = found
    if math.isnan(value):
        return "not reached"
    return f"{value:.{digits}f}" + ("" if math.isnan(low) else f" ({low:.{digits}f} to {high:.{digits}f})")


def curves(table: pd.DataFrame, workload: str, reference: str) -> Figure:
    """Smoothed held-out accuracy over time, steps and tokens; thin: runs, dotted: the levels of S(p)."""
    rows = table[table["workload"] == workload]
    figure, axes = plt.subplots(1, len(AXES), figsize=(5 * len(AXES), 3.8), sharey=True)
    base = [one.sort_values("step") for _, one in rows[rows["system"] == reference].groupby("seed")]
    for axis, (by, title) in zip(axes, AXES.items(), strict=True):
        for number, (system, runs) in enumerate(rows.groupby("system", sort=False)):
            color = "0.3" if system == reference else f"C{number}"
            each = [one.sort_values("step") for _, one in runs.groupby("seed")]
            for one in each:
                axis.plot(one[by], smoothed(one), color=color, alpha=0.3, linewidth=0.8)
            mean = pd.concat([one.assign(smooth=smoothed(one)) for one in each]).groupby("step").mean(numeric_only=True)
            at = mean.index if by == "step" else mean[by]
            axis.plot(at, mean["smooth"], color=color, linewidth=2, label=f"{system} ({len(each)} runs)")
        for share in SHARES:
            axis.axhline(level_at(base, share), color="0.6", linewidth=0.7, linestyle=":")
        axis.set(xlabel=title)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("held-out accuracy")
    axes[0].legend(fontsize=7, loc="lower right")
    return figure
