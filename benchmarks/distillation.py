"""Lag study of on-policy distillation: held-out accuracy of the student by lag, gradient and importance weights.

    python benchmarks/distillation.py --out runs/distillation --num_processes 2

`configs/distill.yaml` with `FixedLag`, at least six generations of the lag, beside the teacher's own accuracy and the
same student with the same prompts by GRPO without a teacher. Started again, it goes on; `--record` writes the
measurement of the cells that are there.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common.grid import Grid
from benchmarks.common.measurement import measurement, write_measurement
from benchmarks.common.process import RESULT, csv_logger, recorded
from lit_async_rl.runtime.lifetime import die_with_parent

STEPS = 75
GENERATIONS = 6  # steps / lag, at least
PREFIX = "--model.distillation."
METHODS = {
    "analytic": [],
    "sampled": [f"{PREFIX}gradient", "sampled"],
    "sampled, no weights": [f"{PREFIX}gradient", "sampled", f"{PREFIX}importance_weights", "false"],
    "GRPO": ["--model.distillation", "null", "--data.groups_per_step", "16", "--data.group_size", "8"],
}
TEACHER = "teacher"


@dataclass(frozen=True)
class Cell:
    """One run."""

    method: str
    lag: int
    seed: int

    @property
    def folder(self) -> Path:
        """Folder of its results."""
        return Path(self.method.replace(", ", "-").replace(" ", "-"), f"lag={self.lag},seed={self.seed}")

    def arguments(self) -> list[str]:
        """Arguments of `scripts/train.py`."""
        steps = 1 if self.method == TEACHER else max(STEPS, GENERATIONS * self.lag)
        of_teacher = ["--model.model", "lit_async_rl/assets/sort_policy", "--model.distillation", "null"]
        own = of_teacher if self.method == TEACHER else METHODS[self.method]
        lag = ["--data.max_staleness", str(self.lag), "--data.engine", "EmbeddedEngine"]
        lag += ["--data.engine.in_flight_weight_updates", "false"]
        lag += ["--data.admission", "FixedLag"] if self.lag else []
        seeds = ["--seed_everything", str(self.seed), "--data.seed", str(self.seed)]
        group = ["--data.group_size", "2"] if self.method == TEACHER else []
        return ["--config", "configs/distill.yaml", *own, *group, *lag, *seeds, "--trainer.max_steps", str(steps)]


def run_cell(cell: Cell, out: Path) -> None:
    """Trains in a process of its own; keeps held-out accuracies and the tokens that were sampled."""
    folder = out / cell.folder
    with recorded(folder, cell.arguments()) as result:
        quiet = [*csv_logger(folder), "--trainer.enable_progress_bar", "false", "--defaults.checkpoint", "null"]
        parent = os.getpid()
        done = subprocess.run(
            [sys.executable, "scripts/train.py", *cell.arguments(), *quiet],
            stdin=subprocess.DEVNULL,
            check=False,
            preexec_fn=lambda: die_with_parent(parent),
        )
        if done.returncode:
            raise RuntimeError(f"exit status {done.returncode}: see log.txt")
        with (folder / "metrics.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        result["held_out"] = [float(row["val/pass@1"]) for row in rows if row.get("val/pass@1")]
        result["tokens"] = [float(row["sample/total_tokens"]) for row in rows if row.get("sample/total_tokens")]


def finished(cells: list[Cell], out: Path) -> dict[tuple[str, int], list[float]]:
    """Last accuracies of finished runs by method and lag; the teacher's are its first."""
    found: dict[tuple[str, int], list[float]] = {}
    for cell in cells:
        file = out / cell.folder / RESULT
        result = json.loads(file.read_text()) if file.exists() else {}
        if result.get("held_out") and not result.get("error"):
            value = result["held_out"][0 if cell.method == TEACHER else -1]
            found.setdefault((cell.method, cell.lag), []).append(value)
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lags", type=int, nargs="+", default=[0, 4, 16, 64])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--num_processes", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/distillation"))
    parser.add_argument("--record", type=Path, help="JSON file for the measurement; nothing runs")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    cells = [Cell(TEACHER, 0, 0)]
    cells += [Cell(method, lag, seed) for seed in args.seeds for lag in args.lags for method in METHODS]
    if args.record is None:
        Grid(run_cell, args.out, args.num_processes, cell_timeout_s=3600.0).run(cells)
    found = finished(cells, args.out)
    teacher = found[TEACHER, 0][0]
    head = ["method", *(f"lag {lag}" for lag in args.lags)]
    rows = []
    for method in METHODS:
        texts = []
        for lag in args.lags:
            values = found.get((method, lag), [])
            error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
            texts.append(f"{statistics.fmean(values):.3f} ± {error:.3f} ({len(values)})" if values else "")
        rows.append([method, *texts])
    print(f"teacher: {teacher:.3f}")
    for row in (head, *rows):
        print(" | ".join(row))
    if args.record is not None:
        analytic = found["analytic", 0]
        share = statistics.fmean(analytic) / teacher
        error = statistics.stdev(analytic) / len(analytic) ** 0.5 / teacher
        write_measurement(
            args.record,
            measurement(
                name=args.record.stem,
                value=round(share, 3),
                unit="of the teacher's held-out accuracy, by a student of a sixth of its size, lag 0",
                interval=[round(share - 2 * error, 3), round(share + 2 * error, 3)],
                columns=head,
                rows=[*rows, [TEACHER, f"{teacher:.3f}", *("" for _ in args.lags[1:])]],
                command="python benchmarks/distillation.py --out runs/distillation",
                machine="2 cores, Python 3.11, beside other work",
            ),
        )


if __name__ == "__main__":
    main()
