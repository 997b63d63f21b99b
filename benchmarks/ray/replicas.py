"""Replicas on Ray against an engine in a process of its own: what a step costs, and what the run learns.

    OMP_NUM_THREADS=1 python benchmarks/ray/replicas.py overhead --output docs/measurements/ray_overhead.json
    OMP_NUM_THREADS=1 python benchmarks/ray/replicas.py smollm2 --output docs/measurements/ray_smollm2.json
    OMP_NUM_THREADS=1 python benchmarks/ray/replicas.py accuracy --output docs/measurements/ray_accuracy.json
    .venv-vllm/bin/python benchmarks/ray/replicas.py vllm --rounds 1 --output docs/measurements/ray_vllm.json

Runs are ordinary commands, in turns; those of one round (a seed) are paired. Each result is kept in `--folder`, and a
benchmark that was interrupted goes on from there.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common.measurement import measurement, write_measurement
from benchmarks.common.process import csv_logger

TIMEOUT_S = 900.0
INNER = "data.engine.engine.init_args"


def small_vllm(setting: str) -> tuple[str, ...]:
    """Flags of a vLLM of which two fit beside a trainer."""
    return (f"--{setting}.max_num_seqs", "256", f"--{setting}.kv_cache_memory_gb", "0.25")


RAY = ("--data.engine", "RayEngine", "--data.engine.num_cpus", "0.5", "--data.engine.engine.class_path")
SYSTEMS = {
    "no Ray, own process": ("--data.engine", "EmbeddedEngine", "--data.engine.own_process", "true"),
    "1 replica": (*RAY, "EmbeddedEngine", "--data.engine.replicas", "1"),
    "2 replicas": (*RAY, "EmbeddedEngine", "--data.engine.replicas", "2"),
    "4 replicas": (*RAY, "EmbeddedEngine", "--data.engine.replicas", "4"),
}
VLLM = {  # needs both of them in one environment: make test-vllm-ray
    "no Ray, vLLM": ("--data.engine", "VLLMEngine", *small_vllm("data.engine")),
    "1 replica of vLLM": (*RAY, "VLLMEngine", "--data.engine.replicas", "1", *small_vllm(INNER)),
    "2 replicas of vLLM": (*RAY, "VLLMEngine", "--data.engine.replicas", "2", *small_vllm(INNER)),
}
QUIET = ("--trainer.enable_progress_bar", "false", "--defaults.checkpoint", "null")


@dataclass(frozen=True)
class Comparison:
    """Systems of a comparison, their settings, and the quantity compared."""

    systems: Sequence[str]
    flags: tuple[str, ...] = ()
    config: str = "configs/quickstart.yaml"
    engine: Mapping[str, str] = field(default_factory=dict)  # settings of the embedded engine, wherever it runs
    num_skipped: int = 10  # steps while the pipeline fills, of which no time is taken
    is_of_time: bool = False  # else of accuracy


COMPARISONS = {
    "overhead": Comparison(
        list(SYSTEMS),
        ("--trainer.max_steps", "60", "--trainer.limit_val_batches", "0"),
        is_of_time=True,
    ),
    "smollm2": Comparison(
        list(SYSTEMS)[:2],
        ("--data.filters", "null", "--trainer.max_steps", "14", "--trainer.limit_val_batches", "0"),
        config="configs/smollm2.yaml",
        engine={"num_slots": "96", "dtype": "bfloat16"},
        num_skipped=4,
        is_of_time=True,
    ),
    "accuracy": Comparison(list(SYSTEMS)),
    "vllm": Comparison(list(VLLM)),
}


def result(folder: Path, what: str, system: str, seed: int) -> dict[str, float]:
    """Mean seconds of a step and of a publication, last validation accuracy, and largest staleness of a run."""
    compared = COMPARISONS[what]
    place = folder / f"{what}_{system.replace(' ', '_')}_{seed}"
    done = place / "result.json"
    if done.exists():
        return json.loads(done.read_text())
    place.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable,
        "scripts/train.py",
        "--config",
        compared.config,
        *(SYSTEMS | VLLM)[system],
        *QUIET,
    ]
    inner = "data.engine" if system.startswith("no Ray") else INNER
    command += [word for name, value in compared.engine.items() for word in (f"--{inner}.{name}", value)]
    command += [*compared.flags, *csv_logger(place), "--seed_everything", str(seed)]
    with (place / "log.txt").open("w") as log:
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=log, stderr=log, timeout=TIMEOUT_S)
    with (place / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))

    def column(name: str) -> list[float]:
        return [float(row[name]) for row in rows if row.get(name)]

    found = {
        "step_s": statistics.fmean(column("perf/step_s")[compared.num_skipped :]),
        "sync_s": statistics.fmean(column("perf/weight_sync_s")[compared.num_skipped :]),
        "staleness": max(column("sample/staleness_max")),
        "accuracy": (column("val/pass@1") or [float("nan")])[-1],
    }
    done.write_text(json.dumps(found))
    return found


def interval(values: list[float]) -> list[float] | None:
    """95 % interval of the mean (Student's t); None for a single value."""
    if len(values) < 2:
        return None
    from scipy.stats import t as student  # vLLM's environment has none, and needs none for a single round

    half = float(student.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / len(values) ** 0.5
    return [round(statistics.fmean(values) - half, 4), round(statistics.fmean(values) + half, 4)]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=list(COMPARISONS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS | VLLM))
    parser.add_argument("--folder", type=Path, default=Path("runs/ray_replicas"))
    parser.add_argument("--machine", default="two cores, idle otherwise")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    comparison = COMPARISONS[args.what]
    args.systems = args.systems or comparison.systems
    found: dict[str, list[dict[str, float]]] = {system: [] for system in args.systems}
    for seed in range(args.rounds):
        for system in args.systems:
            found[system].append(result(args.folder, args.what, system, seed=seed))
            print(f"seed {seed}, {system}: {found[system][-1]}", flush=True)
    names = ("step_s", "sync_s") if comparison.is_of_time else ("accuracy", "staleness")
    rows = [
        [system, *(round(statistics.median(one[name] for one in runs), 4) for name in names)]
        for system, runs in found.items()
    ]
    base = found[args.systems[0]]
    if comparison.is_of_time:
        compared = [b["step_s"] / a["step_s"] - 1 for a, b in zip(base, found["1 replica"], strict=True)]
        one_step = f"of a step of {Path(comparison.config).stem}"
        unit = f"{one_step} that one replica on Ray costs beyond an engine in a process of its own"
        columns = ["run", "seconds of a step", "seconds that the trainer waits for a publication"]
    else:
        last = found[args.systems[-1]]
        compared = [b["accuracy"] - a["accuracy"] for a, b in zip(base, last, strict=True)]
        unit = f"difference in accuracy at the end of the quick start, {args.systems[-1]} against {args.systems[0]}"
        columns = ["run", "accuracy at the end", "largest staleness (bound 4)"]
    repeated = "one run each" if args.rounds == 1 else f"{args.rounds} paired runs; the table has their medians"
    write_measurement(
        args.output,
        measurement(
            f"ray_{args.what}",
            round(statistics.fmean(compared), 4),
            unit,
            columns=columns,
            rows=rows,
            command=f"python benchmarks/ray/replicas.py {args.what} --rounds {args.rounds}",
            machine=f"{args.machine} ({repeated}), load {os.getloadavg()[0]:.1f} at the end",
            interval=interval(compared),
            of_each_round=[round(one, 4) for one in compared],
        ),
    )


if __name__ == "__main__":
    main()
