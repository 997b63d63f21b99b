"""Time, memory and size of the report of a long run, and how soon its page answers.

    python benchmarks/performance/report.py --steps 10000 --rollouts 64 --output docs/measurements/report.json

Makes the folder of a run with all rollouts of all steps in `samples.jsonl` (much more than `SampleLogger` writes) and
a timeline, runs the report command in a process of its own, and times what a user does in Chromium: the milliseconds
from an action to the second frame after it, and the processor time of the page's main thread. The first time is told
apart from later ones, of which the median of four is taken.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "helpers"))

import browser
import made_runs

from benchmarks.common.measurement import measurement, write_measurement


def make(folder: Path, steps: int, rollouts: int) -> None:
    """The run's files."""
    made_runs.write_metrics(folder, steps)
    tails = [json.dumps(made_runs.rollout(50, 1, n % 8)).split('"group": 1, ', 1)[1] for n in range(rollouts)]
    with (folder / "samples.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            for n, tail in enumerate(tails):
                file.write(f'{{"step": {step}, "group": {step * rollouts // 8 + n // 8}, {tail}\n')
    made_runs.write_held_out(folder, tuple(range(0, steps, max(1, steps // 50))))
    made_runs.write_timeline(folder, steps, lag=2, more=12)


def interactions(page: Path) -> dict[str, dict[str, float]]:
    """Milliseconds of each interaction: the first time and later, and processor time the first time and later."""
    taken: dict[str, dict[str, float]] = {}
    with browser.chromium() as driver:
        driver.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
        browser.resize(driver, 1440, 900)
        browser.show(driver, page)
        time.sleep(1.0)
        for name, action in browser.INTERACTIONS.items():
            used = [main_thread_ms(driver)]
            waited = []
            for _ in range(5):
                waited.append(float(driver.execute_async_script(browser.TIMED, action)))
                used.append(main_thread_ms(driver))
            work = [after - before for before, after in itertools.pairwise(used)]
            first = (waited[0], work[0])
            later = (statistics.median(waited[1:]), statistics.median(work[1:]))
            taken[name] = {"first": first[0], "later": later[0], "first_cpu": first[1], "later_cpu": later[1]}
        if problems := browser.errors(driver):
            raise RuntimeError(f"errors on the console: {problems}")
    return taken


def main_thread_ms(driver: Any) -> float:
    """Processor time of the page's main thread so far, in milliseconds."""
    metrics = driver.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
    return 1e3 * next(float(one["value"]) for one in metrics if one["name"] == "TaskDuration")


def measure(steps: int, rollouts: int) -> dict[str, Any]:
    """Makes the run and measures the report."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made, "run")
        page = Path(made, "report.html")
        folder.mkdir()
        make(folder, steps, rollouts)
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        code = "import sys; from lit_async_rl.cli.console import main; main(sys.argv[1:])"
        began = time.monotonic()
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code, "report", str(folder), "--out", str(page)], check=True)
        wall_s = time.monotonic() - began
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        answers = interactions(page)
        return {
            "run_mb": round(size / 1e6),
            "wall_s": round(wall_s, 1),
            "processor_s": round(after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime, 1),
            "peak_memory_mb": round(after.ru_maxrss / 1024),
            "report_mb": round(page.stat().st_size / 1e6, 1),
            "interactions_ms": {name: {k: round(v) for k, v in of.items()} for name, of in answers.items()},
        }


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--rollouts", type=int, default=64, help="of a step")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    found = measure(arguments.steps, arguments.rollouts)
    print(json.dumps(found, indent=2))
    if arguments.output is not None:
        write_measurement(arguments.output, summary(found, arguments.steps, arguments.rollouts))


TIMES = {
    "first_cpu": "the first time, processor time of the page",
    "later_cpu": "later, processor time of the page",
    "first": "the first time",
    "later": "later",
}


def summary(found: dict[str, Any], steps: int, rollouts: int) -> dict[str, Any]:
    """Summary for docs/measurements."""
    taken = found["interactions_ms"]
    rows = [
        ["files of the run", f"{found['run_mb']:,} MB"],
        ["processor time", f"{found['processor_s']} s"],
        ["time", f"{found['wall_s']} s"],
        ["peak memory", f"{found['peak_memory_mb']:,} MB"],
        ["size", f"{found['report_mb']} MB"],
    ]
    for key, words in TIMES.items():
        slowest = max(taken, key=lambda name: taken[name][key])
        rows.append([f"slowest of {len(taken)} interactions ({slowest}), {words}", f"{taken[slowest][key]} ms"])
    command = f"python benchmarks/performance/report.py --steps {steps} --rollouts {rollouts}"
    machine = f"{os.cpu_count()} cores shared with other work (load {os.getloadavg()[0]:.0f})"
    columns = ["of the report", "measured"]
    return measurement(
        "report", found["wall_s"], "seconds", columns=columns, rows=rows, command=command, machine=machine
    )


if __name__ == "__main__":
    main()
