"""Results of finished runs as a tidy table: one row per run and evaluated snapshot."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path

import pandas as pd

from benchmarks.common.process import RESULT
from benchmarks.time_to_accuracy.cell import ACCURACY
from benchmarks.time_to_accuracy.latency import with_clock
from benchmarks.time_to_accuracy.suite import Cell, workloads


def read_run(folder: Path, cell: Cell) -> pd.DataFrame:
    """Evaluations of one run; what is measured once (staleness, shares, load) stands in each row."""
    workload = workloads()[cell.workload]
    rows = pd.read_csv(folder / ACCURACY)
    if workload.slept_as:
        rows = with_clock(rows, folder, workload.latency_factor)
    elif not workload.sleeps:  # `recipes` tells the time of such runs
        rows["wall_s"] = math.nan
    steps = pd.read_csv(folder / "metrics.csv")
    seconds = steps["perf/step_s"].sum()
    result = json.loads((folder / RESULT).read_text())
    return rows.assign(
        workload=workload.slept_as or cell.workload,
        system=cell.system,
        seed=cell.seed,
        staleness=steps["sample/staleness_mean"].mean(),
        staleness_max=steps["sample/staleness_max"].max(),
        wait_share=steps["perf/rollout_wait_s"].sum() / seconds if workload.sleeps else math.nan,
        publish_share=steps["perf/weight_sync_s"].sum() / seconds,
        idle_share=(steps["perf/engine_idle_share"] * steps["perf/step_s"]).sum() / seconds,
        cpu_s=steps["bench/cpu_s"].max() / len(steps),
        load=statistics.fmean(result["loads"]),
    )


def read_runs(out: Path) -> pd.DataFrame:
    """All runs under `out` that finished without an error.

    Raises:
        FileNotFoundError: there is none.
    """
    tables = []
    for path in sorted(out.glob(f"cells/*/*/*/{RESULT}")):
        if json.loads(path.read_text())["error"] is None:
            tables.append(read_run(path.parent, Cell.of(path.parent)))
    if not tables:
        raise FileNotFoundError(f"{out}: no finished run of the benchmark there")
    return pd.concat(tables, ignore_index=True)
