"""One algorithm on both sides: asynchronous and synchronous, each at its best rate, schedule and number of steps.

    python -m benchmarks.time_to_accuracy.recipes --study tools --out runs/tta/tools

It trains the cells of the search, chooses a setting for each side, trains these with other seeds, and writes
`report.md` and `measurement.json`. An interrupted study is resumed. Nothing sleeps and nothing is timed, so that the
machine may be busy; the two factors of a time to accuracy are measured apart:

* Accuracy over steps. A synchronous run learns the same whatever its tools or rewards take. The asynchronous side
  trains on groups that were admitted exactly `max_staleness` versions earlier (`latency.InOrder`).
* Seconds per step. Synchronous: processor time plus the latencies that would have been slept (`latency.clock`).
  Asynchronous: recorded by the runs of the same configuration that docs/measurements names, with the load they had.

**Search**, the same for each side: three rates, constant and linear, with the synchronous number of steps and twice
as many (at a constant rate the former are the beginning of the latter), two seeds. A setting's score is the number of
steps to 95 % of the rise of the best synchronous run of the recipe. Of the rates of a schedule the best is taken, or a
lower one whose score is less than a standard error of the difference worse; then the best of the schedules.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pandas as pd

from benchmarks.common.grid import Grid
from benchmarks.common.measurement import ROOT, measurement, write_measurement
from benchmarks.common.process import RESULT
from benchmarks.time_to_accuracy.cell import ACCURACY, run_cell
from benchmarks.time_to_accuracy.latency import with_clock
from benchmarks.time_to_accuracy.report import speedup_with_interval
from benchmarks.time_to_accuracy.statistics import SHARES, MeanCurve, paired_speedup, self_speedup
from benchmarks.time_to_accuracy.suite import RATE, Cell, workloads

RATES = (1.0, 2.0, 0.5)  # multiples of the configuration's
SEARCH_SEEDS = (10, 11)
SEEDS = (0, 1, 2, 3, 4)  # they chose nothing
SHARE = 0.95  # of the rise, at which settings are compared
PLAIN = "synchronous"
SYNCHRONOUS = "synchronous_recipe"
ASYNCHRONOUS = "lag8_recipe"
SIDES = {  # what a side is called
    SYNCHRONOUS: "recipe, synchronous",
    ASYNCHRONOUS: "recipe, `max_staleness` 8",
    PLAIN: "plain GRPO, synchronous",
}
SCHEDULES = {  # of a side: what is appended to its name
    "_twice": "constant rate, up to twice the steps",
    "_linear": "linear rate, the same steps",
    "_linear_twice": "linear rate, twice the steps",
}


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """Row of a measurement: asynchronous runs whose seconds per step count.

    Attributes:
        name: of the measurement.
        workload: of the row.
        system: of the row.
    """

    name: str
    workload: str
    system: str

    def step_s(self) -> float:
        """Seconds per step."""
        table = json.loads((ROOT / f"docs/measurements/{self.name}.json").read_text())["table"]
        rows = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
        (row,) = [row for row in rows if (row["workload"], row["system"]) == (self.workload, self.system)]
        return float(row["seconds per step"])


@dataclass(frozen=True, kw_only=True)
class Study:
    """One task, compared at several latencies.

    Attributes:
        workload: that does not sleep.
        recorded: asynchronous runs by mean latency in seconds.
    """

    workload: str
    recorded: Mapping[float, Recorded]


STUDIES = {
    "tools": Study(
        workload="tools_unslept",
        recorded={
            0.4: Recorded(
                name="time_to_accuracy", workload="tools answer after 0.4 s", system="recipe, `max_staleness` 8"
            ),
            1.6: Recorded(
                name="time_to_accuracy", workload="tools answer after 1.6 s", system="recipe, `max_staleness` 8"
            ),
        },
    ),
    "smollm2": Study(
        workload="smollm2_unslept",
        recorded={
            8.0: Recorded(
                name="time_to_accuracy_smollm2_8s",
                workload="SmolLM2, rewards of 8 s",
                system="recipe, `max_staleness` 8",
            ),
        },
    ),
}


@dataclass(frozen=True)
class Setting:
    """A side with its schedule and rate."""

    side: str
    schedule: str
    rate: float

    @property
    def system(self) -> str:
        """Its name in a cell."""
        return f"{self.side}{self.schedule}" + ("" if self.rate == 1 else f"{RATE}{self.rate:g}")

    def trains(self, workload: str) -> str:
        """Algorithm, schedule and number of steps."""
        algorithm = "PPO-clip GRPO" if self.side == PLAIN else "VCPO"
        kind = "linear" if "linear" in self.schedule else "constant"
        rate = (workloads()[workload].learning_rate or math.nan) * self.rate
        return f"{algorithm}, {kind} rate {rate:.2g}, {Cell(workload, self.system, 0).num_steps} steps"


def search_cells(workload: str, sides: Sequence[str] = tuple(SIDES)) -> list[Cell]:
    """Cells of the search, seed by seed."""
    return [
        Cell(workload, Setting(side, schedule, rate).system, seed)
        for seed in SEARCH_SEEDS
        for side in sides
        for rate in RATES
        for schedule in SCHEDULES
    ]


@dataclass(frozen=True)
class Score:
    """Result of a setting in the search.

    Attributes:
        steps: to the level, by seed; inf where it is not reached.
        end: accuracy of the monotone mean curve after the last step, which decides where no setting gets there.
    """

    steps: tuple[float, ...]
    end: float

    @property
    def order(self) -> tuple[float, float]:
        """Key to sort by; the best is first."""
        return statistics.fmean(self.steps), -self.end


def choose(scores: Mapping[Setting, Score]) -> Setting:
    """The setting of a side: of each schedule the best rate, or a lower one that is as good; of these the best."""
    schedules = dict.fromkeys(setting.schedule for setting in scores)
    chosen = [
        lowest_equal({setting: score for setting, score in scores.items() if setting.schedule == schedule})
        for schedule in schedules
    ]
    return min(chosen, key=lambda setting: scores[setting].order)


def lowest_equal(scores: Mapping[Setting, Score]) -> Setting:
    """The lowest rate whose mean score is less than a standard error of the difference above the best."""
    best = min(scores, key=lambda setting: scores[setting].order)
    for setting in sorted(scores, key=lambda setting: setting.rate):
        if setting == best:
            break
        difference = statistics.fmean(scores[setting].steps) - statistics.fmean(scores[best].steps)
        if math.isfinite(difference) and difference < standard_error(scores[setting].steps, scores[best].steps):
            return setting
    return best


def standard_error(first: Sequence[float], second: Sequence[float]) -> float:
    """Of the difference of two means."""
    return math.sqrt(sum(statistics.variance(values) / len(values) for values in (first, second)))


def read_curve(cell: Cell, out: Path, mean_s: float, recorded: Recorded) -> pd.DataFrame:
    """Accuracies of a cell over steps and seconds; those of an asynchronous one are as long as recorded ones were.

    Args:
        cell: of a workload that does not sleep, whose latencies have a mean of 1 s.
        out: folder of the study.
        mean_s: mean latency in seconds.
        recorded: asynchronous runs with that latency.
    """
    folder = out / cell.folder
    curve = pd.read_csv(folder / ACCURACY)
    if cell.system.startswith(ASYNCHRONOUS):
        return curve.assign(wall_s=curve["step"] * recorded.step_s())
    return with_clock(curve, folder, factor=mean_s)


def read_curves(
    setting: Setting, study: Study, seeds: Sequence[int], out: Path, mean_s: float | None = None
) -> MeanCurve:
    """Curves of a setting; without a mean latency those of the first one."""
    mean_s = mean_s or next(iter(study.recorded))
    recorded = study.recorded[mean_s]
    cells = {seed: Cell(study.workload, setting.system, seed) for seed in seeds}
    return MeanCurve.of({seed: read_curve(cell, out, mean_s, recorded=recorded) for seed, cell in cells.items()})


def search(study: Study, out: Path) -> dict[str, dict[Setting, Score]]:
    """Scores by side and setting; the level is that of the best synchronous run of the recipe."""
    settings = [Setting(side, schedule, rate) for side in SIDES for schedule in SCHEDULES for rate in RATES]
    curves = {setting: read_curves(setting, study, SEARCH_SEEDS, out=out) for setting in settings}
    level = max(curve.level(SHARE) for setting, curve in curves.items() if setting.side == SYNCHRONOUS)
    scores: dict[str, dict[Setting, Score]] = {side: {} for side in SIDES}
    for setting, curve in curves.items():
        steps = tuple(curve.only([row]).time_to(level, in_steps=True) for row in range(len(curve.seeds)))
        scores[setting.side][setting] = Score(steps, end=float(curve.monotone[-1]))
    return scores


def accuracy_after_last_step(setting: Setting, workload: str, out: Path) -> list[float]:
    """One evaluation of a run's last policy on more problems, by seed."""
    cells = [Cell(workload, setting.system, seed) for seed in SEEDS]
    return [float(json.loads((out / cell.folder / RESULT).read_text())["final"]) for cell in cells]


def compare(study: Study, chosen: Mapping[str, Setting], out: Path) -> tuple[list[list[Any]], list[dict[str, Any]]]:
    """Rows of the table and comparisons: each side, and the recipe against itself, at each latency."""
    rows = []
    comparisons = []
    for mean_s, recorded in study.recorded.items():
        curves = {side: read_curves(chosen[side], study, SEEDS, out=out, mean_s=mean_s) for side in SIDES}
        reference = curves[SYNCHRONOUS]
        for side, curve in curves.items():
            ratios = {share: paired_speedup(reference, curve, share) for share in SHARES}
            if side == SYNCHRONOUS:
                ratios = {share: self_speedup(curve, share) for share in SHARES}
            in_steps = paired_speedup(reference, curve, SHARE, in_steps=True)
            final = accuracy_after_last_step(chosen[side], study.workload, out)
            cells: list[Any] = [recorded.workload, SIDES[side], chosen[side].trains(study.workload), len(curve.seeds)]
            cells += [round(float(curve.seconds[:, -1].mean() / curve.steps[-1]), 2)]
            cells += [speedup_with_interval(found) for found in ratios.values()]
            rows.append([*cells, speedup_with_interval(in_steps), f"{statistics.fmean(final):.3f}"])
        pairs = [(ASYNCHRONOUS, SYNCHRONOUS), (ASYNCHRONOUS, PLAIN), (SYNCHRONOUS, PLAIN)]
        for (side, against), share in ((pair, share) for pair in pairs for share in SHARES):
            value, low, high = paired_speedup(curves[against], curves[side], share)
            comparisons.append(
                {
                    "workload": recorded.workload,
                    "share": share,
                    "value": None if math.isnan(value) else round(value, 2),
                    "interval": None if math.isnan(low) else [round(low, 2), round(high, 2)],
                    "system": {"name": SIDES[side], "trains": chosen[side].trains(study.workload)},
                    "against": {"name": SIDES[against], "trains": chosen[against].trains(study.workload)},
                }
            )
    return rows, comparisons


COLUMNS = ["workload", "system", "trains", "seeds", "seconds per step", *(f"S({share})" for share in SHARES)]
COLUMNS += [f"over steps: S({SHARE})", "final accuracy"]


def as_markdown(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table."""
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in (columns, ["---"] * len(columns), *rows))


def search_table(found: Mapping[str, Mapping[Setting, Score]], chosen: Mapping[str, Setting]) -> str:
    """Steps to the level of each setting, in bold where it was chosen."""
    rows = [
        [
            SIDES[side],
            SCHEDULES[setting.schedule],
            f"{setting.rate:g}",
            *("not reached" if math.isinf(steps) else f"{steps:.1f}" for steps in score.steps),
            "**chosen**" if setting == chosen[side] else "",
        ]
        for side, settings in found.items()
        for setting, score in settings.items()
    ]
    seeds = [f"steps, seed {seed}" for seed in SEARCH_SEEDS]
    return as_markdown(["side", "schedule", "rate, times the configuration's", *seeds, ""], rows)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", choices=list(STUDIES), default="tools", help="task")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--num_processes", type=int, default=1, help="runs at a time")
    parser.add_argument("--report_only", action="store_true", help="train nothing")
    args = parser.parse_args()
    study = STUDIES[args.study]

    def train(cells: Sequence[Cell]) -> None:
        if not args.report_only:
            Grid(run_cell, args.out, args.num_processes, cell_timeout_s=14400.0).run(cells)
        if failed := [cell.folder for cell in cells if error_of(args.out / cell.folder)]:
            sys.exit(f"{len(failed)} of {len(cells)} runs are missing or failed, the first is {args.out / failed[0]}")

    train(search_cells(study.workload))
    found = search(study, args.out)
    chosen = {side: choose(scores) for side, scores in found.items()}
    print(search_table(found, chosen), flush=True)
    train([Cell(study.workload, chosen[side].system, seed) for seed in SEEDS for side in SIDES])
    rows, comparisons = compare(study, chosen, args.out)
    lines = [f"# Recipe against recipe: {args.study}", "## Search", search_table(found, chosen)]
    lines += ["## Chosen settings, other seeds", as_markdown(COLUMNS, rows)]
    (args.out / "report.md").write_text("\n\n".join(lines) + "\n")
    headline = comparisons[len(SHARES) - 1]
    write_measurement(
        args.out / "measurement.json",
        measurement(
            f"time_to_accuracy_recipes_{args.study}",
            headline["value"],
            f"times as fast to 95 % of the rise ({headline['workload']}, recipe against recipe)",
            columns=COLUMNS,
            rows=rows,
            interval=headline["interval"],
            command=f"python -m benchmarks.time_to_accuracy.recipes --study {args.study} --out {args.out}",
            machine="two busy cores; seconds per step are processor time and latencies, or those of the recorded runs",
            comparisons=comparisons,
            search=search_table(found, chosen).splitlines(),
        ),
    )
    print("\n\n".join(lines))


def error_of(folder: Path) -> str | None:
    """Why a cell has no result that counts; None if it has one."""
    path = folder / RESULT
    if not path.is_file():
        return "missing"
    error: str | None = json.loads(path.read_text())["error"]
    return error


if __name__ == "__main__":
    main()
