"""Runs the benchmark of time to accuracy, see benchmarks/time_to_accuracy: `--suite smoke`."""

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))  # the benchmarks are not part of the package
    runpy.run_module("benchmarks.time_to_accuracy", run_name="__main__")
