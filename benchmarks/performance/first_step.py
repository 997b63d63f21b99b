"""Processor time from Enter to the first line, to the short help, and to the first optimizer step of the quick start.

    python benchmarks/performance/first_step.py --out docs/measurements/first_step.json

Each round measures everything once, in turn, and `python -c 'import torch, lightning, transformers'` beside it: the
difference is what this package adds. Processor time counts all threads, and hardly depends on what else runs.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.common.measurement import ROOT, measurement, write_measurement

BARE = [sys.executable, "-c", "import torch, lightning, transformers"]
TRAIN = [sys.executable, "scripts/train.py"]
QUICK_START = [*TRAIN, "--config", "configs/quickstart.yaml"]
LIMIT_S = 600.0
NAMES = {
    "bare": "`python -c 'import torch, lightning, transformers'`",
    "line": "first line of `python scripts/train.py --config configs/quickstart.yaml`",
    "help": "`python scripts/train.py --help`",
    "step": "first optimizer step of the quick start, after its validation",
    "above": "of that, above the bare import",
}


def until_the_end(command: list[str]) -> float:
    """Processor seconds of a command."""
    process = start(command, subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{command} ended with {process.returncode}")
    return usage.ru_utime + usage.ru_stime


def until_a_line(command: list[str], begin: str) -> float:
    """Processor seconds of a command until it prints a line that begins so; it is ended then."""
    process = start(command, subprocess.PIPE)
    deadline = time.monotonic() + LIMIT_S
    try:
        for line in process.stdout:
            if line.startswith(begin):
                times = psutil.Process(process.pid).cpu_times()
                return times.user + times.system
            if time.monotonic() > deadline:
                break
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    raise RuntimeError(f"{command} printed no line {begin!r}")


def start(command: list[str], output: int) -> subprocess.Popen[str]:
    """Starts a command in the repository, with one thread."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    errors = subprocess.STDOUT if output == subprocess.PIPE else output
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=errors, text=True)


def one_round(folder: str) -> dict[str, float]:
    """Seconds of each, by name."""
    found = {"bare": until_the_end(BARE), "help": until_the_end([*TRAIN, "--help"])}
    logs = ["--trainer.logger.init_args.save_dir", folder]
    found["line"] = until_a_line([*QUICK_START, *logs], "loading ")
    found["step"] = until_a_line([*QUICK_START, *logs], "step 1/")
    return found | {"above": found["step"] - found["bare"]}


def main() -> None:
    """Measures, and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=ROOT / "docs/measurements/first_step.json")
    parser.add_argument("--machine", default="two cores")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        one_round(folder)  # reads all files once
        rounds = [one_round(folder) for _ in range(arguments.rounds)]
    rows = []
    for key, name in NAMES.items():
        seconds = sorted(one[key] for one in rounds)
        rows.append([name, f"{statistics.median(seconds):.2f} s", f"{seconds[0]:.2f} to {seconds[-1]:.2f}"])
        print(" | ".join(rows[-1]))
    above = sorted(one["above"] for one in rounds)
    found = measurement(
        "first_step",
        value=round(statistics.median(above), 2),
        unit="s of processor time to the first optimizer step of the quick start, above the bare import",
        columns=["what", "processor time, median", f"of {arguments.rounds} rounds"],
        rows=rows,
        command="python benchmarks/performance/first_step.py",
        machine=arguments.machine,
    )
    write_measurement(arguments.out, found)


if __name__ == "__main__":
    main()
