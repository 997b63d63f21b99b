"""Time to accuracy of asynchronous and synchronous training: trains a grid {workload} x {system} x {seed}.

    python scripts/time_to_accuracy.py --suite tools

Writes `curves.parquet`, `report.md`, `report.html` and pictures to `--out`. An interrupted suite is resumed; finished
runs are not repeated. `--report_only` evaluates what is there.
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from benchmarks.common.grid import Grid
from benchmarks.time_to_accuracy.cell import run_cell
from benchmarks.time_to_accuracy.curves import read_runs
from benchmarks.time_to_accuracy.documents import write_documents
from benchmarks.time_to_accuracy.report import write_report
from benchmarks.time_to_accuracy.suite import load_suite


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", default="smoke", help="name of a file in configs/time_to_accuracy/suites")
    parser.add_argument("--out", type=Path, default=None, help="folder of the results; default: runs/tta/<suite>")
    parser.add_argument("--num_processes", type=int, default=1, help="runs at a time: each needs two cores to itself")
    parser.add_argument("--report_only", action="store_true", help="train nothing")
    parser.add_argument(
        "--documents", metavar="COMMIT", help="also writes the suite's picture and table of docs/when_async_pays.md"
    )
    parser.add_argument("--machine", default="two cores shared with other programs", help="said below that table")
    parser.add_argument("--set", action="append", default=[], help="of every run, e.g. --set=--trainer.accelerator=gpu")
    args = parser.parse_args()
    out = args.out or Path("runs/tta", args.suite)
    try:
        suite = load_suite(args.suite)
        if not args.report_only:
            Grid(
                partial(run_cell, settings=args.set), out, args.num_processes, cell_timeout_s=suite.cell_timeout_s
            ).run(suite.cells)
        table = read_runs(out)
    except (ValueError, FileNotFoundError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    except KeyboardInterrupt:
        sys.exit(f"stopped; the same command goes on from {out}")
    table.to_parquet(out / "curves.parquet", compression="zstd", index=False)
    command = " ".join([f"python scripts/time_to_accuracy.py --suite {args.suite}", *(f"--set={s}" for s in args.set)])
    if args.documents:
        write_documents(table, args.suite, command, commit=args.documents, machine=args.machine, root=Path())
    print(write_report(table, out, command))
    print(f"\nreport: {out / 'report.html'}")


if __name__ == "__main__":
    main()
