"""Staleness of trained tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from torchmetrics import MaxMetric, MeanMetric
from torchmetrics.aggregation import CatMetric

from lit_async_rl.callbacks.monitors.step_monitor import StepMonitor
from lit_async_rl.types import RolloutBatch


class StalenessMonitor(StepMonitor):
    """Logs `sample/staleness_{mean,p95,max}` over the tokens of a step, in versions, and `sample/mixed_version_share`.

    `mixed_version_share` is the share of rollouts sampled by more than one version (in-flight updates). The age of a
    rollout has two parts, logged as means over rollouts (the lags of ESTR, arXiv:2607.22186):
    `sample/inter_rollout_lag`, the version in training less that of its newest token, and `sample/intra_rollout_lag`,
    the version of its newest token less that of its oldest. `run_mean` and `run_max` accumulate over the whole run,
    for `RunSummary`.
    """

    prog_bar = ("sample/staleness_mean",)

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.mixed = CatMetric(), MeanMetric()
        self.inter, self.intra = MeanMetric(), MeanMetric()
        self.run_mean, self.run_max = MeanMetric(), MaxMetric()

    def update(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: RolloutBatch) -> None:
        signals: Any = pl_module.stabilizer_signals
        staleness = signals["staleness"][batch.loss_mask].float().cpu()
        self.tokens.update(staleness)
        self.run_mean.update(staleness)
        self.run_max.update(staleness)
        # not -1: the versions of a tape that begins later than the run are negative
        newest = batch.versions.masked_fill(~batch.loss_mask, torch.iinfo(batch.versions.dtype).min).amax(-1)
        oldest = torch.where(batch.loss_mask, batch.versions, newest[:, None]).amin(-1)
        has_tokens = batch.loss_mask.any(-1)
        self.inter.update((signals["version"] - newest)[has_tokens].float().cpu())
        self.intra.update((newest - oldest)[has_tokens].float().cpu())
        self.mixed.update((newest > oldest)[batch.group_index >= 0].float().cpu())

    def compute(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> Mapping[str, Any]:
        tokens = torch.as_tensor(self.tokens.compute())
        mixed, inter, intra = (part.compute() for part in (self.mixed, self.inter, self.intra))
        for part in (self.tokens, self.mixed, self.inter, self.intra):
            part.reset()
        if not len(tokens):
            return {}
        in_order = tokens.sort().values  # torch.quantile takes no more than 16M values
        return {
            "sample/staleness_mean": tokens.mean(),
            "sample/staleness_p95": in_order[math.ceil(0.95 * (len(tokens) - 1))],
            "sample/staleness_max": tokens.max(),
            "sample/mixed_version_share": mixed,
            "sample/inter_rollout_lag": inter,
            "sample/intra_rollout_lag": intra,
        }
