"""Tables of the comparison with TRL (`trl.py`)."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.common.measurement import measurement

NAMES = {
    "trl": "TRL GRPOTrainer",
    "trl2": "TRL, 2 x threads",
    "0": "synchronous",
    "1": "max_staleness 1",
    "2": "max_staleness 2",
    "4": "max_staleness 4",
}
TRL = ("trl", "trl2")  # trainer and engine of asynchronous runs have a thread each: so has `trl2` two
COLUMNS = {
    "tokens_per_s": "tok/s",
    "ratio": "ratio",
    "tokens_per_critical_cpu_s": "tok/cpu-s",
    "ratio_critical_cpu": "ratio",
    "tokens_per_cpu_s": "tok/all cpu",
    "ratio_cpu": "ratio",
    "step_ms": "step ms",
    "waiting_ms": "waiting ms",
    "publish_ms": "publish ms",
    "generation_cpu_ms": "gen cpu ms",
    "training_cpu_ms": "train cpu ms",
}


def summarize(name: str, segments: list[dict[str, float]], base: list[dict[str, float]]) -> dict[str, float]:
    """Medians over rounds; ratios to TRL within a round."""

    def critical(s: dict[str, float], overlaps: bool) -> float:
        return max(s["main_cpu_s"], s["other_cpu_s"]) if overlaps else s["main_cpu_s"] + s["other_cpu_s"]

    def median(values: list[float]) -> float:
        return statistics.median(values)

    walls = [s["tokens"] / s["wall_s"] for s in segments]
    criticals = [s["tokens"] / critical(s, overlaps=name not in (*TRL, "0")) for s in segments]
    all_threads = [s["tokens"] / critical(s, overlaps=False) for s in segments]
    base_walls = [s["tokens"] / s["wall_s"] for s in base]
    base_criticals = [s["tokens"] / critical(s, overlaps=False) for s in base]
    if name in TRL:
        generation_cpu = [s["generation_cpu_s"] / s["steps"] for s in segments]
        training_cpu = [(s["main_cpu_s"] - s["generation_cpu_s"]) / s["steps"] for s in segments]
        waiting = [s["generation_s"] / s["steps"] for s in segments]
    else:
        generation_cpu = [s["other_cpu_s"] / s["steps"] for s in segments]
        training_cpu = [s["main_cpu_s"] / s["steps"] for s in segments]
        waiting = [s["wait_s"] / s["steps"] for s in segments]
    return {
        "tokens_per_s": median(walls),
        "ratio": median([x / y for x, y in zip(walls, base_walls, strict=True)]),
        "tokens_per_critical_cpu_s": median(criticals),
        "ratio_critical_cpu": median([x / y for x, y in zip(criticals, base_criticals, strict=True)]),
        "tokens_per_cpu_s": median(all_threads),
        "ratio_cpu": median([x / y for x, y in zip(all_threads, base_criticals, strict=True)]),
        "step_ms": 1e3 * median([s["wall_s"] / s["steps"] for s in segments]),
        "waiting_ms": 1e3 * median(waiting),
        "publish_ms": 1e3 * median([s.get("sync_s", 0.0) / s["steps"] for s in segments]),
        "generation_cpu_ms": 1e3 * median(generation_cpu),
        "training_cpu_ms": 1e3 * median(training_cpu),
    }


def as_measurement(name: str, workload: str, results: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Table of one workload for docs/measurements; the headline is the last system's ratio.

    Args:
        name: of the measurement.
        workload: of `results`.
        results: summaries by system, and `segments`.
        rounds: number of segments of each system.
    """
    segments = results["segments"]
    walls = {system: [s["tokens"] / s["wall_s"] for s in found] for system, found in segments.items()}
    base = next(iter(walls.values()))
    rows = []
    for system, found in walls.items():
        ratios = sorted(one / other for one, other in zip(found, base, strict=True))
        row = results[system]
        span = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
        seconds = [round(row[key] / 1e3, 1) for key in ("step_ms", "generation_cpu_ms", "training_cpu_ms")]
        rows.append([NAMES[system], round(row["tokens_per_s"], 1), round(row["ratio"], 2), span, *seconds])
    columns = [workload, "trained tokens per second", "ratio", "over rounds", "step, s"]
    columns += ["of it generation, processor s", "training, processor s"]
    return measurement(
        name,
        rows[-1][2],
        f"times the trained tokens per second of {rows[0][0]} ({workload}, {rows[-1][0]})",
        columns=columns,
        rows=rows,
        interval=[round(ratios[0], 2), round(ratios[-1], 2)],
        command=f"OMP_NUM_THREADS=1 python benchmarks/performance/trl.py --workloads {workload} --systems "
        + f"{' '.join(walls)} --rounds {rounds}",
        machine=f"two cores, float32, programs in turns; medians of {rounds} rounds, range in place of an interval",
    )
