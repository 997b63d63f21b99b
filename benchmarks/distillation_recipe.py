"""A teacher of five million weights and a student of half a million: distillation beside GRPO from the same start.

    OMP_NUM_THREADS=1 python benchmarks/distillation_recipe.py --output docs/measurements/distillation_recipe.json

The teacher is fine-tuned here on correct answers, once. The student is the quick start's policy: it learns from the
teacher on its own completions (`configs/distill.yaml`), or from the reward (`configs/quickstart.yaml`). The measure is
the number of sampled tokens until a share of the teacher's held-out accuracy. Started again, it goes on.
"""

from __future__ import annotations

import argparse
import csv
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
from benchmarks.distillation import run_cell

TEACHER = ["--hidden", "320", "--layers", "5", "--noise", "0", "--reversed", "0", "--steps", "300"]
TEACHER += ["--learning_rate", "5e-4"]
STUDENT = "lit_async_rl/assets/sort_policy"
SHARE = 0.95  # of the teacher's accuracy
STEPS = 200  # of distillation, with half as many completions as a step of the quick start
DISTILLED, REWARDED = "distillation", "GRPO"


@dataclass(frozen=True)
class Cell:
    """One run of the student; of the teacher itself, one validation."""

    method: str
    seed: int
    teacher: str
    rate: float = 5e-4

    @property
    def folder(self) -> Path:
        """Folder of its results."""
        rate = f"rate={self.rate}," if self.method == DISTILLED else ""
        return Path(f"{self.method},{rate}seed={self.seed}")

    def arguments(self) -> list[str]:
        """Arguments of `scripts/train.py`."""
        config = "distill" if self.method == DISTILLED else "quickstart"
        found = ["--config", f"configs/{config}.yaml", "--seed_everything", str(self.seed)]
        found += ["--data.seed", str(self.seed), "--trainer.val_check_interval", "5"]
        found += ["--model.model", self.teacher if self.method == "teacher" else STUDENT]
        if self.method == DISTILLED:
            found += ["--model.distillation.teacher", self.teacher, "--model.learning_rate", str(self.rate)]
            found += ["--trainer.max_steps", str(STEPS)]
        return [*found, "--trainer.max_steps", "1"] if self.method == "teacher" else found


def curve(folder: Path) -> list[tuple[int, float]]:
    """(sampled tokens so far, held-out accuracy) of each validation of a run."""
    found = []
    tokens = 0
    with (folder / "metrics.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            tokens = int(float(row["sample/total_tokens"] or tokens))
            if row["val/pass@1"]:
                found.append((tokens, float(row["val/pass@1"])))
    return found


def mean_curve(curves: list[list[tuple[int, float]]]) -> list[list[float]]:
    """[tokens, accuracy], mean over seeds of each validation."""
    return [
        [round(statistics.mean(one[0] for one in points)), round(statistics.mean(one[1] for one in points), 4)]
        for points in zip(*curves, strict=True)
    ]


def tokens_until(points: list[tuple[int, float]], level: float) -> int | None:
    """Tokens of the first validation at a level, if there is one."""
    return next((tokens for tokens, accuracy in points if accuracy >= level), None)


def make_teacher(folder: Path) -> None:
    """Fine-tunes it from random weights; one that is there stays."""
    if not (folder / "model.safetensors").exists():
        subprocess.run([sys.executable, "scripts/warm_start.py", "--out", str(folder), *TEACHER], check=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--rate", type=float, default=5e-4)
    parser.add_argument("--num_processes", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/distillation_recipe"))
    parser.add_argument("--output", type=Path, help="JSON file for the measurement")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    folder = (args.out / "teacher_weights").resolve()
    make_teacher(folder)
    of_teacher = Cell("teacher", 0, str(folder))
    runs = [Cell(method, seed, str(folder), args.rate) for seed in args.seeds for method in (DISTILLED, REWARDED)]
    Grid(run_cell, args.out, args.num_processes, cell_timeout_s=3600.0).run([of_teacher, *runs])
    teacher = curve(args.out / of_teacher.folder)[0][1]
    curves = {(run.method, run.seed): curve(args.out / run.folder) for run in runs}
    rows = []
    for seed in args.seeds:
        distilled, rewarded = curves[DISTILLED, seed], curves[REWARDED, seed]
        row = [seed, distilled[0][1], distilled[-1][1], tokens_until(distilled, SHARE * teacher)]
        row += [tokens_until(distilled, rewarded[-1][1]), rewarded[-1][1], tokens_until(rewarded, SHARE * teacher)]
        rows.append([*row, tokens_until(rewarded, rewarded[-1][1])])
        print(*rows[-1], flush=True)
    shares = [row[2] / teacher for row in rows]
    print(f"teacher {teacher:.3f}, student {statistics.mean(shares):.3f} of it")
    if args.output:
        found = measurement(
            args.output.stem,
            round(statistics.mean(shares), 3),
            f"of the teacher's held-out accuracy ({teacher:.3f}) after distillation, mean of {len(rows)} seeds",
            columns=[
                *("seed", "before", "after distillation", "tokens until 95 % of the teacher"),
                *(
                    "tokens until GRPO's last",
                    "after GRPO",
                    "its tokens until 95 % of the teacher",
                    "until its own last",
                ),
            ],
            rows=[[_shown(value) for value in row] for row in rows],
            command="python benchmarks/distillation_recipe.py",
            machine="two cores beside other work, float32",
            interval=[round(min(shares), 3), round(max(shares), 3)],
        )
        means = {method: mean_curve([curves[method, seed] for seed in args.seeds]) for method in (DISTILLED, REWARDED)}
        write_measurement(args.output, found | {"curves": means, "teacher": teacher})


def _shown(value: float | int | None) -> float | int | str:
    return "never" if value is None else round(value, 3)


if __name__ == "__main__":
    main()
