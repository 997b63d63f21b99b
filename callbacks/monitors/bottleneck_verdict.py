"""Bottleneck report: which side limits throughput, its cost, and the setting to change."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lit_async_rl.callbacks.monitors.bottleneck_settings import StepLoad, stabilizing_setting, what_to_turn
from lit_async_rl.callbacks.monitors.staleness_advice import StalenessAdvice
from lit_async_rl.callbacks.parts import rollout_data, run_folder
from lit_async_rl.callbacks.run.weight_sync import WeightSync
from lit_async_rl.data.module import RolloutDataModule
from lit_async_rl.scheduling.bottleneck import NOTHING, Intervals, Verdict, diagnose
from lit_async_rl.scheduling.worth import Advice
from lit_async_rl.stabilizers.collapse import CollapseTrend
from lit_async_rl.utils.checks import check_range
from lit_async_rl.utils.files import append, tolerate_full_disk
from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer

ESS, REWARD, NO_SIGNAL = "importance/ess_ratio", "reward/mean", "rollout/no_signal_share"
WITHOUT_SIGNAL = 10  # steps in a row from which a run is told that it learns nothing


class BottleneckVerdict(pl.Callback):
    """Prints the verdict of `scheduling.bottleneck` every `every_n_steps` steps, and on the whole run at the end.

    The last one says what asynchrony is worth here, and which staleness bound is enough (`scheduling.worth`). Both
    kinds go to `verdicts.jsonl` in the run's folder, too, with that of the run so far.

    With each verdict it logs `perf/overlap_efficiency`, `perf/trainer_share`, `perf/weight_sync_share`,
    `perf/scoring_share` and `perf/share_to_win`. Validation time is excluded. A replay of a tape has no engine, and
    gets no verdict.

    A run that collapses (`CollapseTrend`, on what `ImportanceMonitor` and `RolloutMonitor` log) is told so, and which
    configuration helps, in place of a verdict on its speed. A run in which all completions of each prompt had equal
    rewards, for ten steps or more, is told that as well: a reward that is always 0, say.

    Args:
        every_n_steps: optimizer steps per window.

    Attributes:
        verdict: the last one.
        collapse: description of an ongoing collapse; None while training is healthy.
        advice: on the staleness bound, at the end of a run; None before, and where there is none.

    Raises:
        ValueError: `every_n_steps` is not positive; when training starts, there is no `RolloutDataModule`.
    """

    def __init__(self, every_n_steps: int = 50) -> None:
        check_range("BottleneckVerdict", "integer >= 1", every_n_steps=every_n_steps)
        self.every_n_steps = every_n_steps
        self.verdict: Verdict | None = None
        self.collapse: str | None = None
        self.advice: Advice | None = None
        self._trend, self._staleness = CollapseTrend(), StalenessAdvice()
        self._left_out = self._validation_began = NOTHING
        self._run: StepLoad | None = None
        self._window = StepLoad()
        self._step = self._without_signal = 0
        self._folder: Path | None = None
        self._run_began_at = self._window_began_at = 0.0  # seconds since 1970, as in the timeline

    def on_train_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        rollout_data(trainer, "BottleneckVerdict")
        self._left_out, self._step, self._run = NOTHING, trainer.global_step, None
        self._trend, self.collapse, self._without_signal = CollapseTrend(), None, 0
        self._staleness, self.advice = StalenessAdvice(), None
        folder = run_folder(trainer)  # a collective: asked for on all ranks
        self._folder = folder if trainer.is_global_zero else None

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Starts the clock at the first rollouts: no setting avoids the initial wait."""
        data = rollout_data(trainer, "BottleneckVerdict")
        if self._run is None and data.tape is None and data.stats() is not None:  # this rank has the producer
            began = self._totals(trainer)
            self._run, self._window = StepLoad(began), StepLoad(began)
            self._run_began_at = self._window_began_at = time.time()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._validation_began = self._totals(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._left_out = self._left_out + (self._totals(trainer) - self._validation_began)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Updates counters after every step, and reports after every window."""
        if self._run is None:
            return
        self._run.add(batch)
        self._window.add(batch)
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        stats = trainer.datamodule.stats()  # type: ignore[attr-defined]
        self._run.look(stats)
        self._window.look(stats)
        self._observe(trainer)
        if self._step % self.every_n_steps:
            return
        self._record(trainer, pl_module, self._judge(trainer, pl_module, self._run), whole_run=True)
        verdict = self._judge(trainer, pl_module, self._window)
        self._record(trainer, pl_module, verdict, whole_run=False)
        self._window, self._window_began_at = StepLoad(self._totals(trainer)), time.time()
        for name, value in _metrics(verdict).items():
            pl_module.log(name, value)
        _print(trainer, f"step {self._step}: {self._words(trainer, pl_module, verdict)}")

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Reports on the whole run."""
        if self._run is not None and self._run.num_steps:
            verdict = self._judge(trainer, pl_module, self._run)
            self._record(trainer, pl_module, verdict, whole_run=True)
            words = self._words(trainer, pl_module, verdict)
            data = rollout_data(trainer, "BottleneckVerdict")
            if self.collapse is None:
                self.advice = self._staleness.advice(data, pl_module, verdict.intervals, self._run)
            advised = {one.name for one in (verdict.setting, verdict.fresher) if one is not None}
            names_bound = "data.max_staleness" not in advised
            advice = "" if self.advice is None else f"; {self.advice.text(names_bound)}"
            _print(trainer, f"whole run: {words}{advice}")
        self._run = None

    def on_exception(self, trainer: AnyTrainer, pl_module: AnyModule, exception: BaseException) -> None:
        """Reports on a run that SIGTERM or Ctrl-C ends, like `on_train_end`."""
        if isinstance(exception, SIGTERMException):
            self.on_train_end(trainer, pl_module)

    def _observe(self, trainer: AnyTrainer) -> None:
        seen = trainer.callback_metrics
        ess = float(seen[ESS]) if ESS in seen else None
        self._staleness.observe(rollout_data(trainer, "BottleneckVerdict"), ess)
        if NO_SIGNAL in seen:
            self._without_signal = self._without_signal + 1 if float(seen[NO_SIGNAL]) == 1 else 0
        if ESS in seen and REWARD in seen:  # monitors that come before this one
            self.collapse = self._trend.observe(float(seen[ESS]), float(seen[REWARD]))

    def _words(self, trainer: AnyTrainer, pl_module: AnyModule, verdict: Verdict) -> str:
        if self.collapse is None and self._without_signal >= WITHOUT_SIGNAL:
            same = "all completions of a prompt had the same reward: look at data.reward and samples.jsonl"
            return f"nothing was learned in the last {self._without_signal} steps, {same}. {verdict}"
        if self.collapse is None:
            return str(verdict)
        return f"training is collapsing: {self.collapse}; {stabilizing_setting(trainer, pl_module)}"

    def _judge(self, trainer: pl.Trainer, pl_module: pl.LightningModule, load: StepLoad) -> Verdict:
        settings = what_to_turn(rollout_data(trainer, "BottleneckVerdict"), pl_module, load, trainer.num_devices)
        self.verdict = diagnose(self._totals(trainer) - load.began, settings)
        return self.verdict

    def _record(self, trainer: AnyTrainer, pl_module: AnyModule, verdict: Verdict, whole_run: bool) -> None:
        if self._folder is None:
            return
        row = {
            "step": trainer.global_step,
            "whole_run": whole_run,
            "began_at": self._run_began_at if whole_run else self._window_began_at,
            "ended_at": time.time(),
            **asdict(verdict.intervals),
            "side": verdict.side,
            "share_won": verdict.share_won,
            "text": self._words(trainer, pl_module, verdict),
        }
        path = self._folder / "verdicts.jsonl"
        with tolerate_full_disk(str(path)):
            self._folder.mkdir(parents=True, exist_ok=True)
            append(path, json.dumps(row) + "\n")

    def _totals(self, trainer: pl.Trainer) -> Intervals:
        """Totals since the start of the run, without validation."""
        data = trainer.datamodule  # type: ignore[attr-defined]
        stats = data.stats() if isinstance(data, RolloutDataModule) else None
        if stats is None:
            return NOTHING
        syncs = [c.total_s for c in trainer.callbacks if isinstance(c, WeightSync)]  # type: ignore[attr-defined]
        now = Intervals(
            wall_s=time.monotonic(),
            wait_s=stats.wait_s,
            sync_s=sum(syncs),
            engine_busy_s=stats.engine_busy_s,
            scoring_s=stats.scoring_s,
            cpu_s=time.process_time(),
        )
        return now - self._left_out


def _metrics(verdict: Verdict) -> dict[str, float]:
    i = verdict.intervals
    return {
        "perf/overlap_efficiency": i.overlap_efficiency,
        "perf/trainer_share": i.trainer_s / i.wall_s,
        "perf/weight_sync_share": i.sync_s / i.wall_s,
        "perf/scoring_share": i.scoring_s / i.wall_s,
        "perf/share_to_win": verdict.share_won,
    }


def _print(trainer: pl.Trainer, text: str) -> None:
    """Prints above the progress bar, if there is one."""
    if trainer.is_global_zero:
        bar = trainer.progress_bar_callback
        print(text) if bar is None else bar.print(text)
