"""Results as a tidy table: one row per cell and optimizer step."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from datetime import date
from pathlib import Path

import pandas as pd

from benchmarks.common.measurement import checked_out
from benchmarks.common.process import RESULT
from benchmarks.staleness.suite import Cell

RESULTS = f"cells/*/*/*/{RESULT}"
SOURCES = "sources.json"  # which command at which commit made which table
CELL = ["regime", "method", "lag", "learning_rate_scale", "seed"]
COLUMNS = {
    "val/pass@1": "accuracy",
    "reward/mean": "reward",
    "reward/mean_sampled": "reward_sampled",
    "grad/cosine": "cosine",
    "grad/norm": "grad_norm",
    "importance/ess_ratio": "ess_ratio",
    "importance/kl_k3": "kl",
    "importance/ratio_max": "ratio_max",
    "importance/clip_fraction": "clip_fraction",
    "policy/entropy": "entropy",
    "sample/staleness_mean": "staleness_mean",
    "sample/staleness_max": "staleness_max",
    "rollout/length_mean": "length_mean",
    "ess/lr_scale": "lr_scale",
    "gac/kept": "gac_kept",
    "staleness/bound": "staleness_bound",
    "bench/tokens": "tokens",
    "bench/cpu_s": "cpu_s",
    "drift/step": "drift_step",
    "drift/stale": "drift_stale",
    "drift/radius": "drift_radius",
    "controller/num_changes": "controller_changes",
    "blend/share": "blend_share",
}
NOT_IN_OLD_TABLES = {
    "reward_sampled",
    "drift_step",
    "drift_stale",
    "drift_radius",
    "controller_changes",
    "blend_share",
}
CPU = "cpu"  # where the runs of a table trained that does not name their device


def read_cell(folder: Path, cell: Cell) -> pd.DataFrame:
    """Rows of one finished run. Accuracy at step n is that of the policy after n optimizer steps."""
    result = json.loads((folder / RESULT).read_text())
    path = folder / "metrics.csv"
    raw = pd.read_csv(path) if path.is_file() and path.stat().st_size > 1 else pd.DataFrame({"step": []})
    steps = pd.DataFrame(index=pd.Index(sorted(set(raw["step"])), name="step"))
    for column, name in COLUMNS.items():
        values = raw[["step", column]].dropna().groupby("step")[column] if column in raw else None
        steps[name] = values.last() if values is not None else float("nan")
    rows = steps.reset_index()
    for key in CELL:
        rows.insert(CELL.index(key), key, getattr(cell, key))
    rows["error"] = result["error"]
    rows["device"] = result.get("device", CPU)
    rows["wall_s"] = result["wall_s"]
    return rows


def read_cells(out: Path, cells: Iterable[Cell] | None = None) -> pd.DataFrame:
    """These runs, or all finished ones under `out`.

    Raises:
        FileNotFoundError: there is none.
    """
    if cells is None:
        cells = [Cell.of(path.parent) for path in sorted(out.glob(RESULTS))]
    tables = [read_cell(out / cell.folder, cell) for cell in cells]
    if not tables:
        raise FileNotFoundError(f"{out}: no finished run of the benchmark there")
    return pd.concat(tables, ignore_index=True)


def write_table(table: pd.DataFrame, path: Path) -> None:
    """Writes Parquet in single precision; makes the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    numbers = table.select_dtypes("float64").columns
    table.astype(dict.fromkeys(numbers, "float32")).to_parquet(path, compression="zstd", index=False)


def read_table(path: Path) -> pd.DataFrame:
    """Reads a table written by `write_table`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it has other columns.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such table; scripts/staleness_bench.py writes it")
    table = pd.read_parquet(path)
    if missing := {*CELL, "step", *COLUMNS.values(), "error"} - NOT_IN_OLD_TABLES - set(table):
        raise ValueError(f"{path}: not a table of the staleness benchmark, it has no columns {sorted(missing)}")
    table = table.assign(**dict.fromkeys(NOT_IN_OLD_TABLES - set(table), math.nan))
    if "device" not in table:
        table = table.assign(device=CPU)
    table = table.astype(dict.fromkeys(table.select_dtypes("float32").columns, "float64"))
    return table.assign(learning_rate_scale=table["learning_rate_scale"].round(6))  # 0.3 again


def cells_of(table: pd.DataFrame) -> set[Cell]:
    """The runs of a table."""
    return {Cell(*key) for key in table[CELL].drop_duplicates().itertuples(index=False)}


def all_runs(out: Path, known: pd.DataFrame | None) -> pd.DataFrame:
    """The finished runs under `out` and those of an earlier table; one that is in both is that under `out`.

    Raises:
        FileNotFoundError: there is none.
    """
    if known is not None and not any(out.glob(RESULTS)):
        return known
    return merged(known, read_cells(out))


def merged(known: pd.DataFrame | None, new: pd.DataFrame) -> pd.DataFrame:
    """The runs of two tables; one that is in both is the new one."""
    if known is None:
        return new
    again = pd.MultiIndex.from_frame(known[CELL]).isin(pd.MultiIndex.from_frame(new[CELL]))
    return pd.concat([known[~again], new], ignore_index=True)


def collect(name: str, out: Path, tables: Path) -> None:
    """Adds what a grid has finished to its table in the folder `tables`, and where that is from."""
    path = tables / f"{name}.parquet"
    sources = tables / SOURCES
    found = json.loads(sources.read_text()) if sources.is_file() else {}
    known = read_table(path) if path.is_file() else None
    new = read_cells(out)
    commits = [checked_out()]
    if known is not None and not cells_of(known) <= cells_of(new):
        commits = [c for c in found[name]["commit"].split(", ") if c not in commits] + commits
    write_table(merged(known, new), path)
    command = f"python scripts/staleness_bench.py --suite {name}"
    found[name] = {"command": command, "commit": ", ".join(commits), "date": date.today().isoformat()}
    sources.write_text(json.dumps(found, indent=2) + "\n")
