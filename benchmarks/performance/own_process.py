"""Savings of `data.engine.own_process`: seconds of a step, synchronous and with the engine in either process, in turns.

    OMP_NUM_THREADS=1 python benchmarks/performance/own_process.py --output docs/measurements/own_process.json

Runs are ordinary commands. `configs/time_to_accuracy/lengths.yaml` says how to make the policy of the second workload;
without it that one is left out.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common.measurement import measurement, write_measurement
from benchmarks.common.process import csv_logger

SKIPPED_STEPS = 5  # while the pipeline fills
TIMEOUT_S = 600.0
POLICY = Path("runs/long_sort_policy")  # of the workload with long tails
RECIPE = ("--config", "configs/stabilizers/vcpo_score.yaml")
WORKLOADS = {
    "the quick start": ("--config", "configs/quickstart.yaml"),
    "completions of 3 to 120 digits": ("--config", "configs/time_to_accuracy/lengths.yaml", *RECIPE),
}
OWN = ("--data.engine.own_process", "true")
NOT_OWN = ("--data.engine.own_process", "false")
SYSTEMS = {
    "synchronous": (*NOT_OWN, "--data.max_staleness", "0"),
    "`max_staleness` 4": (*NOT_OWN, "--data.max_staleness", "4"),
    "`max_staleness` 4, `own_process`": (*OWN, "--data.max_staleness", "4"),
}


def step_s(workload: str, system: str, num_steps: int) -> float:
    """Mean seconds of a step."""
    quiet = ["--trainer.enable_progress_bar", "false", "--defaults.checkpoint", "null"]
    quiet += ["--trainer.limit_val_batches", "0"]
    engine = ["--data.engine", "EmbeddedEngine"] if workload == "the quick start" else []
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "scripts/train.py", *WORKLOADS[workload], *engine, *SYSTEMS[system]]
        command += [*quiet, *csv_logger(Path(folder)), "--trainer.max_steps", str(num_steps)]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT_S)
        with Path(folder, "metrics.csv").open(newline="") as file:
            found = [float(row["perf/step_s"]) for row in csv.DictReader(file) if row.get("perf/step_s")]
    return statistics.fmean(found[SKIPPED_STEPS:])


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--num_steps", type=int, default=60)
    parser.add_argument("--machine", default="two cores, idle otherwise")
    parser.add_argument("--output", type=Path, default=Path("own_process.json"))
    args = parser.parse_args()
    workloads = [name for name, flags in WORKLOADS.items() if "lengths" not in flags[1] or POLICY.is_dir()]
    rows = []
    speedups = []
    for workload in workloads:
        seconds: dict[str, list[float]] = {system: [] for system in SYSTEMS}
        for _ in range(args.rounds):
            for system, found in seconds.items():
                found.append(step_s(workload, system, args.num_steps))
                print(f"{workload}, {system}: {found[-1]:.3f} s", flush=True)
        synchronous, inside, _ = seconds.values()
        for system, found in seconds.items():
            ratio = statistics.median(synchronous) / statistics.median(found)
            rows.append([workload, system, round(statistics.median(found), 3), round(ratio, 2)])
        speedups.append([a / b for a, b in zip(inside, found, strict=True)])
    write_measurement(
        args.output,
        measurement(
            "own_process",
            round(statistics.median(speedups[0]), 2),
            "times the steps per second of an engine in the trainer's process, quick start at max_staleness 4",
            columns=["workload", "run", "seconds of a step", "times as fast as synchronous"],
            rows=rows,
            command=f"python benchmarks/performance/own_process.py --rounds {args.rounds}",
            machine=f"{args.machine}; one thread each, medians of {args.rounds} rounds of {args.num_steps} steps, "
            "the interval is the range",
            interval=[round(min(speedups[0]), 2), round(max(speedups[0]), 2)],
        ),
    )


if __name__ == "__main__":
    main()
