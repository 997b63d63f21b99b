"""Throughput, and idle shares of trainer and engine."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from torchmetrics import SumMetric

from lit_async_rl.callbacks.monitors.step_monitor import StepMonitor
from lit_async_rl.callbacks.parts import rollout_data
from lit_async_rl.distributed.ranks import data_parallel
from lit_async_rl.rollouts.stats import ProducerStats
from lit_async_rl.types import RolloutBatch
from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer


class ThroughputMonitor(StepMonitor):
    """Logs seconds and tokens per second of each step, and idle shares of trainer and engine.

    * `perf/step_s`, `perf/tokens_per_s`: completion tokens trained on, of all ranks.
    * `perf/rollout_wait_s`, `perf/trainer_wait_share`: the trainer waited for rollouts.
    * `perf/engine_idle_share`: the engine had nothing it was allowed to sample.
    * `sample/queue_size`, `sample/unfinished`: groups that are finished and wait, and that are being sampled.
    * `sample/total_tokens`: generated since the run began, before a resume, too.
    * `sample/lost`: groups dropped in the step, redundant ones (`redundant_groups`) or by a full `ring`.

    A replay of a tape has neither engine nor queue: `perf/engine_idle_share` and other `sample/*` are left out.
    """

    prog_bar = ("perf/tokens_per_s",)

    def __init__(self) -> None:
        super().__init__()
        self.tokens = SumMetric()
        self._began = 0.0
        self._before: ProducerStats | None = None
        self._total_tokens = 0

    def on_train_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._began, self._before = time.monotonic(), None

    def update(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: RolloutBatch) -> None:
        self.tokens.update(batch.loss_mask.sum().cpu())

    def compute(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> Mapping[str, Any]:
        now = time.monotonic()
        step_s = now - self._began
        tokens = float(self.tokens.compute()) * data_parallel(trainer)[0] / trainer.world_size  # not of copies
        self.tokens.reset()
        values = {"perf/step_s": step_s, "perf/tokens_per_s": tokens / step_s}
        data = rollout_data(trainer, "ThroughputMonitor")
        stats = data.stats()
        if stats is not None:
            before = self._before or ProducerStats.zero()
            wait_s, run_s = stats.wait_s - before.wait_s, max(1e-9, stats.run_s - before.run_s)  # clocks may be coarse
            self._total_tokens += stats.num_tokens - before.num_tokens
            values["sample/total_tokens"] = float(self._total_tokens)
            values |= {"perf/rollout_wait_s": wait_s, "perf/trainer_wait_share": wait_s / run_s}
            if data.tape is None:
                values |= {
                    "perf/engine_idle_share": max(0.0, 1 - (stats.engine_busy_s - before.engine_busy_s) / run_s),
                    "sample/queue_size": float(stats.num_queued),
                    "sample/unfinished": float(stats.num_unfinished),
                    "sample/lost": float(stats.num_lost - before.num_lost),
                }
        self._began, self._before = now, stats
        return values

    def state_dict(self) -> dict[str, Any]:
        return {"total_tokens": self._total_tokens}

    def on_save_checkpoint(self, trainer: AnyTrainer, pl_module: AnyModule, checkpoint: dict[str, Any]) -> None:
        """Counts what was generated since the last step, too: the checkpoint has it."""
        stats = rollout_data(trainer, "ThroughputMonitor").stats()
        if stats is not None and self.state_key in checkpoint.get("callbacks", {}):
            since = stats.num_tokens - (self._before or ProducerStats.zero()).num_tokens
            checkpoint["callbacks"][self.state_key] = {"total_tokens": self._total_tokens + since}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._total_tokens = state_dict["total_tokens"]
