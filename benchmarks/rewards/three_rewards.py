"""The quick start's task, learned from three rewards at once.

    python benchmarks/rewards/three_rewards.py --out docs/measurements/three_rewards.json

The parts are the whole answer, the share of its characters, and whether its length is right; `GDPO` normalises each
within its group. What is shown is each part's mean over the first and the last steps, and the held-out accuracy, which
is that of the answer's part.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common.measurement import measurement, write_measurement

ROOT = Path(__file__).resolve().parents[2]
NUM_STEPS = 10  # that a mean is over
REWARD = {
    "class_path": "lit_async_rl.CombinedReward",
    "init_args": {
        "rewards": {
            "answer": "lit_async_rl.exact_match",
            "digits": "lit_async_rl.share_correct",
            "length": "benchmarks.rewards.three_rewards.right_length",
        },
        "success": "answer",
    },
}
PARTS = tuple(REWARD["init_args"]["rewards"])


def right_length(prompt: Any, completion: str) -> float:
    """Whether the answer has as many characters as the right one."""
    return float(len(completion) == len(prompt.answer))


def run(seed: int, max_steps: int) -> dict[str, list[tuple[int, float]]]:
    """Each logged metric of a run in a process of its own, by step."""
    with tempfile.TemporaryDirectory() as folder:
        logger = {"class_path": "CSVLog", "init_args": {"save_dir": folder, "name": "run"}}
        words = ["--config=configs/quickstart.yaml", f"--seed_everything={seed}", f"--data.seed={seed}"]
        words += [f"--data.reward={json.dumps(REWARD)}", "--data.advantage=GDPO", f"--trainer.max_steps={max_steps}"]
        words += [f"--trainer.logger={json.dumps(logger)}", f"--trainer.val_check_interval={max_steps // 4}"]
        subprocess.run([sys.executable, "scripts/train.py", *words], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        (table,) = Path(folder).rglob("metrics.csv")
        found: dict[str, list[tuple[int, float]]] = {}
        with table.open(newline="") as file:
            for row in csv.DictReader(file):
                for name, value in row.items():
                    if value and name not in ("step", "epoch"):
                        found.setdefault(name, []).append((int(row["step"]), float(value)))
        return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--max_steps", type=int, default=120)
    parser.add_argument("--out", type=Path, help="measurement to write")
    given = parser.parse_args()
    rows = []
    accuracies = []
    for seed in range(given.seeds):
        found = run(seed, given.max_steps)
        accuracies.append(found["val/pass@1"][-1][1])
        row = [seed, given.max_steps]
        for part in PARTS:
            values = [value for _, value in found[f"reward/part/{part}"]]
            row.append(f"{statistics.fmean(values[:NUM_STEPS]):.3f} to {statistics.fmean(values[-NUM_STEPS:]):.3f}")
        rows.append([*row, *(f"{value:.3f}" for _, value in (found["val/pass@1"][0], found["val/pass@1"][-1]))])
        print(rows[-1], flush=True)
    if given.out is None:
        return
    columns = ["seed", "steps", *(f"{part}, first and last {NUM_STEPS} steps" for part in PARTS)]
    columns += ["held-out accuracy before", "and at the end"]
    measured = measurement(
        given.out.stem,
        round(statistics.fmean(accuracies), 3),
        f"held-out accuracy with three rewards, mean of {given.seeds} seeds",
        columns=columns,
        rows=rows,
        command=f"python benchmarks/rewards/three_rewards.py --out {given.out}",
        machine="two cores shared with other programs",
    )
    write_measurement(given.out, measured)


if __name__ == "__main__":
    main()
