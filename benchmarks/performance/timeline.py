"""Cost of the timeline: processor time of a training step with and without it, in alternating runs of the quick start.

Both runs of a pair do the same work to the bit (`FixedLag`), and what is measured is processor time of all threads, so
that a loaded machine changes little. The share is the median over pairs, with a bootstrap interval.

    python benchmarks/performance/timeline.py --output timeline.json
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from lit_async_rl.cli.app import AsyncRLCLI

WARM_UP = 5  # steps


class Clock(pl.Callback):
    """Processor time of the steps after the first ones."""

    began = seconds = 0.0

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Starts behind the warm-up; the last call counts."""
        if trainer.global_step == WARM_UP:
            self.began = time.process_time()
        self.seconds = time.process_time() - self.began


def one_run(steps: int, has_timeline: bool) -> float:
    """Seconds of processor time of a step."""
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        flags = ["--config", "configs/quickstart.yaml", "--data.admission", "FixedLag", "--data.max_staleness", "1"]
        flags += ["--trainer.max_steps", str(steps + WARM_UP), "--trainer.logger.init_args.save_dir", folder]
        flags += ["--data.validation.prompts", "null", "--trainer.val_check_interval", "null"]
        flags += ["--trainer.enable_progress_bar", "false"] + ([] if has_timeline else ["--defaults.timeline", "null"])
        cli = AsyncRLCLI(flags)
        cli.trainer.callbacks.append(clock)
        cli.trainer.fit(cli.model, cli.datamodule)
    return clock.seconds / steps


def interval(shares: list[float], rounds: int = 2000) -> list[float]:
    """95 % bootstrap interval of the median."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(shares, k=len(shares))) for _ in range(rounds))
    return [medians[int(0.025 * rounds)], medians[int(0.975 * rounds)]]


def main() -> None:
    """Command line; `--output` also writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--steps", type=int, default=25)
    args = parser.parse_args()
    one_run(2, True)  # what is loaded once
    shares = []
    for number in range(args.pairs):
        order = [True, False] if number % 2 else [False, True]
        seconds = {has: one_run(args.steps, has) for has in order}
        shares.append(seconds[True] / seconds[False] - 1)
        print(f"{seconds[False]:.4f} s a step, with the timeline {shares[-1]:+.2%}", flush=True)
    found = {"median": statistics.median(shares), "interval": interval(shares), "shares": shares}
    print(f"median {found['median']:+.2%}, 95 % interval {found['interval'][0]:+.2%} .. {found['interval'][1]:+.2%}")
    if args.output is not None:
        args.output.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
