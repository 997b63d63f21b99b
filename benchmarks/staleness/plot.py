"""Redraws the report of a staleness benchmark from its table.

python scripts/plot_bench.py --table runs/bench/full/results.parquet --out runs/bench/full
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.staleness.report import write_report
from benchmarks.staleness.table import read_table


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, required=True, help="results.parquet of a benchmark")
    parser.add_argument("--out", type=Path, required=True, help="folder for report.html and its pictures")
    args = parser.parse_args()
    try:
        table = read_table(args.table)
    except (ValueError, FileNotFoundError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    print(write_report(table, args.out, command=f"python scripts/plot_bench.py --table {args.table}"))


if __name__ == "__main__":
    main()
