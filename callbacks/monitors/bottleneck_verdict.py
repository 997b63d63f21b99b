"""Bottleneck report: which side limits throughput, its cost, and the setting to change."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch

from lit_async_rl.callbacks.parts import rollout_data
from lit_async_rl.callbacks.run.weight_sync import WeightSync
from lit_async_rl.data.module import RolloutDataModule
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.errors import SetupError
from lit_async_rl.rollouts.stats import ProducerStats
from lit_async_rl.scheduling.bottleneck import Intervals, Setting, Settings, Verdict, diagnose
from lit_async_rl.training.module import PolicyModule
from lit_async_rl.types import RolloutBatch
from lit_async_rl.utils.checks import check_range
from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer

MUCH_PADDING = 0.25  # share of the positions in a training pass
NOTHING = Intervals(wall_s=0.0, wait_s=0.0, sync_s=0.0, engine_busy_s=0.0)


@dataclass
class _Load:
    """Load counters of a window of steps."""

    began: Intervals = NOTHING
    num_steps: int = 0
    num_unfinished: int = 0  # sum over steps
    fewest_queued: int = 0
    num_tokens: int = 0
    num_positions: int = 0  # with padding

    def add(self, batch: RolloutBatch) -> None:
        self.num_tokens += int(batch.attention_mask.sum())
        self.num_positions += batch.attention_mask.numel()

    def look(self, stats: ProducerStats) -> None:
        self.fewest_queued = min(self.fewest_queued, stats.num_queued) if self.num_steps else stats.num_queued
        self.num_unfinished += stats.num_unfinished
        self.num_steps += 1


class BottleneckVerdict(pl.Callback):
    """Prints the verdict of `scheduling.bottleneck` every `every_n_steps` steps, and on the whole run at the end.

    With each verdict it logs `perf/overlap_efficiency`, `perf/trainer_share`, `perf/weight_sync_share`,
    `perf/scoring_share` and `perf/share_to_win`. Validation time is excluded. A replay of a tape has no engine, and
    gets no verdict.

    Args:
        every_n_steps: optimizer steps per window.

    Attributes:
        verdict: the last verdict.

    Raises:
        ValueError: `every_n_steps` is not positive; when training starts, there is no `RolloutDataModule`.
    """

    def __init__(self, every_n_steps: int = 50) -> None:
        check_range("BottleneckVerdict", ">= 1", every_n_steps=every_n_steps)
        self.every_n_steps = every_n_steps
        self.verdict: Verdict | None = None
        self._left_out = self._validation_began = NOTHING
        self._run: _Load | None = None
        self._window = _Load()
        self._step = 0

    def on_train_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        rollout_data(trainer, "BottleneckVerdict")
        self._left_out, self._step, self._run = NOTHING, trainer.global_step, None

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Starts the clock at the first rollouts: no setting avoids the initial wait."""
        data = rollout_data(trainer, "BottleneckVerdict")
        if self._run is None and data.tape is None and data.stats() is not None:  # this rank has the producer
            began = self._totals(trainer)
            self._run, self._window = _Load(began), _Load(began)

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
        if self._step % self.every_n_steps:
            return
        verdict = self._judge(trainer, pl_module, self._window)
        self._window = _Load(self._totals(trainer))
        for name, value in _metrics(verdict).items():
            pl_module.log(name, value)
        _print(trainer, f"step {self._step}: {verdict}")

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Reports on the whole run."""
        if self._run is not None and self._run.num_steps:
            _print(trainer, f"whole run: {self._judge(trainer, pl_module, self._run)}")

    def _judge(self, trainer: pl.Trainer, pl_module: pl.LightningModule, load: _Load) -> Verdict:
        settings = what_to_turn(trainer, pl_module, load)
        self.verdict = diagnose(self._totals(trainer) - load.began, settings)
        return self.verdict

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
        )
        return now - self._left_out


def what_to_turn(trainer: pl.Trainer, pl_module: pl.LightningModule, load: _Load) -> Settings:
    """For each side, a setting that can still be changed."""
    data = trainer.datamodule  # type: ignore[attr-defined]
    if not isinstance(data, RolloutDataModule):
        raise SetupError(f"BottleneckVerdict reads a RolloutDataModule, not {type(data).__name__}")
    syncs = [c.weight_sync_steps for c in trainer.callbacks if isinstance(c, WeightSync)]  # type: ignore[attr-defined]
    present = syncs[0] if syncs else 1
    bound = data.max_staleness
    spare = load.fewest_queued // data.groups_per_round  # whole rounds that were always ready
    fresher = Setting(name="data.max_staleness", present=bound, suggested=max(1, bound - spare))
    return Settings(
        engine=_engine_setting(data, load.num_unfinished / load.num_steps),
        trainer=_trainer_setting(data, pl_module, 1 - load.num_tokens / load.num_positions),
        reward=Setting(name="data.scoring.workers", present=data.scoring.workers, suggested=2 * data.scoring.workers),
        weight_sync=Setting(name="weight_sync.weight_sync_steps", present=present, suggested=2 * present),
        staleness=_staleness_setting(data),
        fresher=fresher if fresher.suggested != bound and spare and bound > 1 else None,
    )


def _engine_setting(data: RolloutDataModule, unfinished: float) -> Setting | None:
    engine = data.engine
    if not isinstance(engine, EmbeddedEngine):
        return None
    if unfinished * data.group_size > engine.num_slots:  # some always wait for a slot
        return Setting(name="data.engine.num_slots", present=engine.num_slots, suggested=2 * engine.num_slots)
    threads = engine.num_threads
    if threads is not None and threads + torch.get_num_threads() < _num_cores():
        return Setting(name="data.engine.num_threads", present=threads, suggested=threads + 1)
    return None


def _trainer_setting(data: RolloutDataModule, pl_module: pl.LightningModule, padding: float) -> Setting | None:
    parts = data.micro_batches_per_step
    if padding > MUCH_PADDING and not data.keep_groups_whole:  # shorter runs of rollouts sorted by length
        return Setting(name="data.micro_batches_per_step", present=parts, suggested=2 * parts)
    if parts > 1 and padding < MUCH_PADDING / 2:
        return Setting(name="data.micro_batches_per_step", present=parts, suggested=parts // 2)
    if isinstance(pl_module, PolicyModule) and pl_module.policy.causal_lm.is_gradient_checkpointing:
        return Setting(name="model.gradient_checkpointing", present=True, suggested=False)
    threads = torch.get_num_threads()
    if pl_module.device.type == "cpu" and threads < _num_cores():
        return Setting(name="num_threads", present=threads, suggested=threads + 1)
    return None


def _staleness_setting(data: RolloutDataModule) -> Setting:
    bound = data.max_staleness
    if bound and data.admission.in_order:
        return Setting(name="data.admission", present=type(data.admission).__name__, suggested="Bounded")
    if bound and not data.engine.in_flight_weight_updates:
        return Setting(name="data.engine.in_flight_weight_updates", present=False, suggested=True)
    return Setting(name="data.max_staleness", present=bound, suggested=max(1, 2 * bound))


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


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
