"""Figures of the staleness benchmark: lines are means over seeds, bands and bars their 95 % intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import pandas as pd

from benchmarks.staleness.statistics import interval, naive_method

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

SIGNALS = {
    "cosine": "cosine of consecutive gradients",
    "ess_ratio": "effective sample size / rollouts",
    "kl": "KL per token (k3)",
    "grad_norm": "gradient norm",
}
TITLES = SIGNALS | {
    "accuracy": "held-out accuracy",
    "clip_fraction": "share of tokens cut",
    "lr_scale": "learning rate factor",
    "gac_kept": "share of the parallel part kept",
    "staleness_mean": "staleness (versions)",
}
# stabilizer -> regime, what to compare it with, and the signals that it acts on
EFFECTS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "sequence_tis": ("heavy_tails", "uncorrected", ("kl", "grad_norm")),
    "sequence_tis+ess_learning_rate": ("heavy_tails", "sequence_tis", ("ess_ratio", "lr_scale")),
    "opob": ("heavy_tails", "sequence_tis", ("grad_norm", "ess_ratio")),
    "vcpo": ("heavy_tails", "uncorrected", ("ess_ratio", "lr_scale")),
    "m2po": ("heavy_tails", "ppo_clip", ("clip_fraction", "kl")),
    "bapo": ("heavy_tails", "ppo_clip", ("clip_fraction", "kl")),
    "ppo_clip+gac_project": ("aligned_gradients", "ppo_clip", ("cosine", "gac_kept")),
    "uncorrected+gac_project": ("heavy_tails", "uncorrected", ("cosine", "gac_kept")),
    "uncorrected+adaptive_staleness": ("mixed_lag", "uncorrected", ("staleness_mean", "ess_ratio")),
    "uncorrected+lower_staleness": ("mixed_lag", "uncorrected", ("staleness_mean", "ess_ratio")),
}
SMOOTH = 9  # steps in the running mean of a signal


def _band(axis: Axes, rows: pd.DataFrame, x: str, y: str, label: str, color: str) -> None:
    """Mean and interval over seeds at each x."""
    wide = rows.pivot_table(index=x, columns="seed", values=y)
    points = [(at, *interval(values)) for at, values in wide.iterrows()]
    at, mean, half = ([point[n] for point in points] for n in range(3))
    axis.plot(at, mean, label=label, color=color, linewidth=1.6)
    low = [m - h for m, h in zip(mean, half, strict=True) if not math.isnan(h)]
    if len(low) == len(at):
        axis.fill_between(at, low, [m + h for m, h in zip(mean, half, strict=True)], color=color, alpha=0.15, lw=0)


def accuracy_by_lag(table: pd.DataFrame, methods: list[str]) -> Figure:
    """Accuracy against optimizer steps: a panel for each lag, a line for each method."""
    rows = table[table["method"].isin(methods)].dropna(subset=["accuracy"])
    lags = sorted(rows["lag"].unique())
    figure, axes = plt.subplots(1, len(lags), figsize=(3.2 * len(lags), 3.2), sharey=True, squeeze=False)
    for axis, lag in zip(axes[0], lags, strict=True):
        for n, method in enumerate(methods):
            chosen = rows[(rows["lag"] == lag) & (rows["method"] == method)]
            if len(chosen):
                _band(axis, chosen, "step", y="accuracy", label=method, color=f"C{n % 10}")
        axis.set(title=f"lag {lag}", xlabel="optimizer step", ylim=(0, 1))
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    axes[0][0].set_ylabel("held-out accuracy")
    return figure


def signals_by_lag(table: pd.DataFrame, method: str) -> Figure:
    """Monitor signals of one method, a line per lag."""
    figure, axes = plt.subplots(1, len(SIGNALS), figsize=(4 * len(SIGNALS), 3.2))
    rows = table[table["method"] == method]
    for axis, (name, title) in zip(axes, SIGNALS.items(), strict=True):
        for n, lag in enumerate(sorted(rows["lag"].unique())):
            chosen = rows[rows["lag"] == lag].sort_values("step")
            smooth = chosen.groupby("seed")[name].transform(lambda v: v.rolling(SMOOTH, min_periods=1).mean())
            _band(
                axis,
                chosen.assign(**{name: smooth}).dropna(subset=[name]),
                "step",
                y=name,
                label=f"lag {lag}",
                color=f"C{n}",
            )
        axis.set(title=title, xlabel="optimizer step")
        axis.grid(alpha=0.3)
    if (rows["kl"].dropna() > 0).any():
        axes[2].set_yscale("log")
        axes[2].set_ylim(bottom=1e-5)
    axes[0].legend(fontsize=7)
    figure.suptitle(method, fontsize=10)
    return figure


def final_against_lag(summary: pd.DataFrame) -> Figure:
    """Final accuracy against lag, for methods that ran at more than one."""
    figure, axis = plt.subplots(figsize=(6, 3.6))
    tried = summary.groupby("method")["lag"].nunique()
    for n, method in enumerate(tried[tried > 1].index):
        rows = summary[summary["method"] == method].sort_values("lag")
        axis.errorbar(rows["lag"], rows["final"], yerr=rows["final_half"], label=method, color=f"C{n % 10}", capsize=3)
    axis.set_xscale("symlog", base=2, linthresh=1)
    lags = sorted(summary["lag"].unique())
    axis.set_xticks(lags, [str(lag) for lag in lags])
    axis.set(xlabel="lag (versions)", ylabel="final accuracy", ylim=(0, 1))
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7)
    return figure


def ranking(summary: pd.DataFrame, lag: int) -> Figure:
    """Share of the synchronous gain at one lag, best method first; hollow: with its own best learning rate."""
    rows = summary[summary["lag"] == lag]
    order = rows[rows["learning_rate_scale"] == 1.0].sort_values("gain_share")["method"].tolist()
    figure, axis = plt.subplots(figsize=(7, 0.3 * len(order) + 1.2))
    for default in (True, False):
        chosen = rows[(rows["learning_rate_scale"] == 1.0) == default].set_index("method")
        at = [n + (0 if default else -0.25) for n, method in enumerate(order) if method in chosen.index]
        chosen = chosen.loc[[method for method in order if method in chosen.index]]
        label = "the regime's learning rate" if default else "another one of the search"
        style: dict[str, Any] = {"color": "C0"} if default else {"color": "C1", "mfc": "white"}
        axis.errorbar(
            chosen["gain_share"], at, xerr=chosen["gain_share_half"], fmt="o", label=label, capsize=2, ms=5, **style
        )
    axis.axvline(1, color="0.5", linewidth=0.8)
    axis.axvline(0.5, color="0.5", linewidth=0.8, linestyle=":")
    axis.set_yticks(range(len(order)), order, fontsize=8)
    axis.set(xlabel=f"share of the synchronous gain kept at lag {lag}", xlim=(-0.7, 1.4))
    axis.grid(alpha=0.3, axis="x")
    axis.legend(fontsize=7, loc="upper left")
    return figure


def equal_cost(table: pd.DataFrame, methods: list[str], lag: int) -> Figure:
    """Accuracy at equal steps, equal trained tokens and equal processor time; dashed: the synchronous run."""
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.4), sharey=True)
    naive = naive_method(table, table["regime"].iloc[0])
    lines = [(method, lag, "-") for method in methods] + [(naive, 0, "--")]
    for axis, x in zip(axes, ("step", "tokens", "cpu_s"), strict=True):
        for n, (method, at, style) in enumerate(lines):
            rows = table[(table["method"] == method) & (table["lag"] == at)].sort_values("step")
            rows = rows.assign(**{x: rows.groupby("seed")[x].ffill().fillna(0)}).dropna(subset=["accuracy"])
            mean = rows.groupby("step")[[x] if x == "step" else [x, "accuracy"]].mean()
            accuracy = rows.groupby("step")["accuracy"].mean()
            label = method if style == "-" else "synchronous"
            axis.plot(mean[x], accuracy, style, color=f"C{n % 10}" if style == "-" else "0.3", label=label)
        names = {"step": "optimizer steps", "tokens": "tokens trained on", "cpu_s": "processor seconds"}
        axis.set(xlabel=names[x], ylim=(0, 1))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("held-out accuracy")
    axes[0].legend(fontsize=7)
    figure.suptitle(f"lag {lag}", fontsize=10)
    return figure


def effect(table: pd.DataFrame, without: str, with_it: str, lag: int, signals: Sequence[str]) -> Figure:
    """Effect of one stabilizer: accuracy and the signals it acts on, without and with it."""
    names = ["accuracy", *signals]
    figure, axes = plt.subplots(1, len(names), figsize=(4 * len(names), 3))
    for axis, name in zip(axes, names, strict=True):
        for method, color in ((without, "0.5"), (with_it, "C0")):
            rows = table[(table["method"] == method) & (table["lag"] == lag)].dropna(subset=[name]).sort_values("step")
            if name != "accuracy":
                smooth = rows.groupby("seed")[name].transform(lambda v: v.rolling(SMOOTH, min_periods=1).mean())
                rows = rows.assign(**{name: smooth})
            if len(rows):
                _band(axis, rows, "step", y=name, label=method, color=color)
        axis.set(title=TITLES[name], xlabel="optimizer step")
        axis.grid(alpha=0.3)
    axes[0].set_ylim(0, 1)
    axes[0].legend(fontsize=7)
    figure.suptitle(f"{table['regime'].iloc[0]}, lag {lag}", fontsize=10)
    return figure


def save(figure: Figure, path: str) -> None:
    """Writes and closes a figure."""
    if figure.get_layout_engine() is None:
        figure.tight_layout()
    figure.savefig(path, dpi=100)
    plt.close(figure)
