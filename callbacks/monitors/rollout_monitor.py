"""Rewards, lengths and entropy of rollouts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from torchmetrics import MeanMetric

from lit_async_rl.callbacks.monitors.step_monitor import StepMonitor
from lit_async_rl.types import RolloutBatch


class RolloutMonitor(StepMonitor):
    """Logs `reward/mean`, `reward/std`, `rollout/length_mean`, `rollout/no_signal_share` and `policy/entropy`.

    `no_signal_share` is the share of rollouts whose advantage is 0: they cost time without a gradient.
    """

    prog_bar = ("reward/mean",)

    def __init__(self) -> None:
        super().__init__()
        self.reward, self.reward_square = MeanMetric(), MeanMetric()
        self.length, self.no_signal, self.entropy = MeanMetric(), MeanMetric(), MeanMetric()
        self._metrics = self.reward, self.reward_square, self.length, self.no_signal, self.entropy

    def update(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: RolloutBatch) -> None:
        real = batch.group_index >= 0
        signals: Any = pl_module.stabilizer_signals
        self.reward.update(batch.rewards[real].cpu())
        self.reward_square.update(batch.rewards[real].square().cpu())
        self.length.update(batch.loss_mask[real].sum(-1).float().cpu())
        self.no_signal.update((batch.advantages[real] == 0).all(-1).float().cpu())
        self.entropy.update(signals["entropy"][batch.loss_mask].cpu())

    def compute(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> Mapping[str, Any]:
        mean, square, length, no_signal, entropy = (metric.compute() for metric in self._metrics)
        for metric in self._metrics:
            metric.reset()
        if length.isnan():  # no rollout in the whole step
            return {}
        values = {
            "reward/mean": mean,
            "reward/std": (square - mean.square()).clamp(min=0).sqrt(),
            "rollout/length_mean": length,
            "rollout/no_signal_share": no_signal,
        }
        return values | ({"policy/entropy": entropy} if length > 0 else {})
