"""Live view of an asynchronous run in a terminal."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from rich.console import Console, ConsoleOptions, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from torch.optim import Optimizer

from lit_async_rl.callbacks.monitors.bottleneck_verdict import BottleneckVerdict
from lit_async_rl.callbacks.parts import callbacks_of
from lit_async_rl.callbacks.run.progress import (
    REFRESH_HZ,
    Display,
    LogsAbove,
    OneAtATime,
    Progress,
    lines_that_fit,
    step_of,
)
from lit_async_rl.data.module import RolloutDataModule
from lit_async_rl.rollouts.totals import ProducerStats
from lit_async_rl.runtime.waiting import Repeating
from lit_async_rl.types import RolloutBatch
from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer

WINDOW_S = 10.0  # of the shares of time
MAX_STALENESS_ROWS = 6
WIDTH = 30
WAITS = "waits for rollouts"
TRAINS = "forward and backward"
OPTIMIZES = "optimizer, publication"
VALIDATES = "validation"
SAVES = "saves a checkpoint"


class LiveView(Progress):
    """Draws the state of the run, in a terminal; one of the default callbacks.

    Phase of the trainer, shares of the last ten seconds in which trainer and engine worked, queue of groups, samples in
    the engine, histogram of the staleness of the last step, metrics, and the last verdict of `BottleneckVerdict`. It
    fits into the terminal, and at the end a line takes its place. Elsewhere it does what `Progress` does: lines in a
    pipe or file, a bar in a notebook. `--defaults.progress Progress` draws a bar in terminals, too.

    Args:
        every_s: seconds between two lines, where the output is no terminal.
    """

    def __init__(self, every_s: float = 10.0) -> None:
        super().__init__(every_s)
        self.phase = WAITS
        self.staleness: dict[int, int] = {}  # versions -> tokens of the last step
        self._tokens: dict[int, int] = {}  # of the step so far
        self._version = 0
        self._history: deque[tuple[float, ProducerStats]] = deque()
        self._rows: tuple[tuple[str, str], ...] = ()  # of engine and groups, as they were last gathered
        self.items_of_step: tuple[str, ...] = ()  # of the last step, written by the trainer's thread

    def make_display(self, trainer: AnyTrainer) -> Display:
        """The view, if the output is a terminal that can draw it and training begins."""
        console = OneAtATime()
        can_draw = console.is_terminal and not console.is_dumb_terminal and not console.is_jupyter
        draws = can_draw and trainer.state.fn == "fit" and isinstance(trainer.datamodule, RolloutDataModule)
        return _View(self, console) if draws else super().make_display(trainer)

    def on_train_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        self.items_of_step = ()
        self.phase = WAITS
        self._history.clear()
        self._rows = ()
        super().on_train_start(trainer, pl_module)

    def on_train_batch_start(self, trainer: AnyTrainer, pl_module: AnyModule, batch: Any, batch_idx: int) -> None:
        self.phase = TRAINS
        self._version = int(getattr(pl_module, "version", 0))
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx=batch_idx)

    def on_before_optimizer_step(self, trainer: AnyTrainer, pl_module: AnyModule, optimizer: Optimizer) -> None:
        self.phase = OPTIMIZES

    def on_train_batch_end(
        self, trainer: AnyTrainer, pl_module: AnyModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if isinstance(batch, RolloutBatch):  # another module's batches have no versions
            ages, counts = torch.unique(self._version - batch.versions[batch.loss_mask], return_counts=True)
            for age, count in zip(ages.tolist(), counts.tolist(), strict=True):
                self._tokens[age] = self._tokens.get(age, 0) + count
        if trainer.global_step > self.num_steps:
            self.staleness = self._tokens
            self._tokens = {}
        super().on_train_batch_end(trainer, pl_module, outputs, batch=batch, batch_idx=batch_idx)
        self.phase = WAITS

    def on_save_checkpoint(self, trainer: AnyTrainer, pl_module: AnyModule, checkpoint: dict[str, Any]) -> None:
        self.phase = SAVES

    def on_validation_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        super().on_validation_start(trainer, pl_module)
        self.phase = VALIDATES

    def on_validation_end(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        super().on_validation_end(trainer, pl_module)
        self.phase = WAITS

    # -- the drawing's thread, and any that prints above it -----------------------------------------------------------
    # They read what another has put down whole, and nothing of the Trainer that changes: `callback_metrics` computes
    # metrics, and iterates over what the next step adds to. And they hold the terminal's lock, for which a log line
    # waits: were they to wait for producer or engine, a thread that logs while it holds one of these would end neither.

    def gather(self) -> None:
        """Puts down what the next drawings show of producer and engine; may wait for them."""
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        stats = data.stats()
        if stats is None:
            self._rows = (("engine", "starts"),)
            return
        now = time.monotonic()
        self._history.append((now, stats))
        while now - self._history[0][0] > WINDOW_S and len(self._history) > 2:
            self._history.popleft()
        began, before = self._history[0]
        wall_s = max(1e-3, now - began)
        running = data.engine.num_running
        samples = "" if running is None else f", {running} samples in the engine"
        self._rows = (
            ("trainer waits", _share((stats.wait_s - before.wait_s) / wall_s)),
            ("engine is busy", _share((stats.engine_busy_s - before.engine_busy_s) / wall_s)),
            ("groups", f"{stats.num_unfinished} in work, {stats.num_queued} ready{samples}"),
        )

    def __rich__(self) -> RenderableType:
        """The view as it is now."""
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold", no_wrap=True)
        table.add_column(ratio=1)
        share = math.nan if math.isinf(self.max_steps) else self.num_steps / self.max_steps
        table.add_row(step_of(self.num_steps, self.max_steps), _share(share))
        table.add_row("trainer", self.phase)
        for name, value in self._rows:
            table.add_row(name, value)
        staleness = self.staleness  # the next step puts another dictionary in its place
        for age in sorted(staleness)[:MAX_STALENESS_ROWS]:
            share = staleness[age] / sum(staleness.values())
            name = "staleness " if age == min(staleness) else ""
            table.add_row(f"{name}{age:>3}", _share(share))
        if items := self.items_of_step:
            table.add_row("metrics", _Items(items))
        for judge in callbacks_of(self.trainer, BottleneckVerdict)[:1]:
            table.add_row("verdict", Text(judge.words or f"after {judge.every_n_steps} steps"))
        return Panel(table, title="lit-async-rl", border_style="dim")


class _Items:
    """Items two spaces apart, as many in a line as fit."""

    def __init__(self, items: Sequence[str]) -> None:
        self.items = items

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        yield from map(Text, lines_that_fit(self.items, options.max_width))


class _View(Display):
    """Draws a `LiveView` several times a second, in a thread."""

    def __init__(self, view: LiveView, console: OneAtATime) -> None:
        live = Live(view, console=console, auto_refresh=False, vertical_overflow="crop", transient=True)
        console.lock = live._lock
        self._view = view
        self._live = live
        self._last: list[str] = []
        live.start()
        self._logs = LogsAbove()
        self._drawing = Repeating(self._draw, every_s=1.0 / REFRESH_HZ, name="live view")

    def _draw(self) -> None:
        self._view.gather()
        with self._live.console:  # closed between these two lines, it draws no more
            if self._live.is_started:
                self._live.refresh()

    def step(self, number: int, total: float, items: Sequence[str]) -> None:
        """Shows the step in the next drawing, and keeps its line for the end."""
        self._view.items_of_step = tuple(items)
        self._last = [step_of(number, total), *items]

    def print(self, *text: Any) -> None:
        self._live.console.print(*text, markup=False, highlight=False)

    def end(self) -> None:
        """Prints the line of the last step, which stays."""
        if self._last:
            self.print("\n".join(lines_that_fit(self._last, self._live.console.width)))
            self._last = []

    def close(self) -> None:
        self.end()
        self._drawing.stop()
        self._logs.close()
        self._live.stop()


def _share(value: float) -> str:
    """A bar that needs no colours, and the number; empty for NaN."""
    if math.isnan(value):
        return ""
    value = min(1.0, max(0.0, value))
    full = round(value * WIDTH)
    return f"{'█' * full}{'░' * (WIDTH - full)} {value:4.0%}"
