"""Stability at lag k and the effect of stabilizers: trains a grid {method} x {lag} x {seed} of small policies.

    python scripts/staleness_bench.py --suite quick

Writes `results.parquet`, `report.html` and its figures to `--out`. An interrupted grid is resumed; finished runs are
not repeated, nor are those in a table of earlier ones (`--known docs/results/<suite>.parquet`), which become part of
the new table and report. `scripts/plot_bench.py` redraws the report from the table.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from itertools import groupby
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pandas as pd

from benchmarks.common.grid import Grid
from benchmarks.staleness.cell import run_cell
from benchmarks.staleness.report import write_report
from benchmarks.staleness.statistics import best_scales, per_cell
from benchmarks.staleness.suite import BEST, FIRST_SEARCH_SEED, Suite, load_suite
from benchmarks.staleness.table import all_runs, cells_of, read_table, write_table


def train(
    suite: Suite,
    out: Path,
    num_processes: int,
    *,
    known: pd.DataFrame | None,
    settings: Sequence[str] = (),
    budget_s: float | None = None,
) -> pd.DataFrame:
    """Trains the suite in the order of its blocks; returns all runs.

    Blocks that use learning rates of a search wait for what comes before them. No others do: a block's last runs would
    leave processes idle.
    """
    cell = partial(run_cell, settings=settings, checkpoint_every_n_steps=suite.checkpoint_every_n_steps)
    grid = Grid(cell, out, num_processes, cell_timeout_s=suite.cell_timeout_s, budget_s=budget_s)
    done = set() if known is None else cells_of(known)
    for uses_search, blocks in groupby(suite.blocks, lambda block: block.learning_rate_scales == BEST):
        best = {}
        if uses_search:
            runs = all_runs(out, known)
            best = best_scales(per_cell(runs[runs["seed"] >= FIRST_SEARCH_SEED]))
        grid.run(cell for block in blocks for cell in block.cells(best) if cell not in done)
    return all_runs(out, known)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", default="quick", help="name of a file in configs/bench/suites")
    parser.add_argument("--out", type=Path, default=None, help="folder of the results; default: runs/bench/<suite>")
    parser.add_argument("--num_processes", type=int, default=max(1, min(2, os.cpu_count() or 1)), help="runs at a time")
    parser.add_argument("--known", type=Path, default=None, help="table of runs that need not be repeated")
    parser.add_argument("--set", action="append", default=[], help="of every run, e.g. --set=--trainer.accelerator=gpu")
    parser.add_argument("--budget_s", type=float, default=None, help="end after so long; the same command goes on")
    args = parser.parse_args()
    out = args.out or Path("runs/bench", args.suite)
    try:
        suite = load_suite(args.suite)
        known = read_table(args.known) if args.known else None
        table = train(suite, out, args.num_processes, known=known, settings=args.set, budget_s=args.budget_s)
    except (ValueError, FileNotFoundError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    except (KeyboardInterrupt, TimeoutError) as end:
        sys.exit(f"stopped; {end or 'interrupted'}; the same command goes on from {out}")
    write_table(table, out / "results.parquet")
    print(write_report(table, out, command=f"python scripts/staleness_bench.py --suite {args.suite}"))


if __name__ == "__main__":
    main()
