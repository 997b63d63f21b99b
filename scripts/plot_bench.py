"""Redraws a staleness benchmark's report, see benchmarks/staleness/plot.py."""

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))  # the benchmarks are not part of the package
    runpy.run_module("benchmarks.staleness.plot", run_name="__main__")
