"""Lag study of on-policy distillation: held-out accuracy by lag, for each gradient, beside GRPO from the same start.

    python benchmarks/distillation.py --out runs/distillation

The staleness benchmark's task (six digits, a policy of 88 thousand weights), `FixedLag`, 128 completions a step, at
least six generations of the lag. The teacher, half a million weights, is fine-tuned here on correct answers, once. Each
method has the best of three rates at lags 0, 4 and 16 by a seed that is not counted (the lower one of two that differ
by less than a standard error); lag 64 takes that of lag 16. Started again, it goes on; `--record` writes the
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
RATES = (2e-4, 6e-4, 2e-3)
LAGS = (0, 4, 16, 64)
SEARCH_SEED = 100
ERROR = 0.02  # standard error of an accuracy of 512 problems, at most
TEACHER = "--num_digits 6 --noise 0 --reversed 0"  # of scripts/warm_start.py
SIX_DIGITS = ["--data.prompts.init_args.num_digits", "6", "--data.validation.prompts.init_args.num_digits", "6"]
REWARD_ONLY = ["--model.distillation", "null", "--data.groups_per_step", "16", "--data.group_size", "8"]
PREFIX = "--model.distillation."
METHODS = {
    "distillation, analytic": [],
    "distillation, sampled": [f"{PREFIX}gradient", "sampled"],
    "distillation, sampled, no weights": [f"{PREFIX}gradient", "sampled", f"{PREFIX}importance_weights", "false"],
    "PPO-clip GRPO": [*REWARD_ONLY, "--model.loss", "PPOClip", "--model.loss.clip_high", "0.28"],
    "VCPO": ["--config", "configs/stabilizers/vcpo_score.yaml", *REWARD_ONLY],
}


def num_steps(lag: int) -> int:
    """Length of a run."""
    return max(STEPS, GENERATIONS * lag)


@dataclass(frozen=True)
class Cell:
    """One run."""

    method: str
    lag: int
    seed: int
    rate: float
    teacher: str

    @property
    def folder(self) -> Path:
        """Folder of its results."""
        method = self.method.replace(", ", "-").replace(" ", "-")
        return Path(method, f"lag={self.lag},rate={self.rate},seed={self.seed}")

    def arguments(self) -> list[str]:
        """Arguments of `scripts/train.py`."""
        found = ["--config", "configs/distill.yaml", f"{PREFIX}teacher", self.teacher, *METHODS[self.method]]
        found += SIX_DIGITS
        found += ["--data.sampling.max_tokens", "8", "--model.learning_rate", str(self.rate)]
        found += ["--data.max_staleness", str(self.lag), "--data.engine", "EmbeddedEngine"]
        found += ["--data.engine.in_flight_weight_updates", "false"]
        found += ["--data.admission", "FixedLag"] if self.lag else []
        found += ["--seed_everything", str(self.seed), "--data.seed", str(self.seed)]
        return [*found, "--trainer.max_steps", str(num_steps(self.lag))]


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


def accuracies(cells: list[Cell], out: Path) -> dict[Cell, list[float]]:
    """Held-out accuracies of finished runs, before the first step and on the way to the last."""
    found = {}
    for cell in cells:
        file = out / cell.folder / RESULT
        result = json.loads(file.read_text()) if file.exists() else {}
        if result.get("held_out") and not result.get("error"):
            found[cell] = result["held_out"]
    return found


def make_teacher(out: Path) -> tuple[str, float]:
    """Folder and held-out accuracy of the teacher; one that is there stays."""
    folder = out / "teacher_weights"
    result = out / "teacher.json"
    if not result.exists():
        subprocess.run([sys.executable, "scripts/warm_start.py", "--out", str(folder), *TEACHER.split()], check=True)
        words = ["--config", "configs/distill.yaml", "--model.model", str(folder)]
        words = [sys.executable, "scripts/evaluate.py", *words, *SIX_DIGITS, *REWARD_ONLY]
        words += ["--data.sampling.max_tokens", "8"]
        said = subprocess.run(words, check=True, capture_output=True, text=True)
        accuracy = next(line.split()[1] for line in said.stdout.splitlines() if line.startswith("val/pass@1"))
        result.write_text(json.dumps(float(accuracy)))
    return str(folder.resolve()), json.loads(result.read_text())


def best_rate(method: str, lag: int, searched: dict[Cell, list[float]]) -> float:
    """The lowest rate whose last accuracy is at most a standard error below the best one."""
    last = {cell.rate: values[-1] for cell, values in searched.items() if (cell.method, cell.lag) == (method, lag)}
    return min(rate for rate, value in last.items() if value >= max(last.values()) - ERROR)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--num_processes", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/distillation"))
    parser.add_argument("--record", type=Path, help="JSON file for the measurement; nothing runs")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    teacher, of_teacher = make_teacher(args.out)

    def run(cells: list[Cell]) -> dict[Cell, list[float]]:
        if args.record is None:
            Grid(run_cell, args.out, args.num_processes, cell_timeout_s=3600.0).run(cells)
        return accuracies(cells, args.out)

    searched = run(
        [
            Cell(name, lag, SEARCH_SEED, rate=rate, teacher=teacher)
            for lag in LAGS[:3]
            for name in METHODS
            for rate in RATES
        ]
    )
    rates = {(name, lag): best_rate(name, min(lag, LAGS[2]), searched) for name in METHODS for lag in LAGS}
    found = run([Cell(*key, seed, rate=rate, teacher=teacher) for seed in args.seeds for key, rate in rates.items()])
    head = ["method"]
    head += [text for lag in LAGS for text in (f"lag {lag}, {num_steps(lag)} steps", f"learning rate at lag {lag}")]
    rows = []
    last: dict[tuple[str, int], list[float]] = {}
    for name in METHODS:
        row: list[str | float] = [name]
        for lag in LAGS:
            values = [one[-1] for cell, one in found.items() if (cell.method, cell.lag) == (name, lag)]
            last[name, lag] = values
            error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
            row += [f"{statistics.fmean(values):.3f} ± {error:.3f} ({len(values)})" if values else "", rates[name, lag]]
        rows.append(row)
    start = next(iter(found.values()))[0]
    print(f"teacher: {of_teacher:.3f}, student before: {start:.3f}")
    for row in (head, *rows):
        print(" | ".join(map(str, row)))
    if args.record is not None:
        name = "distillation, analytic"
        kept = [(late - start) / (early - start) for late, early in zip(last[name, 16], last[name, 0], strict=False)]
        error = statistics.stdev(kept) / len(kept) ** 0.5
        ends = [f"{value:.3f}" for value in (of_teacher, start)]
        rows += [[text, end, *("" for _ in head[2:])] for text, end in zip(("teacher", "before"), ends, strict=True)]
        write_measurement(
            args.record,
            measurement(
                name=args.record.stem,
                value=round(statistics.fmean(kept), 3),
                unit="of the gain of lag 0 at lag 16, by distillation with the analytic gradient, mean of pairs",
                interval=[round(statistics.fmean(kept) + side * 2 * error, 3) for side in (-1, 1)],
                columns=head,
                rows=rows,
                command="python benchmarks/distillation.py --out runs/distillation",
                machine="2 cores beside other work, float32; mean ± standard error (number of seeds); "
                "2e-4 is the lowest learning rate searched",
            ),
        )


if __name__ == "__main__":
    main()
