"""Importance ratios and KL divergence between current and behavior policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from torchmetrics import MaxMetric, MeanMetric
from torchmetrics.aggregation import CatMetric

from lit_async_rl.callbacks.monitors.step_monitor import StepMonitor
from lit_async_rl.importance import ess_ratio, kl_k1, kl_k2, kl_k3, sequence_log_ratio
from lit_async_rl.types import RolloutBatch


class ImportanceMonitor(StepMonitor):
    """Logs statistics of the importance ratios pi / mu over a step.

    * `importance/ess_ratio`: effective sample size of whole rollouts, as a share of their number (VCPO's definition).
    * `importance/ess_ratio_token`: the same over tokens (PipelineRL's definition); the two are not comparable.
    * `importance/kl_{k1,k2,k3}`: estimates of KL(mu || pi) per token.
    * `importance/ratio_max`, `importance/clip_fraction`: largest token ratio; share of clipped tokens.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sequences, self.tokens = CatMetric(), CatMetric()
        self.clipped, self.largest = MeanMetric(), MaxMetric()

    def update(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: RolloutBatch) -> None:
        signals: Any = pl_module.stabilizer_signals
        log_ratio, mask = signals["log_ratio"].cpu(), signals["mask"].cpu()
        self.sequences.update(sequence_log_ratio(log_ratio, mask)[batch.group_index.cpu() >= 0])
        self.tokens.update(log_ratio[mask])
        self.clipped.update(signals["clipped"].cpu()[mask].float())
        self.largest.update(log_ratio[mask])

    def compute(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> Mapping[str, Any]:
        sequences, tokens = torch.as_tensor(self.sequences.compute()), torch.as_tensor(self.tokens.compute())
        largest, clipped = self.largest.compute(), self.clipped.compute()
        for metric in (self.sequences, self.tokens, self.clipped, self.largest):
            metric.reset()
        if not tokens.numel():
            return {}
        return {
            "importance/ess_ratio": ess_ratio(sequences.reshape(-1)),
            "importance/ess_ratio_token": ess_ratio(tokens.reshape(-1)),
            "importance/kl_k1": kl_k1(tokens).mean(),
            "importance/kl_k2": kl_k2(tokens).mean(),
            "importance/kl_k3": kl_k3(tokens).mean(),
            "importance/ratio_max": largest.exp(),
            "importance/clip_fraction": clipped,
        }
