"""Progress of a run: bars in a terminal, few short lines elsewhere."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import math
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from lightning.pytorch.callbacks import ProgressBar
from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as RichBars
from rich.table import Column
from rich.text import Text

from lit_async_rl.callbacks.parts import signs_of, stats_of
from lit_async_rl.runtime.waiting import announced, duration
from lit_async_rl.utils.checks import check_range
from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer

NAMES = {
    "reward/mean": ("reward", "{:.2f}"),
    "train/loss": ("loss", "{:.3f}"),
    "val/loss": ("held-out loss", "{:.3f}"),
    "val/pass@1": ("held-out", "{:.2f}"),
    "sample/staleness_mean": ("staleness", "{:.2f}"),
    "perf/tokens_per_s": ("tokens/s", "{:,.0f}"),
}
LEAST_DROPPED = 0.01  # share of the sampled tokens from which it is shown
SHARE = 0.02  # of the time so far: a run that takes days needs no line every ten seconds
REFRESH_HZ = 4.0
STEP_COLUMNS = len("step 10000/10000")
BAR_COLUMNS = 10


class Display:
    """Draws the progress of one fit or validation."""

    def step(self, number: int, total: float, items: Sequence[str]) -> None:
        """`number` of `total` optimizer steps are done; `items` are metrics, then the time left."""

    def end(self) -> None:
        """Training is over, and other callbacks are about to report."""

    def validation(self, number: int, total: float) -> None:
        """`number` of `total` batches of a validation are done."""

    def print(self, *text: Any) -> None:
        """Prints lines that stay."""

    def close(self) -> None:
        """Leaves the last state on the screen."""


class Lines(Display):
    """One line at the first and the last step, and every `every_s` seconds in between; no control characters."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._began = time.monotonic()
        self._last = -math.inf
        self._unsaid = ""

    def step(self, number: int, total: float, items: Sequence[str]) -> None:
        now = time.monotonic()
        self._unsaid = "  ".join([step_of(number, total), *items])
        if number == total or now - self._last >= max(self._every_s, SHARE * (now - self._began)):
            self._last = now
            self.end()

    def end(self) -> None:
        """Prints the last step, unless that was done: a run may end before `trainer.max_steps`."""
        if self._unsaid:
            self.print(self._unsaid)
            self._unsaid = ""

    def print(self, *text: Any) -> None:
        print(*text, flush=True)

    def close(self) -> None:
        self.end()


class Bars(Display):
    """A bar of the steps, and one of a validation while it lasts."""

    def __init__(self, console: OneAtATime) -> None:
        # in a narrow terminal the last metrics are left out, and nothing is wrapped
        steps = TextColumn("{task.description}", table_column=Column(no_wrap=True, min_width=STEP_COLUMNS))
        text = TextColumn("{task.fields[text]}", table_column=Column(no_wrap=True, overflow="ellipsis"))
        bar = BarColumn(bar_width=BAR_COLUMNS)
        self._bars = RichBars(steps, bar, text, console=console, refresh_per_second=REFRESH_HZ)
        self._steps: Any = None
        self._validation: Any = None
        console.lock = self._bars.live._lock
        self._bars.start()
        self._logs = LogsAbove()

    def step(self, number: int, total: float, items: Sequence[str]) -> None:
        if self._steps is None:
            self._steps = self._bars.add_task("", text="")
        limit = None if math.isinf(total) else total
        name = step_of(number, total)
        room = self._bars.console.width - max(len(name), STEP_COLUMNS) - BAR_COLUMNS - 3
        text = "  ".join(first_that_fit([*items[-1:], *items[:-1]], room))
        self._bars.update(self._steps, completed=number, total=limit, description=name, text=text)

    def validation(self, number: int, total: float) -> None:
        if self._validation is None:
            self._validation = self._bars.add_task("validation", text="", total=total)
        self._bars.update(self._validation, completed=number)
        if number >= total:
            self._bars.remove_task(self._validation)
            self._validation = None

    def print(self, *text: Any) -> None:
        self._bars.console.print(*text, markup=False, highlight=False)

    def close(self) -> None:
        self._logs.close()
        self._bars.stop()


class OneAtATime(Console):
    """A console that serialises output of threads, from cursor movement to the last character.

    rich looks where its drawing stands, lets other threads print, and then writes: a line of a drawing that grew
    meanwhile would stay on the screen. Lines break between words only; the terminal wraps a word longer than a line,
    such as a path, so that it can be copied.

    Args:
        settings: of rich's console.

    Attributes:
        lock: held by the drawing while it draws.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.lock = threading.RLock()

    def __enter__(self) -> Console:
        self.lock.acquire()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        try:
            super().__exit__(*error)
        finally:
            self.lock.release()

    def print(self, *objects: Any, **how: Any) -> None:
        how.setdefault("overflow", "ignore")  # rich wraps nothing then
        how.setdefault("crop", False)
        if self.is_terminal:
            objects = tuple(self._at_words(one) if isinstance(one, (str, Text)) else one for one in objects)
        with self.lock:
            super().print(*objects, **how)

    def _at_words(self, text: str | Text) -> Text:
        """Text whose lines end between words; its own lines stay apart."""
        whole = Text(text) if isinstance(text, str) else text
        rows: list[Text] = []
        for line in whole.split("\n", allow_blank=True):
            filled = lines_that_fit(line.plain.split(" "), self.width, gap=" ")
            ends = accumulate(len(row) + 1 for row in filled[:-1])  # and the space behind each
            rows += line.divide(list(ends))
        for row in rows[:-1]:
            row.rstrip()
        return Text("\n").join(rows)


class LogsAbove:
    """Sends terminal output of log handlers through `sys.stderr`, which rich prints above its drawing.

    Handlers keep the stream that they were made with, and would write into the drawing. Made after the drawing begins,
    and closed before it ends.
    """

    def __init__(self) -> None:
        self._changed: list[tuple[logging.StreamHandler[Any], Any]] = []
        named = [logger for logger in logging.root.manager.loggerDict.values() if isinstance(logger, logging.Logger)]
        for handler in {handler for logger in [logging.root, *named] for handler in logger.handlers}:
            if isinstance(handler, logging.StreamHandler) and _is_terminal(handler.stream):
                self._changed.append((handler, handler.setStream(sys.stderr)))

    def close(self) -> None:
        for handler, stream in self._changed:
            if stream is not None:
                handler.setStream(stream)
        self._changed = []


def _is_terminal(stream: Any) -> bool:
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):  # it is no file, or is closed
        return False


def first_that_fit(items: Sequence[str], width: int, gap: str = "  ") -> list[str]:
    """The first items that fit into a line of this width."""
    kept: list[str] = []
    for item in items:
        if len(gap.join([*kept, item])) > width:
            break
        kept.append(item)
    return kept


def lines_that_fit(items: Sequence[str], width: int, gap: str = "  ") -> list[str]:
    """All items, as many in a line as fit; a longer item has a line of its own."""
    lines = []
    left = list(items)
    while left:
        line = first_that_fit(left, width, gap) or left[:1]
        del left[: len(line)]
        lines.append(gap.join(line))
    return lines


class Progress(ProgressBar):
    """Steps done, reward, held-out accuracy, staleness, dropped tokens, tokens per second and the time left.

    In a terminal or a notebook these stand beside a bar. In a file, a pipe or a terminal with `TERM=dumb` they are
    lines: of the first and last step, and every `every_s` seconds, or every 2 % of the time so far if that is longer.

    Args:
        every_s: seconds between two lines.

    Attributes:
        num_steps: optimizer steps done, those before a resume included.

    Raises:
        ValueError: `every_s` is negative.
    """

    def __init__(self, every_s: float = 10.0) -> None:
        super().__init__()
        check_range("Progress", ">= 0", every_s=every_s)
        self.every_s = every_s
        self.num_steps = 0
        self._display: Display | None = None
        self._is_enabled = True
        self._first_step = 0
        self._began = 0.0
        self._patience = contextlib.ExitStack()  # during the first step

    # -- of Lightning -------------------------------------------------------------------------------------------------

    def disable(self) -> None:
        """Shows nothing from now on."""
        self._is_enabled = False

    def enable(self) -> None:
        """Shows the progress again."""
        self._is_enabled = True

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Prints above the bar."""
        if self._is_enabled:
            self._display.print(*args) if self._display is not None else print(*args, **kwargs)

    @property
    def max_steps(self) -> float:
        """Optimizer steps of the run, those before a resume included; infinite without a limit."""
        return float(self.trainer.max_steps) if self.trainer.max_steps > 0 else math.inf

    def make_display(self, trainer: AnyTrainer) -> Display:
        """Bars, if the output is a terminal that can draw them."""
        console = OneAtATime()
        widgets = console.is_jupyter and importlib.util.find_spec("ipywidgets") is not None  # needed by rich
        can_draw = widgets or (console.is_terminal and not console.is_jupyter and not console.is_dumb_terminal)
        return Bars(console) if can_draw else Lines(self.every_s)

    def get_metrics(self, trainer: AnyTrainer, pl_module: AnyModule) -> dict[str, Any]:
        """Metrics that are shown, by their short names."""
        shown: Mapping[str, Any] = trainer.callback_metrics
        return {short: form.format(float(shown[name])) for name, (short, form) in NAMES.items() if name in shown}

    # -- what happens -------------------------------------------------------------------------------------------------

    def _open(self, trainer: AnyTrainer) -> None:
        if self._is_enabled and self._display is None:
            self._display = self.make_display(trainer)

    def _close(self) -> None:
        self._patience.close()
        if self._display is not None:
            self._display.close()
            self._display = None

    def on_train_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        self.num_steps = self._first_step = trainer.global_step
        self._began = time.monotonic()
        self._open(trainer)

    def on_train_batch_start(self, trainer: AnyTrainer, pl_module: AnyModule, batch: Any, batch_idx: int) -> None:
        """The first step may compile, or load libraries of the GPU."""
        if trainer.global_step == self._first_step and self._is_enabled:
            self._patience.enter_context(announced("the first training step: kernels are loaded or compiled"))

    def on_train_batch_end(
        self, trainer: AnyTrainer, pl_module: AnyModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Counts optimizer steps, not micro-batches."""
        self._patience.close()
        if trainer.global_step > self.num_steps:
            self.num_steps = trainer.global_step
            if self._display is not None:
                self._display.step(self.num_steps, self.max_steps, self.items(trainer, pl_module))

    def on_validation_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        self._open(trainer)

    def on_validation_batch_end(
        self, trainer: AnyTrainer, pl_module: AnyModule, outputs: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        if self._display is not None:
            self._display.validation(batch_idx + 1, float(self.total_val_batches_current_dataloader))

    def on_validation_end(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        self.reset_dataloader_idx_tracker()
        if trainer.state.fn != "fit":
            self._close()

    def on_validation_batch_start(
        self, trainer: AnyTrainer, pl_module: AnyModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.has_dataloader_changed(dataloader_idx)
        if self._display is not None:
            self._display.validation(batch_idx, float(self.total_val_batches_current_dataloader))

    def on_train_end(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        """Stays open until `teardown`: other callbacks print, too."""
        self._patience.close()
        if self._display is not None:
            self._display.end()

    def teardown(self, trainer: AnyTrainer, pl_module: AnyModule, stage: str) -> None:
        self._close()

    def on_exception(self, trainer: AnyTrainer, pl_module: AnyModule, exception: BaseException) -> None:
        self._close()

    def items(self, trainer: AnyTrainer, pl_module: AnyModule) -> list[str]:
        """Metrics with their names, the share of sampled tokens dropped, and the time left."""
        seconds = (time.monotonic() - self._began) / max(1, self.num_steps - self._first_step)
        left_s = (self.max_steps - self.num_steps) * seconds
        metrics = [f"{name} {value}" for name, value in self.get_metrics(trainer, pl_module).items()]
        stats = stats_of(trainer)
        dropped = 0.0 if stats is None else sum(stats.dropped_share().values())  # of the tokens of all groups so far
        lost = [f"dropped {dropped:.0%}"] if dropped >= LEAST_DROPPED else []
        left = [] if math.isinf(left_s) or self.num_steps >= self.max_steps else [f"{duration(left_s)} left"]
        hacked = [f"hacking: {', '.join(signs)}"] if (signs := signs_of(trainer)) else []
        return [*metrics, *hacked, *lost, f"{seconds:.2g} s/step", *left]


def step_of(number: int, total: float) -> str:
    """`step 3/200`."""
    return f"step {number}" if math.isinf(total) else f"step {number}/{total:.0f}"
