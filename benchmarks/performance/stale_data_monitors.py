"""Processor time of what watches stale data, as a share of a step of the quick start.

    python benchmarks/performance/stale_data_monitors.py --output docs/measurements/stale_data_monitors.json

Measured inside of its own code, less what reading the clock takes, over the processor time of the whole process in the
same steps: the split of log-ratios (a part of `FreshDataMonitor`), the steady staleness and the words of the verdict,
which every run has, and `WeightDriftMonitor`, which is added here. Steps before the first five count in neither.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common.measurement import measurement, write_measurement
from benchmarks.common.meter import Meter, ProcessorClock
from lit_async_rl.callbacks import WeightDriftMonitor
from lit_async_rl.callbacks.monitors import fresh_data
from lit_async_rl.callbacks.monitors.bottleneck_verdict import StalenessAdvice
from lit_async_rl.callbacks.monitors.ratio_parts import RatioSplit
from lit_async_rl.callbacks.monitors.stale_data import StaleDataWords
from lit_async_rl.cli.app import AsyncRLCLI
from lit_async_rl.scheduling.bottleneck import StepWork

WARM_UP = 5  # steps
SPLIT = ((fresh_data, "stale_sums"), (RatioSplit, "update"))
STEADY = ((StaleDataWords, "observe"), (StalenessAdvice, "work"), (StepWork, "steady_staleness"))
DRIFT = ((WeightDriftMonitor, "on_before_backward"), (WeightDriftMonitor, "on_before_optimizer_step"))
PARTS = {
    "log-ratio in two parts": SPLIT,
    "steady staleness, words of the verdict": STEADY,
    "`WeightDriftMonitor`, if it is added": DRIFT,
}


def run(seed: int, steps: int) -> dict[str, float]:
    """Seconds a step of each part, and of the process."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    meter = Meter()
    clock = ProcessorClock(meter, WARM_UP)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        flags = ["--config", "configs/quickstart.yaml", "--seed_everything", str(seed)]
        flags += ["--trainer.max_steps", str(steps + WARM_UP), "--trainer.logger.init_args.save_dir", folder]
        flags += ["--data.validation.prompts", "null", "--trainer.val_check_interval", "null"]
        flags += ["--trainer.callbacks+", "WeightDriftMonitor", "--trainer.enable_progress_bar", "false"]
        cli = AsyncRLCLI(flags)
        vars(cli.trainer)["callbacks"].append(clock)
        with contextlib.ExitStack() as stack:
            for owner, name in (pair for part in PARTS.values() for pair in part):
                stack.enter_context(meter.over(owner, name))
            cli.trainer.fit(cli.model, cli.datamodule)
    spent = {
        part: sum(sum(meter.spent[f"{owner.__name__}.{name}"]) for owner, name in pairs) / steps
        for part, pairs in PARTS.items()
    }
    return spent | {"step": clock.seconds / steps}


def main() -> None:
    """Command line; `--output` also writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="measurement for the documentation, as JSON")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    runs = [run(seed, args.steps) for seed in args.seeds]
    shares = {part: [one[part] / one["step"] for one in runs] for part in PARTS}
    shares["together"] = [sum(shares[part][n] for part in PARTS) for n in range(len(runs))]
    rows = []
    for part, found in shares.items():
        spread = f"{min(found):.2%} to {max(found):.2%}"
        each = "" if part not in PARTS else f"{1e3 * statistics.fmean(one[part] for one in runs):.2f} ms"
        rows.append([part, each, f"{statistics.fmean(found):.2%}", spread])
        print(*rows[-1], flush=True)
    if args.output is None:
        return
    together = shares["together"]
    seeds = " ".join(map(str, args.seeds))
    found = measurement(
        args.output.stem,
        round(100 * statistics.fmean(together), 2),
        "% of a step's processor time",
        columns=["what", "a step", "share of a step", "lowest and highest of the runs"],
        rows=rows,
        command=f"python benchmarks/performance/stale_data_monitors.py --steps {args.steps} --seeds {seeds}",
        machine=f"{os.cpu_count()} cores shared with other work (load {os.getloadavg()[0]:.0f}); processor time",
    )
    write_measurement(args.output, found)


if __name__ == "__main__":
    main()
