"""Figures of the staleness benchmark: lines are means over seeds, bands and bars their 95 % intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import pandas as pd

from benchmarks.staleness.statistics import LAST_EVALUATIONS, interval, naive_method

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

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
REGIMES = {
    "heavy_tails": "rare tokens weigh much (heavy tails)",
    "aligned_gradients": "gradients that point the same way",
    "mixed_lag": "data of mixed age",
    "length_bias": "long completions are late",
    "very_stale": "very stale data",
}
POLICIES = {  # of a regime; the others have that of `SMALL`
    "quickstart_constant": "a policy of 0.5 million parameters",
    "smollm2": "SmolLM2, 135 million parameters",
    "smollm2_price": "SmolLM2, 135 million parameters",
}
SMALL = "a policy of 88 thousand parameters"
METHODS = {  # what a picture calls a method whose class name says less
    "uncorrected": "no correction",
    "ppo_clip": "PPO-clip",
    "vcpo": "VCPO",
    "opob": "optimal baseline (OPOB)",
    "m2po": "M2PO",
    "bapo": "BAPO",
    "topr": "TOPR",
    "vespo": "VESPO",
    "cispo": "CISPO",
    "gspo": "GSPO",
    "dppo": "DPPO",
    "icepop": "IcePop",
    "decoupled_ppo": "decoupled PPO",
    "token_tis": "truncated weights, by token",
    "sequence_tis": "truncated weights, by completion",
    "sequence_mis": "masked weights, by completion",
    "ess_learning_rate": "rate by ESS",
    "gac_project": "gradient projection (GAC)",
    "gradient_alignment_control": "GAC",
    "adaptive_staleness": "adaptive bound",
    "lower_staleness": "lower bound",
    "drop_longest": "longest dropped",
}
WIDTH = 8.3  # inches: the width of a page
FONT = 13


def policy(table: pd.DataFrame) -> str:
    """The policy of a regime, for the title of a figure."""
    return POLICIES.get(str(table["regime"].iloc[0]), SMALL)


def said(method: str) -> str:
    """A method for readers: `sequence_tis+ess_learning_rate` is `truncated weights, ..., rate by ...`."""
    return " + ".join(METHODS.get(part, part.replace("_", " ")) for part in method.split("+"))


def versions(lag: int) -> str:
    """A lag for readers."""
    return "fresh" if lag == 0 else f"{lag} version{'s' if lag > 1 else ''} old"


def _panels(number: int) -> tuple[Figure, list[Axes]]:
    """Figure with two panels in a row, as wide as a page, and room for the legend in the last cell or below."""
    rows = math.ceil(number / 2)
    figure, axes = plt.subplots(rows, 2, figsize=(WIDTH, 3.1 * rows), layout="constrained", squeeze=False)
    shown = list(axes.flat[:number])
    for axis in axes.flat[number:]:
        axis.axis("off")
    for axis in shown:
        axis.grid(alpha=0.3)
        axis.tick_params(labelsize=FONT - 1)
    return figure, shown


def _legend(figure: Figure, axes: Sequence[Axes]) -> None:
    """One legend for all panels: in the cell that is left, else below."""
    handles: dict[str, Any] = {}
    for axis in axes:
        handles |= dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    settings: dict[str, Any] = {"fontsize": FONT, "frameon": False}
    empty = [axis for axis in figure.axes if not axis.axison]
    if empty:
        empty[0].legend(list(handles.values()), list(handles), loc="center left", **settings)
    else:
        columns = 2 if max(map(len, handles)) > 18 else min(3, len(handles))
        figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=columns, **settings)


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
    figure, axes = _panels(len(lags))
    for axis, lag in zip(axes, lags, strict=True):
        for n, method in enumerate(methods):
            chosen = rows[(rows["lag"] == lag) & (rows["method"] == method)]
            if len(chosen):
                _band(axis, chosen, "step", y="accuracy", label=said(method), color=f"C{n % 10}")
        axis.set_title(versions(lag), fontsize=FONT)
        axis.set(ylim=(0, 1))
    _legend(figure, axes)
    for axis in axes[-2:]:
        axis.set_xlabel("optimizer step", fontsize=FONT)
    figure.supylabel("held-out accuracy", fontsize=FONT)
    figure.suptitle(policy(table), fontsize=FONT)
    return figure


def signals_by_lag(table: pd.DataFrame, method: str) -> Figure:
    """Monitor signals of one method, a line per lag."""
    figure, axes = _panels(len(SIGNALS))
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
                label=versions(lag),
                color=f"C{n}",
            )
        axis.set_title(title, fontsize=FONT)
    if (rows["kl"].dropna() > 0).any():
        axes[2].set_yscale("log")
        axes[2].set_ylim(bottom=1e-5)
    _legend(figure, axes)
    for axis in axes[-2:]:
        axis.set_xlabel("optimizer step", fontsize=FONT)
    figure.suptitle(f"{said(method)}; {policy(table)}", fontsize=FONT)
    return figure


def final_against_lag(summary: pd.DataFrame) -> Figure:
    """Accuracy at the end against lag, for methods that ran at more than one."""
    figure, axis = plt.subplots(figsize=(WIDTH, 5.2), layout="constrained")
    tried = summary.groupby("method")["lag"].nunique()
    for n, method in enumerate(tried[tried > 1].index):
        rows = summary[summary["method"] == method].sort_values("lag")
        axis.errorbar(
            rows["lag"], rows["final"], yerr=rows["final_half"], label=said(method), color=f"C{n % 10}", capsize=3
        )
    axis.set_xscale("symlog", base=2, linthresh=1)
    lags = sorted(summary["lag"].unique())
    axis.set_xticks(lags, [str(lag) for lag in lags])
    axis.set_xlabel("age of the data (versions)", fontsize=FONT)
    axis.set_ylabel(f"accuracy, last {LAST_EVALUATIONS} evaluations", fontsize=FONT)
    axis.set_title(policy(summary), fontsize=FONT)
    axis.set(ylim=(0, 1))
    axis.tick_params(labelsize=FONT - 1)
    axis.grid(alpha=0.3)
    _legend(figure, [axis])
    return figure


def ranking(summary: pd.DataFrame, lag: int) -> Figure:
    """Share of the synchronous gain at one lag, best method first; hollow: with its own best learning rate."""
    rows = summary[summary["lag"] == lag]
    order = rows[rows["learning_rate_scale"] == 1.0].sort_values("gain_share")["method"].tolist()
    figure, axis = plt.subplots(figsize=(WIDTH, 0.36 * len(order) + 1.8), layout="constrained")
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
    axis.set_yticks(range(len(order)), [said(method) for method in order], fontsize=FONT - 1)
    axis.set_title(f"data {versions(lag)}; {policy(summary)}", fontsize=FONT)
    axis.set_xlabel("synchronous gain kept", fontsize=FONT)
    axis.set(xlim=(-0.7, 1.4))
    axis.tick_params(axis="x", labelsize=FONT - 1)
    axis.grid(alpha=0.3, axis="x")
    _legend(figure, [axis])
    return figure


def equal_cost(table: pd.DataFrame, methods: list[str], lag: int) -> Figure:
    """Accuracy at equal steps, equal trained tokens and equal processor time; dashed: the synchronous run."""
    figure, axes = _panels(3)
    naive = naive_method(table, table["regime"].iloc[0])
    lines = [(method, lag, "-") for method in methods] + [(naive, 0, "--")]
    for axis, x in zip(axes, ("step", "tokens", "cpu_s"), strict=True):
        for n, (method, at, style) in enumerate(lines):
            rows = table[(table["method"] == method) & (table["lag"] == at)].sort_values("step")
            rows = rows.assign(**{x: rows.groupby("seed")[x].ffill().fillna(0)}).dropna(subset=["accuracy"])
            mean = rows.groupby("step")[[x] if x == "step" else [x, "accuracy"]].mean()
            accuracy = rows.groupby("step")["accuracy"].mean()
            label = said(method) if style == "-" else "synchronous"
            axis.plot(mean[x], accuracy, style, color=f"C{n % 10}" if style == "-" else "0.3", label=label)
        names = {"step": "optimizer steps", "tokens": "tokens trained on", "cpu_s": "processor seconds"}
        axis.set_xlabel(names[x], fontsize=FONT)
        axis.set(ylim=(0, 1))
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
        axis.xaxis.set_major_locator(MaxNLocator(5))
    _legend(figure, axes)
    figure.supylabel("held-out accuracy", fontsize=FONT)
    figure.suptitle(f"data {versions(lag)}; {policy(table)}", fontsize=FONT)
    return figure


def effect(table: pd.DataFrame, without: str, with_it: str, lag: int, signals: Sequence[str]) -> Figure:
    """Effect of one stabilizer: accuracy and the signals it acts on, without and with it."""
    names = ["accuracy", *signals]
    figure, axes = _panels(len(names))
    for axis, name in zip(axes, names, strict=True):
        for method, color in ((without, "0.5"), (with_it, "C0")):
            rows = table[(table["method"] == method) & (table["lag"] == lag)].dropna(subset=[name]).sort_values("step")
            if name != "accuracy":
                smooth = rows.groupby("seed")[name].transform(lambda v: v.rolling(SMOOTH, min_periods=1).mean())
                rows = rows.assign(**{name: smooth})
            if len(rows):
                _band(axis, rows, "step", y=name, label=said(method), color=color)
        axis.set_title(TITLES[name], fontsize=FONT)
    axes[0].set_ylim(0, 1)
    _legend(figure, axes)
    for axis in axes[-2:]:
        axis.set_xlabel("optimizer step", fontsize=FONT)
    regime = str(table["regime"].iloc[0])
    figure.suptitle(f"{policy(table)}; data {versions(lag)};\n{REGIMES.get(regime, regime)}", fontsize=FONT)
    return figure


def save(figure: Figure, path: str) -> None:
    """Writes and closes a figure."""
    if figure.get_layout_engine() is None:
        figure.tight_layout()
    figure.savefig(path, dpi=100)
    plt.close(figure)
