"""Cost of the timeline in processor time, as a share of a step of the quick start.

Measured in two ways. Directly: processor time inside of its own code (hooks, `Lane.add`, the thread that
writes), less what reading the clock takes; the median of three runs. And in one run that records every other stretch of
steps: processor time of all threads, median over pairs of neighbouring stretches with a bootstrap interval. (Whole runs
with and without it differ by more than it costs, although they do the same work to the bit: -0.4 to +6.0 % in 8 pairs.)

    python benchmarks/performance/timeline.py --pairs 600 --output docs/measurements/timeline.json
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import lightning.pytorch as pl

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common.measurement import measurement, write_measurement
from benchmarks.common.meter import Meter, ProcessorClock
from lit_async_rl.callbacks import Timeline
from lit_async_rl.cli.app import AsyncRLCLI
from lit_async_rl.runtime.spans import Lane, SpanRecorder, TraceWriter

Watch = TypeVar("Watch", bound=pl.Callback)
WARM_UP = 5  # steps, runs
HOOKS = ("on_train_batch_start", "on_before_optimizer_step", "on_train_batch_end")
OWN = (
    *((Timeline, hook) for hook in HOOKS),
    *((Lane, "add"), (TraceWriter, "_write"), (SpanRecorder, "take")),
)


class Alternation(pl.Callback):
    """Records every other stretch of steps, in pairs of random order, and takes the processor time of each stretch.

    Attributes:
        shares: what recording adds, one number a pair.
    """

    def __init__(self, timeline: Any, stretch: int) -> None:
        self.shares: list[float] = []
        self._timeline = timeline
        self._stretch = stretch
        self._order = random.Random(0)
        self._seconds: dict[bool, float] = {}
        self._began = 0.0
        self._lane: Any = None

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Ends a stretch; what it recorded is written in its own time."""
        step = trainer.global_step - WARM_UP
        if step < 0 or step % self._stretch:
            return
        if step > 0:
            self._end_stretch()
        if len(self._seconds) in (0, 2):
            self._seconds = {}
            self._switch(self._order.random() < 0.5)
        else:
            self._switch(not self._timeline._recorder.is_on)
        self._began = time.process_time()

    def _end_stretch(self) -> None:
        spans = self._timeline._recorder
        if spans.is_on:
            self._timeline._writer._write(spans.take(include_open=True))
        self._seconds[spans.is_on] = time.process_time() - self._began
        if len(self._seconds) == 2:
            self.shares.append(self._seconds[True] / self._seconds[False] - 1)

    def _switch(self, is_on: bool) -> None:
        self._lane = self._lane or self._timeline._lane
        self._timeline._lane = self._lane if is_on else None
        self._timeline._recorder.record(is_on)


def made(steps: int, folder: str) -> AsyncRLCLI:
    """The quick start without validation; data of exactly one version before makes its work always the same."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)  # Lightning writes notices that would hide the table
    flags = ["--config", "configs/quickstart.yaml", "--data.admission", "FixedLag", "--data.max_staleness", "1"]
    flags += ["--trainer.max_steps", str(steps + WARM_UP), "--trainer.logger.init_args.save_dir", folder]
    flags += ["--data.validation.prompts", "null", "--trainer.val_check_interval", "null"]
    return AsyncRLCLI([*flags, "--trainer.enable_progress_bar", "false"])


def callbacks_of(cli: AsyncRLCLI) -> list[pl.Callback]:
    """Callbacks of the trainer, which Lightning sets without declaring them."""
    callbacks: list[pl.Callback] = vars(cli.trainer)["callbacks"]
    return callbacks


def one_run(steps: int, watching: Callable[[AsyncRLCLI], Watch]) -> Watch:
    """A run with a callback that is made for it."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        cli = made(steps, folder)
        callback = watching(cli)
        callbacks_of(cli).append(callback)
        cli.trainer.fit(cli.model, cli.datamodule)
    return callback


def alternating(pairs: int, stretch: int) -> list[float]:
    """Shares by which recording lengthens a step, one number a pair of stretches."""

    def watch(cli: AsyncRLCLI) -> Alternation:
        timeline = next(one for one in callbacks_of(cli) if isinstance(one, Timeline))
        return Alternation(timeline, stretch)

    return one_run(2 * pairs * stretch, watch).shares


def direct_share(steps: int) -> float:
    """Processor time of the timeline's own code as a share of that of a step; prints what it consists of."""
    meter = Meter()
    with contextlib.ExitStack() as stack:
        for owner, name in OWN:
            stack.enter_context(meter.over(owner, name))
        total_s = one_run(steps, lambda _: ProcessorClock(meter, WARM_UP)).seconds
    for name, spent in meter.spent.items():
        each = 1e6 * sum(spent) / len(spent)
        calls = len(spent) / steps
        print(f"{name}: {sum(spent) / total_s:.3%} of a step, {calls:.1f} calls of {each:.1f} us", flush=True)
    return sum(map(sum, meter.spent.values())) / total_s


def interval(shares: list[float], rounds: int = 2000) -> list[float]:
    """95 % bootstrap interval of the median."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(shares, k=len(shares))) for _ in range(rounds))
    return [medians[int(0.025 * rounds)], medians[int(0.975 * rounds)]]


def main() -> None:
    """Command line; `--output` also writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="measurement for the documentation, as JSON")
    parser.add_argument("--pairs", type=int, default=600)
    parser.add_argument("--stretch", type=int, default=4, help="steps")
    parser.add_argument("--steps", type=int, default=25, help="of each run in which the timeline's code is measured")
    parser.add_argument("--runs", type=int, default=3, help="in which the timeline's code is measured")
    args = parser.parse_args()
    one_run(2, lambda _: pl.Callback())  # what is loaded once
    shares = alternating(args.pairs, args.stretch)
    direct = [direct_share(args.steps) for _ in range(args.runs)]
    low, high = interval(shares)
    print(f"in the timeline's code {', '.join(f'{share:.3%}' for share in sorted(direct))} of a step")
    print(f"median of pairs {statistics.median(shares):+.2%}, 95 % interval {low:+.2%} .. {high:+.2%}")
    if args.output is not None:
        write_measurement(args.output, summary(direct, shares, args.pairs))


def summary(direct: list[float], shares: list[float], pairs: int) -> dict[str, Any]:
    """Summary for docs/measurements."""
    value = round(100 * statistics.median(direct), 2)
    unit = "% of a step's processor time, in the timeline's own code"
    (low, high) = interval(shares)
    median = 100 * statistics.median(shares)
    rows = [
        [f"in the timeline's own code, median of {len(direct)} runs", f"{value} %"],
        ["in the timeline's own code, lowest and highest", f"{min(direct):.2%}, {max(direct):.2%}".replace("%", " %")],
        [f"stretches of steps with it against those without, median of {pairs} pairs", f"{median:+.2f} %"],
        ["the same, 95 % interval", f"{100 * low:+.2f} to {100 * high:+.2f} %"],
    ]
    command = f"python benchmarks/performance/timeline.py --pairs {pairs}"
    machine = f"{os.cpu_count()} cores shared with other work (load {os.getloadavg()[0]:.0f})"
    columns = ["of a step's processor time", "measured"]
    return measurement("timeline", value, unit, columns=columns, rows=rows, command=command, machine=machine)


if __name__ == "__main__":
    main()
