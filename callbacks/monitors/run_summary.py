"""Summary table at the end of a run."""

from __future__ import annotations

import math
import time
from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from rich.console import Console
from rich.table import Table

from lit_async_rl.callbacks.monitors.bottleneck_verdict import BottleneckVerdict
from lit_async_rl.callbacks.monitors.dropped_work import dropped_row
from lit_async_rl.callbacks.monitors.fresh_data import FreshDataMonitor
from lit_async_rl.callbacks.monitors.reward_hacking import RewardHackingMonitor
from lit_async_rl.callbacks.monitors.step_monitor import StalenessMonitor, ThroughputMonitor
from lit_async_rl.callbacks.parts import callbacks_of, run_folder
from lit_async_rl.callbacks.run.save_on_sigterm import SaveOnSigterm
from lit_async_rl.data.module import RolloutDataModule
from lit_async_rl.rollouts.totals import ProducerStats
from lit_async_rl.scheduling.bottleneck import MIN_SHARE, Verdict
from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer
from lit_async_rl.utils.saving import what_is_saved

WIDEST = 100  # columns of the table
NARROWEST = 19  # columns of its labels, of which "metrics and samples" is the longest that is never wrapped
BORDERS = 7


class RunSummary(pl.Callback):
    """Collects the rows of `table`: accuracy before and after, steps, time, staleness, wait and idle shares, drops.

    Of the last fit, if a Trainer or this callback fits several times.
    """

    def __init__(self) -> None:
        self.accuracy: list[float] = []  # of each validation since the last one before the fit
        self.losses: list[float] = []  # of held-out records, likewise
        self._num_before = 0  # of `accuracy`, those of an earlier fit
        self._measured_at = 0  # step of the last one
        self._resumed = ""  # step and checkpoint that the fit began with
        self._first_dropped: dict[str, int] = {}  # updates that were dropped before it, by what dropped them
        self._folder: Path | None = None
        self._reset()

    def _reset(self) -> None:
        self.stats: ProducerStats | None = None
        self.wall_s = 0.0
        self.num_steps = 0
        self._began: float | None = None  # None outside of training
        self._is_replay = False
        self._restarts = ""  # number and last error

    def on_validation_end(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        if "val/pass@1" in trainer.callback_metrics:
            self.accuracy.append(float(trainer.callback_metrics["val/pass@1"]))
        if "val/loss" in trainer.callback_metrics:
            self.losses.append(float(trainer.callback_metrics["val/loss"]))
        self._measured_at = trainer.global_step

    def on_fit_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        """Forgets an earlier fit, but keeps a validation since: the accuracy before this one."""
        self.accuracy, self.losses = (one[self._num_before :][-1:] for one in (self.accuracy, self.losses))
        self._num_before = 0
        self._reset()

    def on_train_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        self._began = time.monotonic()
        self.num_steps = -trainer.global_step
        self._resumed = f"step {trainer.global_step} of {trainer.ckpt_path}" if trainer.ckpt_path else ""
        self._first_dropped = _dropped_updates(trainer)
        self._folder = run_folder(trainer)  # a collective: asked for on all ranks

    def on_train_end(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        """Reads clock and statistics before the engine is closed."""
        if self._began is None:  # without `on_train_start` there is nothing to summarize
            return
        self.wall_s = time.monotonic() - self._began
        self._began = None
        self._num_before = max(len(self.accuracy), len(self.losses))
        self.num_steps += trainer.global_step
        data = trainer.datamodule  # type: ignore[attr-defined]
        if isinstance(data, RolloutDataModule):
            self.stats = data.stats()
            self._is_replay = data.tape is not None
            self._restarts = data.engine_restarts
        for judge in callbacks_of(trainer, BottleneckVerdict):
            self.stats = judge.stats or self.stats  # those of the report: the engine has gone on since

    def on_exception(self, trainer: AnyTrainer, pl_module: AnyModule, exception: BaseException) -> None:
        """Ends the run after SIGTERM or Ctrl-C, like `on_train_end`."""
        if isinstance(exception, SIGTERMException):
            self.on_train_end(trainer, pl_module)

    def table(self, trainer: AnyTrainer) -> Table:
        """Summary of the run as a table."""
        table = Table(show_header=False, title="run summary")
        if self._resumed:
            table.add_row("resumed", self._resumed)
        is_of_the_end = self._measured_at == trainer.global_step  # SIGTERM leaves no time to measure again
        when = "after" if is_of_the_end else f"at step {self._measured_at}"
        for what, values in (("accuracy", self.accuracy), ("loss", self.losses)):
            if len(values) > 1:
                table.add_row(f"held-out {what} before, {when}", f"{values[0]:.3f}, {values[-1]:.3f}")
        table.add_row("optimizer steps", str(self.num_steps) if self.num_steps else _why_no_step(trainer))
        for cause, total in _dropped_updates(trainer).items():
            if number := total - self._first_dropped.get(cause, 0):
                share = "all" if number >= self.num_steps else f"{number}"
                table.add_row("updates dropped", f"{share} of {self.num_steps}, by {cause}")
        table.add_row("wall time", f"{self.wall_s:.1f} s")
        for staleness in callbacks_of(trainer, StalenessMonitor) if self.num_steps else ():
            mean = float(staleness.run_mean.compute())
            most = float(staleness.run_max.compute())
            if not math.isnan(mean):  # some token was trained on
                table.add_row("staleness mean, max", f"{mean:.2f}, {most:.0f} versions")
        for throughput in callbacks_of(trainer, ThroughputMonitor):
            if (computed := throughput.computed_share()) is not None:
                table.add_row("tokens computed", f"{computed:.0%} of those of separate rows")
        if self.stats is not None:
            waited = f"{self.stats.wait_s / self.stats.run_s:.0%} of the time"
            table.add_row("trainer waited", f"{waited}, for the tape" if self._is_replay else waited)
            if not self._is_replay:
                idle = max(0.0, 1 - self.stats.engine_busy_s / self.stats.run_s)
                table.add_row("engine idle", f"{idle:.0%} of the time")
            table.add_row("tokens replayed" if self._is_replay else "tokens generated", f"{self.stats.num_tokens:,}")
            if not self._is_replay and (dropped := dropped_row(self.stats)):
                table.add_row("sampled tokens dropped", dropped)
        if self._restarts:
            table.add_row("engine restarts", self._restarts)
        for fresh in callbacks_of(trainer, FreshDataMonitor):
            if fresh.broken:
                table.add_row("fresh data", f"engine and trainer disagree: {fresh.broken}")
        for hacking in callbacks_of(trainer, RewardHackingMonitor):
            if hacking.begun:
                names = [f"{name} (step {step})" for name, step in hacking.begun.items() if name not in hacking.signs]
                ended = [f"ended: {', '.join(names)}"] if names else []
                table.add_row("signs of reward hacking", "; ".join([*hacking.signs.values(), *ended]))
        for judge in callbacks_of(trainer, BottleneckVerdict):
            if judge.collapse is not None:
                table.add_row("training is collapsing", judge.collapse)
            elif judge.verdict is not None:
                table.add_row("bottleneck", _bottleneck(judge.verdict))
            elif judge.is_early:
                table.add_row("bottleneck", "not named: too few steps")
        if self._folder is not None:
            table.add_row("metrics and samples", str(self._folder))
        table.add_row("checkpoint", _checkpoint(trainer, has_trained=self.num_steps > 0) or "none was saved")
        return table

    def print(self, trainer: AnyTrainer) -> None:
        """Prints the table, on rank 0."""
        table = self.table(trainer)  # a collective: monitors add up over ranks
        if trainer.is_global_zero:
            console = Console()
            if console.is_terminal:
                width = min(WIDEST, console.width)
                Console(width=width).print(fitted(table, width))
            else:
                Console(width=WIDEST).print(table)


def _why_no_step(trainer: AnyTrainer) -> str:
    """0, and the setting that allows no step, if it is known."""
    if 0 <= trainer.max_steps <= trainer.global_step:
        return f"0: step {trainer.global_step} of trainer.max_steps={trainer.max_steps} was reached before"
    if trainer.limit_train_batches == 0:
        return "0: trainer.limit_train_batches=0"
    return "0"


def fitted(table: Table, width: int) -> Table:
    """The table within these columns: its labels wrap before a path in a value does."""
    labels, values = table.columns
    room = width - BORDERS - max(map(len, map(str, values.cells)), default=0)
    longest = max(map(len, map(str, labels.cells)), default=0)
    labels.width = max(min(longest, NARROWEST), min(longest, room))
    values.overflow = "fold"
    return table


def _bottleneck(verdict: Verdict) -> str:
    if not verdict.is_worth_it:
        return f"none: less than {MIN_SHARE:.0%} of the time to gain"
    return f"{verdict.side}: {verdict.share_won:.0%} of the time to gain"


def _dropped_updates(trainer: AnyTrainer) -> dict[str, int]:
    """Updates that callbacks have dropped so far, because a gradient was not finite or did not align."""
    found = {}
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        number = getattr(getattr(callback, "dropped", None), "total", getattr(callback, "num_dropped", 0))
        if isinstance(number, int) and number:
            found[type(callback).__name__] = number
    return found


def _checkpoint(trainer: AnyTrainer, has_trained: bool) -> str:
    """The checkpoint of the run's end; its step where that is another one, and what a full disk did not take.

    Empty if there is none.
    """
    if getattr(trainer.strategy.checkpoint_io, "disk_is_full", False):
        return f"NOT SAVED, the disk is full. {what_is_saved(trainer)}"
    saved = trainer.checkpoint_callback
    path = (saved.last_model_path or saved.best_model_path) if isinstance(saved, ModelCheckpoint) else ""
    for saver in callbacks_of(trainer, SaveOnSigterm):
        path = saver.path or path
    newest = getattr(trainer.strategy.checkpoint_io, "newest", None)
    if path and "://" not in path and not Path(path).exists():
        if not has_trained:  # restored from the checkpoint of an earlier run, whose folder may have been moved
            return ""
        return f"MISSING: {path} was saved, and is not there any more"
    if path and newest is not None and newest.step != trainer.global_step:
        return f"{path} of step {newest.step}"
    return path
