"""Cost of the timeline: processor time of a training step with and without it, in alternating runs of the quick start.

Both runs of a pair do the same work to the bit (`FixedLag`), and what is measured is processor time of all threads. The
share is the median over pairs, with a bootstrap interval. Runs differ by more than the timeline costs, so that time is
also measured directly: processor time inside of its hooks, of `Lane.add` and of the thread that writes, as a share of
the step.

    python benchmarks/performance/timeline.py --output timeline.json
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from lit_async_rl.callbacks import Timeline
from lit_async_rl.cli.app import AsyncRLCLI
from lit_async_rl.utils.spans import Lane, Spans
from lit_async_rl.utils.trace_file import TraceWriter

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
    # Lightning writes notices that would hide the table
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        flags = ["--config", "configs/quickstart.yaml", "--data.admission", "FixedLag", "--data.max_staleness", "1"]
        flags += ["--trainer.max_steps", str(steps + WARM_UP), "--trainer.logger.init_args.save_dir", folder]
        flags += ["--data.validation.prompts", "null", "--trainer.val_check_interval", "null"]
        flags += ["--trainer.enable_progress_bar", "false"] + ([] if has_timeline else ["--defaults.timeline", "null"])
        cli = AsyncRLCLI(flags)
        cli.trainer.callbacks.append(clock)
        cli.trainer.fit(cli.model, cli.datamodule)
    return clock.seconds / steps


@contextlib.contextmanager
def counted(owner: Any, name: str, spent: list[float]) -> Iterator[None]:
    """Context in which the processor time inside of a method is added to `spent`."""
    method = getattr(owner, name)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        began = time.thread_time()
        try:
            return method(*args, **kwargs)
        finally:
            spent.append(time.thread_time() - began)

    setattr(owner, name, wrapper)
    try:
        yield
    finally:
        setattr(owner, name, method)


def direct_share(steps: int) -> float:
    """Processor time of the timeline's own code as a share of that of a step."""
    spent: list[float] = []
    hooks = ("on_train_batch_start", "on_before_optimizer_step", "on_train_batch_end")
    with contextlib.ExitStack() as stack:
        for owner, name in [*((Timeline, hook) for hook in hooks), (TraceWriter, "_write"), (Spans, "take")]:
            stack.enter_context(counted(owner, name, spent))
        before = one_run(steps, True)
        in_hooks = sum(spent)
    spent.clear()
    with counted(Lane, "add", spent):
        one_run(steps, True)
    return (in_hooks + sum(spent)) / (steps + WARM_UP) / before


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
    direct = statistics.median(direct_share(args.steps) for _ in range(3))
    found = {"direct": direct, "median": statistics.median(shares), "interval": interval(shares), "shares": shares}
    print(f"in the timeline's code {direct:.3%} of a step")
    print(f"median {found['median']:+.2%}, 95 % interval {found['interval'][0]:+.2%} .. {found['interval'][1]:+.2%}")
    if args.output is not None:
        args.output.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
