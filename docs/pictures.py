"""Pictures of measurements: `python docs/pictures.py` draws `docs/assets/*.png` from `docs/measurements/*.json`.

Each bar has its name and number above it, so that a picture can be read at the width of a page (830 pixels) and of a
phone (390).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from measurements import ROOT, load

ASSETS = ROOT / "docs/assets"
WIDTH = 8.3  # inches: 830 pixels at 100 dots per inch
FONT = 15  # points: 9 pixels on a phone
NUMBER = re.compile(r"(?P<value>[\d.]+)(?: \((?P<low>[\d.]+) to (?P<high>[\d.]+)\))?")
GREY, LIGHT_GREY, ORANGE, BLUE, GREEN, PURPLE = "0.45", "0.65", "#d9822b", "#2b6cb0", "#2f8f4e", "#7b5ea7"


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One row of a measurement: its name in the table, what the picture calls it, and its colour."""

    row: str
    label: str
    colour: str


SYNCHRONOUS = Bar(row="synchronous", label="synchronous PPO-clip (reference)", colour=GREY)
TOOLS = (
    SYNCHRONOUS,
    Bar(
        row="synchronous, 4 of 20 groups redundant", label="synchronous PPO-clip, with spare prompts", colour=LIGHT_GREY
    ),
    Bar(row="plain GRPO, `max_staleness` 8", label="asynchronous PPO-clip", colour=ORANGE),
    Bar(row="recipe, `max_staleness` 8", label="asynchronous VCPO", colour=BLUE),
    Bar(
        row="recipe, 4 of 20 groups redundant, `max_staleness` 8",
        label="asynchronous VCPO, with spare prompts",
        colour=GREEN,
    ),
)
QUICK_TOOLS = (
    SYNCHRONOUS,
    Bar(row="Periodic Asynchrony", label="Periodic Asynchrony", colour=LIGHT_GREY),
    Bar(row="PipelineRL", label="PipelineRL", colour=PURPLE),
    Bar(row="plain GRPO, `max_staleness` 4", label="PPO-clip, at most 4 versions old", colour=ORANGE),
    Bar(row="recipe, `max_staleness` 1", label="VCPO, at most 1 version old", colour=BLUE),
    Bar(row="recipe, `max_staleness` 4", label="VCPO, at most 4 versions old", colour=BLUE),
    Bar(row="recipe, `max_staleness` 8", label="VCPO, at most 8 versions old", colour=BLUE),
)
QUICK_START = (
    Bar(row="plain GRPO, synchronous", label="synchronous PPO-clip (reference)", colour=GREY),
    Bar(row="recipe, synchronous", label="synchronous VCPO", colour=LIGHT_GREY),
    Bar(row="TRL GRPOTrainer, two threads", label="TRL GRPOTrainer (synchronous)", colour=PURPLE),
    Bar(row="plain GRPO, `max_staleness` 4", label="asynchronous PPO-clip", colour=ORANGE),
    Bar(row="recipe, `max_staleness` 4", label="asynchronous VCPO", colour=BLUE),
    Bar(
        row="recipe, `max_staleness` 4, `own_process`",
        label="asynchronous VCPO, engine in its own process",
        colour=GREEN,
    ),
)
LENGTHS = (
    SYNCHRONOUS,
    Bar(row="plain GRPO, `max_staleness` 4", label="asynchronous PPO-clip", colour=ORANGE),
    Bar(row="recipe, `max_staleness` 4", label="asynchronous VCPO", colour=BLUE),
)
LANGUAGE_MODEL = (
    SYNCHRONOUS,
    Bar(
        row="synchronous, 1 of 5 groups redundant", label="synchronous PPO-clip, with spare prompts", colour=LIGHT_GREY
    ),
    Bar(row="recipe, `max_staleness` 8", label="asynchronous VCPO, at most 8 versions old", colour=BLUE),
    Bar(
        row="recipe, 1 of 5 groups redundant, `max_staleness` 4",
        label="VCPO, at most 4 versions, with spare prompts",
        colour=GREEN,
    ),
    Bar(
        row="recipe, 1 of 5 groups redundant, `max_staleness` 8",
        label="VCPO, at most 8 versions, with spare prompts",
        colour=GREEN,
    ),
)
Panel = tuple[str, str, tuple[Bar, ...]]  # a measurement, the workload in its table that is drawn, and its bars
SPEEDUPS: dict[str, tuple[Panel, ...]] = {  # of a picture
    "time_to_accuracy": (
        ("time_to_accuracy", "tools answer after 0.4 s", TOOLS),
        ("time_to_accuracy", "tools answer after 1.6 s", TOOLS),
    ),
    "time_to_accuracy_tools_0_1": (("time_to_accuracy_tools_0_1", "tools answer after 0.1 s", QUICK_TOOLS),),
    "time_to_accuracy_quickstart": (("time_to_accuracy_quickstart", "quick start", QUICK_START),),
    "time_to_accuracy_lengths": (("time_to_accuracy_lengths", "completions of 3 to 120 digits", LENGTHS),),
    "time_to_accuracy_smollm2": (
        ("time_to_accuracy_smollm2", "SmolLM2, rewards of 2 s", LANGUAGE_MODEL),
        ("time_to_accuracy_smollm2_8s", "SmolLM2, rewards of 8 s", LANGUAGE_MODEL),
    ),
}


def number(cell: Any) -> tuple[float, float, float]:
    """(value, lower, upper limit) of a cell such as `4.41 (3.49 to 7.08)`; 0 for `not reached`."""
    match = NUMBER.match(str(cell))
    if match is None:
        return 0.0, 0.0, 0.0
    value = float(match["value"])
    return value, float(match["low"] or value), float(match["high"] or value)


def speedups(panels: Sequence[Panel]) -> Figure:
    """Bars, times as fast to 95 % of the synchronous rise; thin lines are the 95 % intervals."""
    cells = {}
    for name in {name for name, _, _ in panels}:
        table = load(name)["table"]
        at = {column: n for n, column in enumerate(table["columns"])}
        cells |= {(row[at["workload"]], row[at["system"]]): row[at["S(0.95)"]] for row in table["rows"]}
    drawn = {said: [bar for bar in bars if (said, bar.row) in cells] for _, said, bars in panels}
    top = max(number(cells[said, bar.row])[2] for said, bars in drawn.items() for bar in bars)
    heights = [len(bars) for bars in drawn.values()]
    size = (WIDTH, 0.54 * sum(heights) + 0.5 * len(heights) + 0.6)
    figure, axes = plt.subplots(
        len(panels), 1, figsize=size, squeeze=False, layout="constrained", gridspec_kw={"height_ratios": heights}
    )
    for axis, (said, bars) in zip(axes[:, 0], drawn.items(), strict=True):
        for place, bar in enumerate(bars):
            value, low, high = number(cells[said, bar.row])
            axis.barh(place, value, height=0.36, color=bar.colour)
            axis.plot([low, high], [place, place], color="0.15", linewidth=1.5)
            factor = f"{value:.1f} times" if value else "does not get there"
            axis.text(0, place - 0.25, f"{bar.label}: {factor}", fontsize=FONT, va="bottom", ha="left")
        axis.axvline(1, color="0.6", linewidth=1, linestyle=":", zorder=0)
        axis.set(ylim=(len(bars) - 0.7, -0.85), xlim=(0, max(1.05 * top, 2)), yticks=[])
        axis.set_title(said, fontsize=FONT, loc="left", fontweight="bold")
        axis.tick_params(labelsize=FONT)
        axis.spines[["top", "right", "left"]].set_visible(False)
    axes[-1, 0].set_xlabel("times as fast to the same accuracy", fontsize=FONT)
    return figure


# -- SmolLM2, before and after ----------------------------------------------------------------------------------------

RUNS = {"asynchronous": BLUE, "full fine-tuning": ORANGE, "synchronous": GREY}
KINDS = {"accuracy at temperature 1, ± standard error": "sampled", "greedy": "greedy"}
CHANGE = re.compile(r"(?P<before>[\d.]+) → (?P<after>[\d.]+)")


def before_and_after() -> Figure:
    """Held-out accuracy of SmolLM2 before training (hollow) and after 60 steps (filled, a dot for each seed)."""
    table = load("smollm2")["table"]
    figure, axis = plt.subplots(figsize=(WIDTH, 4.4), layout="constrained")
    place = 0
    for column, said in KINDS.items():
        at = table["columns"].index(column)
        for run, colour in RUNS.items():
            cells = [CHANGE.match(row[at]) for row in table["rows"] if row[0].startswith(f"{run}, seed")]
            changes = [(float(change["before"]), float(change["after"])) for change in cells if change is not None]
            first = changes[0][0]
            after = sorted(change[1] for change in changes)
            axis.plot([first, after[-1]], [place, place], color=colour, linewidth=2)
            axis.plot(first, place, "o", color=colour, markersize=9, markerfacecolor="white")
            axis.plot(after, [place] * len(after), "o", color=colour, markersize=9)
            text = f"{run}, {said}: {first:.2f} to {after[0]:.2f}, {after[1]:.2f}, {after[2]:.2f}"
            axis.text(0, place - 0.22, text, fontsize=FONT, va="bottom", ha="left")
            place += 1
    axis.set(ylim=(place - 0.6, -0.8), xlim=(0, 1), yticks=[])
    axis.tick_params(labelsize=FONT)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.set_xlabel("held-out accuracy before (hollow) and after 60 steps", fontsize=FONT)
    return figure


# -- The stages around RL ---------------------------------------------------------------------------------------------


def stages() -> Figure:
    """Held-out accuracy: SFT before GRPO beside GRPO alone, by steps; distillation beside GRPO, by sampled tokens."""
    tuned, distilled = load("sft_then_grpo_smollm2"), load("distillation_recipe")
    figure, (above, below) = plt.subplots(2, 1, figsize=(WIDTH, 8.4), layout="constrained")
    sft, grpo, alone = (tuned["curves"][name] for name in ("sft", "grpo", "alone"))
    length = sft[-1][0]
    _line(above, [[step - length, value] for step, value in sft], colour=GREEN, label="SFT")
    _line(above, grpo, colour=BLUE, label="GRPO after SFT")
    _line(above, alone, colour=GREY, label="GRPO alone")
    above.set_title("SmolLM2-135M, mental arithmetic", fontsize=FONT, loc="left", fontweight="bold")
    above.set_xlabel("optimizer steps", fontsize=FONT)
    for method, colour in (("distillation", BLUE), ("GRPO", GREY)):
        points = [[tokens / 1e3, value] for tokens, value in distilled["curves"][method]]
        _line(below, points, colour=colour, label=method)
    below.axhline(distilled["teacher"], color="0.6", linestyle=":", linewidth=1)
    below.text(0, distilled["teacher"], "teacher", fontsize=FONT, va="bottom")
    below.set_title("0.5M student, 5M teacher, sorting", fontsize=FONT, loc="left", fontweight="bold")
    below.set_xlabel("sampled tokens, thousands", fontsize=FONT)
    for axis in (above, below):
        axis.set(ylim=(0, 1.08))
        axis.set_ylabel("held-out accuracy", fontsize=FONT)
        axis.tick_params(labelsize=FONT)
        axis.legend(fontsize=FONT, loc="lower right", frameon=False)
        axis.spines[["top", "right"]].set_visible(False)
    return figure


def _line(axis: Any, points: Sequence[Sequence[float]], *, colour: str, label: str) -> None:
    axis.plot(*zip(*points, strict=True), color=colour, linewidth=2.5, label=label)


def main(folder: Path = ASSETS) -> None:
    """Draws all of them."""
    _save(stages(), folder / "stages.png")
    for name, panels in SPEEDUPS.items():
        _save(speedups(panels), folder / f"{name}.png")
    _save(before_and_after(), folder / "smollm2.png")


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=150)
    plt.close(figure)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
