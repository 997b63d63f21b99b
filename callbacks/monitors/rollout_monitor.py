"""Rewards, lengths and entropy of rollouts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from torchmetrics import MeanMetric, SumMetric

from lit_async_rl.callbacks.monitors.step_monitor import StepMonitor
from lit_async_rl.callbacks.parts import rollout_data
from lit_async_rl.importance import kl_k3, safe_exp
from lit_async_rl.rollouts.stats import ProducerStats
from lit_async_rl.types import RolloutBatch
from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer


class RolloutMonitor(StepMonitor):
    """Logs rewards, lengths and entropy of a step.

    * `reward/mean`, `reward/std`: of the rollouts that are trained on. Filters (dynamic sampling) have dropped some, so
      this is not how good the policy is.
    * `reward/mean_sampled`: mean over all groups that were scored since the step before, ahead of any filter.
    * `sample/dropped_share`: share of those groups that filters dropped.
    * `rollout/length_mean`: trained tokens; `policy/entropy`: per token.
    * `policy/loss`: of the step, with all penalties, as the optimizer minimises it; its value says little, because the
      surrogates of policy gradients are right in their gradients only.
    * `policy/reference_kl`: KL(policy || reference) per token, estimated without bias from stale tokens, too: the mean
      of pi / mu (ref / pi - 1 - log(ref / pi)).
    * `rollout/no_signal_share`: share of rollouts whose advantage is 0: they cost time and teach nothing.
    """

    prog_bar = ("reward/mean",)

    def __init__(self) -> None:
        super().__init__()
        # the variance is a difference of two means, which float32 loses where rewards are far from 0
        self.reward = MeanMetric().set_dtype(torch.float64)
        self.reward_square = MeanMetric().set_dtype(torch.float64)
        self.length, self.no_signal, self.entropy = MeanMetric(), MeanMetric(), MeanMetric()
        self.loss, self.reference_kl = SumMetric(), MeanMetric()
        self._before = ProducerStats.zero()
        self._metrics = self.reward, self.reward_square, self.length, self.no_signal, self.entropy
        self._gradient_scale = 1.0

    def update(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: RolloutBatch) -> None:
        real = batch.group_index >= 0
        signals: Any = pl_module.stabilizer_signals
        rewards = batch.rewards[real].cpu().double()
        self.reward.update(rewards)
        self.reward_square.update(rewards.square())
        lengths = batch.loss_mask.sum(-1) if batch.lengths is None else batch.lengths
        self.length.update(lengths[real].float().cpu())
        self.no_signal.update((batch.advantages[real] == 0).all(-1).float().cpu())
        self.entropy.update(signals["entropy"][batch.loss_mask].cpu())
        self.loss.update(signals["loss"].cpu().nan_to_num(nan=torch.inf))  # the metric would leave NaN out
        self._gradient_scale = batch.gradient_scale  # of the whole step in its last micro-batch
        if (reference_log_ratio := signals.get("ref_log_ratio")) is not None:
            kl = safe_exp(signals["log_ratio"]) * kl_k3(-reference_log_ratio)
            self.reference_kl.update(kl[batch.loss_mask].cpu())

    def compute(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> Mapping[str, Any]:
        mean, square, length, no_signal, entropy = (metric.compute() for metric in self._metrics)
        loss = self.loss.compute() * self._gradient_scale
        reference_kl = self.reference_kl.compute() if self.reference_kl.update_called else None
        for metric in (*self._metrics, self.loss, self.reference_kl):
            metric.reset()
        if length.isnan():  # no rollout in the whole step
            return {}
        values = self._sampled(trainer) | {
            "reward/mean": mean,
            "reward/std": (square - mean.square()).clamp(min=0).sqrt(),
            "rollout/length_mean": length,
            "rollout/no_signal_share": no_signal,
        }
        if not entropy.isnan():  # a token trained
            values |= {"policy/entropy": entropy, "policy/loss": loss}
        if reference_kl is not None and not reference_kl.isnan():
            values["policy/reference_kl"] = reference_kl
        return values

    def on_train_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        """Steps are counted from here, and groups from the start of the engine."""
        super().on_train_start(trainer, pl_module)
        rollout_data(trainer, "RolloutMonitor")
        self._before = ProducerStats.zero()  # the first step has what was scored before this

    def _sampled(self, trainer: AnyTrainer) -> dict[str, Any]:
        """Of the groups scored since the last step, on the rank that has the producer."""
        now = rollout_data(trainer, "RolloutMonitor").stats()
        before, self._before = self._before, now or self._before
        if now is None or now.num_sampled <= before.num_sampled:
            return {}
        number = now.num_sampled - before.num_sampled
        return {
            "reward/mean_sampled": (now.sampled_reward - before.sampled_reward) / number,
            "sample/dropped_share": (now.num_dropped - before.num_dropped) / number,
        }
