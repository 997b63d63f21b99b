"""Monitors that accumulate over the micro-batches of a step and log once per step."""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from jaxtyping import Bool, Shaped
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torchmetrics import MaxMetric, MeanMetric, Metric, SumMetric
from torchmetrics.aggregation import CatMetric

from lit_async_rl.callbacks.parts import rollout_data
from lit_async_rl.distributed.ranks import cpu_group, num_copies
from lit_async_rl.importance import ess_ratio, kl_k1, kl_k2, kl_k3, safe_exp, sequence_log_ratio
from lit_async_rl.rewards.hooks import metrics_of
from lit_async_rl.rewards.success import CutWatch
from lit_async_rl.rollouts.intake import TRAINED, FateTotals
from lit_async_rl.rollouts.totals import ProducerStats
from lit_async_rl.types import Rollout, RolloutBatch
from lit_async_rl.utils.checks import check_range
from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer


class StepMonitor(pl.Callback):
    """Base class. Subclasses implement `update` for a micro-batch and `compute` for the metrics of the step.

    Statistics of an empty set are not logged: a step in which every token is masked has no staleness.

    Attributes:
        prog_bar: metrics shown in the progress bar.

    Raises:
        ValueError: when training starts without a `RolloutDataModule`.
    """

    prog_bar: tuple[str, ...] = ()

    def __init__(self) -> None:
        self._step = -1

    @abstractmethod
    def update(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any) -> None:
        """Adds one micro-batch; its signals are in `pl_module.stabilizer_signals`."""

    @abstractmethod
    def compute(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> Mapping[str, Any]:
        """Returns the metrics of the step, and resets."""

    def on_train_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        """Resets the metrics. They are on the CPU, so that they reduce over a process group with a CPU backend."""
        rollout_data(trainer, type(self).__name__)
        self._step = trainer.global_step
        group = cpu_group()
        for metric in vars(self).values():
            if isinstance(metric, Metric):
                metric.process_group = group
                metric.reset()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.update(trainer, pl_module, batch)
        if trainer.global_step > self._step:
            self._step = trainer.global_step
            for name, value in self.compute(trainer, pl_module).items():
                pl_module.log(name, value, prog_bar=name in self.prog_bar)


def _taken(*metrics: Metric) -> list[Any]:
    """Values of metrics over all ranks; they begin anew. A collective."""
    values = [metric.compute() for metric in metrics]
    for metric in metrics:
        metric.reset()
    return values


def _is_first(batch: RolloutBatch) -> Bool[Tensor, " B"]:
    """True in one row of each rollout; False in padding."""
    return (batch.group_index >= 0) & ~batch.rewards.isnan()


def _of_rollouts(
    values: Shaped[Tensor, " B"], batch: RolloutBatch, reduce: Literal["sum", "amax", "amin"]
) -> Shaped[Tensor, " R"]:
    """Values of the R rollouts, from those of their rows."""
    if batch.rollout is not None:
        rollout = batch.rollout.to(values.device)
        values = torch.zeros_like(values).scatter_reduce(0, rollout, values, reduce, include_self=False)[rollout]
    return values[_is_first(batch).to(values.device)]


# -- Rewards, lengths and entropy of rollouts -------------------------------------------------------------------------


class RolloutMonitor(StepMonitor):
    """Logs rewards, lengths and entropy of a step.

    * `reward/mean`, `reward/std`: of the rollouts in training. Not a measure of the policy if filters (dynamic
      sampling) dropped groups.
    * `reward/mean_sampled`: mean over all groups scored since the previous step, before any filter.
    * `reward/part/<name>`: mean of a part of the reward, over the rollouts to which it applies, see `CombinedReward`.
    * `sample/dropped_share`: share of those groups that filters dropped.
    * `sample/dropped_token_share`: tokens dropped since the previous step by filters, the bound, redundancy, failed
      rewards or engine restarts, as a share of those dropped or trained on.
    * what the reward's `metrics` returns, such as a judge's cost.
    * `rollout/length_mean`: trained tokens; `policy/entropy`: per token.
    * `rollout/cut_share`: share of completions cut at `sampling.max_tokens` instead of ended by the policy. The first
      time that most are, a line says so.
    * `policy/loss`: of the step, with all penalties, as the optimizer minimises it. Its value means little:
      policy-gradient surrogates are defined by their gradients.
    * `policy/reference_kl`: KL(policy || reference) per token, unbiased on stale tokens, too: the mean of
      pi / mu (ref / pi - 1 - log(ref / pi)).
    * `policy/teacher_divergence`: the divergence of `model.distillation`; with its sampled gradient an estimate of
      KL(policy || teacher).
    * `rollout/no_signal_share`: share of rollouts with advantage 0, without gradient from rewards.
    """

    prog_bar = ("reward/mean",)

    def __init__(self) -> None:
        super().__init__()
        # float64: the variance is a difference of two means, and cancels in float32 if rewards are far from 0
        self.reward = MeanMetric().set_dtype(torch.float64)
        self.reward_square = MeanMetric().set_dtype(torch.float64)
        self.length = MeanMetric()
        self.no_signal = MeanMetric()
        self.entropy = MeanMetric()
        self.loss = SumMetric()
        self.reference_kl = MeanMetric()
        self.divergence = MeanMetric()
        self._previous_stats = ProducerStats()
        self._gradient_scale = 1.0
        self._cut_watch = CutWatch("data.sampling.max_tokens", "rollout/cut_share")

    def update(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: RolloutBatch) -> None:
        real = _is_first(batch)
        signals: Any = pl_module.stabilizer_signals
        rewards = batch.rewards[real].cpu().double()
        self.reward.update(rewards)
        self.reward_square.update(rewards.square())
        lengths = batch.loss_mask.sum(-1) if batch.lengths is None else batch.lengths
        self.length.update(lengths[real].float().cpu())
        largest = batch.advantages.abs().amax(-1)
        self.no_signal.update((_of_rollouts(largest, batch, "amax") == 0).float().cpu())
        self.entropy.update(signals["entropy"][batch.loss_mask].cpu())
        self.loss.update(signals["loss"].cpu().nan_to_num(nan=torch.inf))  # `SumMetric` would ignore NaN
        self._gradient_scale = batch.gradient_scale  # the last micro-batch has the scale of the whole step
        if (reference_log_ratio := signals.get("ref_log_ratio")) is not None:
            kl = safe_exp(signals["log_ratio"]) * kl_k3(-reference_log_ratio)
            self.reference_kl.update(kl[batch.loss_mask].cpu())
        if (divergence := signals.get("divergence")) is not None:
            self.divergence.update(divergence[batch.loss_mask].cpu())

    def compute(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> Mapping[str, Any]:
        mean, square, length, no_signal = _taken(self.reward, self.reward_square, self.length, self.no_signal)
        entropy, loss = _taken(self.entropy, self.loss)
        of_tokens = {"policy/reference_kl": self.reference_kl, "policy/teacher_divergence": self.divergence}
        measured = {name: _taken(metric)[0] for name, metric in of_tokens.items() if metric.update_called}
        if length.isnan():  # no rollout in the whole step
            return {}
        values = {
            **self._sampled(trainer),
            **self._parts_and_cuts(trainer),
            "reward/mean": mean,
            "reward/std": (square - mean.square()).clamp(min=0).sqrt(),
            "rollout/length_mean": length,
            "rollout/no_signal_share": no_signal,
        }
        if not entropy.isnan():  # NaN if no token trained
            values |= {"policy/entropy": entropy, "policy/loss": loss * self._gradient_scale / num_copies(trainer)}
        return values | {name: value for name, value in measured.items() if not value.isnan()}

    def on_train_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        """Resets; the first step counts all groups scored since the engine started."""
        super().on_train_start(trainer, pl_module)
        self._previous_stats = ProducerStats()

    def _parts_and_cuts(self, trainer: AnyTrainer) -> dict[str, float]:
        """Means of the rewards' parts, and the share of cut completions; empty on ranks without the producer."""
        data = rollout_data(trainer, "RolloutMonitor")
        rollouts = [rollout for group in data.last_step_groups for rollout in group.rollouts]
        if not rollouts:
            return {}
        share = sum(rollout.finish_reason == "length" for rollout in rollouts) / len(rollouts)
        self._cut_watch.warn_once(share, data.sampling.max_tokens)
        parts = {f"reward/part/{name}": value for name, value in mean_parts(rollouts).items()}
        return {**parts, "rollout/cut_share": share}

    def _sampled(self, trainer: AnyTrainer) -> dict[str, Any]:
        """Metrics of all groups scored since the last step; empty on ranks without the producer."""
        data = rollout_data(trainer, "RolloutMonitor")
        now = data.stats()
        before = self._previous_stats
        self._previous_stats = now or self._previous_stats
        if now is None:
            return {}
        of_reward: dict[str, Any] = metrics_of(data.reward) | metrics_of(data.engine)
        if now.num_sampled <= before.num_sampled:
            return of_reward
        number = now.num_sampled - before.num_sampled
        return of_reward | {
            "sample/dropped_token_share": float(sum(now.dropped_share(before).values())),
            "reward/mean_sampled": (now.sampled_reward - before.sampled_reward) / number,
            "sample/dropped_share": (now.num_dropped - before.num_dropped) / number,
        }


def mean_parts(rollouts: Iterable[Rollout]) -> dict[str, float]:
    """Mean of each part of the rewards, over the rollouts that have it."""
    found: dict[str, list[float]] = {}
    for rollout in rollouts:
        for name, value in (rollout.reward_parts or {}).items():
            found.setdefault(name, []).append(value)
    return {name: math.fsum(values) / len(values) for name, values in found.items()}


# -- Staleness of trained tokens --------------------------------------------------------------------------------------


class StalenessMonitor(StepMonitor):
    """Logs `sample/staleness_{mean,p95,max}` over the tokens of a step, in versions, and `sample/mixed_version_share`.

    `mixed_version_share` is the share of rollouts sampled by several versions (in-flight updates). A rollout's age has
    two parts, logged as means (the lags of ESTR, arXiv:2607.22186): `sample/inter_rollout_lag`, from the version of its
    newest token to the version in training, and `sample/intra_rollout_lag`, from the version of its oldest token to
    that of its newest. `run_mean` and `run_max` accumulate over the whole run, for `RunSummary`.
    """

    prog_bar = ("sample/staleness_mean",)

    def __init__(self) -> None:
        super().__init__()
        self.tokens = CatMetric()
        self.mixed = MeanMetric()
        self.inter = MeanMetric()
        self.intra = MeanMetric()
        self.run_mean = MeanMetric()
        self.run_max = MaxMetric()

    def update(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: RolloutBatch) -> None:
        signals: Any = pl_module.stabilizer_signals
        staleness = signals["staleness"][batch.loss_mask].float().cpu()
        self.tokens.update(staleness)
        self.run_mean.update(staleness)
        self.run_max.update(staleness)
        # not -1 as filler: if a tape begins later than the run, its versions are negative
        limits = torch.iinfo(batch.versions.dtype)
        newest = _of_rollouts(batch.versions.masked_fill(~batch.loss_mask, limits.min).amax(-1), batch, "amax")
        oldest = _of_rollouts(batch.versions.masked_fill(~batch.loss_mask, limits.max).amin(-1), batch, "amin")
        has_tokens = newest > limits.min
        self.inter.update((signals["version"] - newest)[has_tokens].float().cpu())
        self.intra.update((newest - oldest)[has_tokens].float().cpu())
        self.mixed.update((newest > oldest).float().cpu())

    def compute(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> Mapping[str, Any]:
        ages, mixed, inter, intra = _taken(self.tokens, self.mixed, self.inter, self.intra)
        tokens = torch.as_tensor(ages)
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


# -- Importance ratios and KL divergence between current and behavior policy ------------------------------------------


class ImportanceMonitor(StepMonitor):
    """Logs statistics of the importance ratios pi / mu over a step.

    * `importance/ess_ratio`: effective sample size of whole rollouts, as a share of those with a trained token (VCPO's
      definition).
    * `importance/ess_ratio_token`: the same over tokens (PipelineRL's definition); the two are not comparable.
    * `importance/kl_{k1,k2,k3}`: estimates of KL(mu || pi) per token.
    * `importance/ratio_max`, `importance/clip_fraction`: largest token ratio; share of clipped tokens.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sequences = CatMetric()
        self.tokens = CatMetric()
        self.clipped = MeanMetric()
        self.largest = MaxMetric()

    def update(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: RolloutBatch) -> None:
        signals: Any = pl_module.stabilizer_signals
        log_ratio = signals["log_ratio"].cpu()
        mask = signals["mask"].cpu()
        has_tokens = _of_rollouts(mask.any(-1), batch, "amax")
        self.sequences.update(_of_rollouts(sequence_log_ratio(log_ratio, mask), batch, "sum")[has_tokens])
        self.tokens.update(log_ratio[mask])
        self.clipped.update(signals["clipped"].cpu()[mask].float())
        self.largest.update(log_ratio[mask])

    def compute(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> Mapping[str, Any]:
        *log_ratios, largest, clipped = _taken(self.sequences, self.tokens, self.largest, self.clipped)
        sequences, tokens = map(torch.as_tensor, log_ratios)
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


# -- Statistics of the replay buffer ----------------------------------------------------------------------------------


class ReplayMonitor(StepMonitor):
    """Logs `replay/*`, the fields of `ReplayStats`, and `sample/off_policy_share`, the share of stale tokens.

    Raises:
        ValueError: the run has no replay buffer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.off_policy = MeanMetric()

    def on_fit_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        if rollout_data(trainer, "ReplayMonitor").replay is None:
            raise ValueError("ReplayMonitor: data.replay is not set, so there is nothing to monitor")

    def update(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: RolloutBatch) -> None:
        """Adds the trained tokens."""
        signals: Any = pl_module.stabilizer_signals
        self.off_policy.update((signals["staleness"][batch.loss_mask] > 0).float().cpu())

    def compute(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> Mapping[str, Any]:
        replay = trainer.datamodule.replay  # type: ignore[attr-defined]
        values = {f"replay/{name}": float(value) for name, value in asdict(replay.stats()).items()}
        share = float(*_taken(self.off_policy))
        return values if math.isnan(share) else values | {"sample/off_policy_share": share}


# -- Throughput, and idle shares of trainer and engine ----------------------------------------------------------------


class ThroughputMonitor(StepMonitor):
    """Logs seconds and tokens per second of each step, and idle shares of trainer and engine.

    * `perf/step_s`, `perf/tokens_per_s`: duration of the step, and completion tokens trained on by all ranks.
    * `perf/rollout_wait_s`, `perf/trainer_wait_share`: time that the trainer waited for rollouts, and its share.
    * `perf/engine_idle_share`: share of the time without an admitted rollout left to sample.
    * `sample/queue_size`, `sample/unfinished`: groups waiting for training, and being sampled.
    * `sample/total_tokens`: tokens generated since the run began, before a resume, too.
    * `sample/lost`: groups dropped in the step: redundant ones (`redundant_groups`), those of a full `ring`, and those
      that became too old.
    * `perf/computed_share`, only with `model.packing`: tokens computed in a pass over the step, over those of separate
      rows; 1 where rows are computed separately.

    A replay of a tape has neither engine nor queue, and logs no `perf/engine_idle_share` and no other `sample/*`.
    """

    prog_bar = ("perf/tokens_per_s",)

    def __init__(self) -> None:
        super().__init__()
        self.tokens = SumMetric()
        self.computed = SumMetric()
        self.in_rows = SumMetric()
        self.run_computed = SumMetric()  # of the whole run, for the summary
        self.run_in_rows = SumMetric()
        self._began = 0.0
        self._previous_stats: ProducerStats | None = None
        self._total_tokens = 0

    def on_train_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._began = time.monotonic()
        self._previous_stats = None

    def update(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: RolloutBatch) -> None:
        self.tokens.update(batch.loss_mask.sum().cpu())
        signals: Any = getattr(pl_module, "stabilizer_signals", {})
        num_tokens = signals.get("num_tokens")
        if batch.as_rows:
            num_tokens = [int(batch.attention_mask.sum()) - len(batch)] * 2  # a row's last token is not computed
        if num_tokens is not None:
            computed, in_rows = map(float, num_tokens)
            self.computed.update(computed)
            self.run_computed.update(computed)
            self.in_rows.update(in_rows)
            self.run_in_rows.update(in_rows)

    def computed_share(self) -> float | None:
        """`perf/computed_share` of the run so far; None without packing. A collective."""
        return _share(self.run_computed, self.run_in_rows)

    def compute(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> Mapping[str, Any]:
        now = time.monotonic()
        step_s = now - self._began
        tokens = float(*_taken(self.tokens)) / num_copies(trainer)
        values = {"perf/step_s": step_s, "perf/tokens_per_s": tokens / step_s}
        if (share := _share(self.computed, self.in_rows)) is not None:
            values["perf/computed_share"] = share
        self.computed.reset()
        self.in_rows.reset()
        data = rollout_data(trainer, "ThroughputMonitor")
        stats = data.stats()
        if stats is not None:
            before = self._previous_stats or ProducerStats()
            wait_s = stats.wait_s - before.wait_s
            run_s = max(1e-9, stats.run_s - before.run_s)  # a coarse clock may not have advanced
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
        self._began = now
        self._previous_stats = stats
        return values

    def state_dict(self) -> dict[str, Any]:
        return {"total_tokens": self._total_tokens}

    def on_save_checkpoint(self, trainer: AnyTrainer, pl_module: AnyModule, checkpoint: dict[str, Any]) -> None:
        """Adds the tokens generated since the last step: their rollouts are in the checkpoint."""
        stats = rollout_data(trainer, "ThroughputMonitor").stats()
        if stats is not None and self.state_key in checkpoint.get("callbacks", {}):
            since = stats.num_tokens - (self._previous_stats or ProducerStats()).num_tokens
            checkpoint["callbacks"][self.state_key] = {"total_tokens": self._total_tokens + since}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._total_tokens = state_dict["total_tokens"]


def _share(part: SumMetric, whole: SumMetric) -> float | None:
    """Share of two sums over all ranks; None without any, which is so on all ranks."""
    if not whole.update_called:
        return None
    total = float(whole.compute())
    return float(part.compute()) / total if total else None


# -- Length, duration and difficulty of dropped groups compared with trained ones -------------------------------------


class LengthBiasMonitor(StepMonitor):
    """Compares dropped with trained groups over the last `window` steps; warns once about a length bias.

    For each fate of groups (`trained`; `expired` at the staleness bound; `unbegun`: expired before its first token;
    `discarded` by a rollback; that of the filter which dropped it, such as `no_signal`) it logs:

    * `intake/<fate>_share`: share of all groups that ended.
    * `intake/<fate>_length`: mean tokens per rollout; aborted groups count the tokens sampled so far, so a bias is
      underestimated.
    * `intake/<fate>_s`: mean seconds from admission to their last token.
    * `intake/<fate>_pass_rate`: mean measured pass rate of their prompts, if known.

    Args:
        window: optimizer steps per window.
        ratio: ratio of mean lengths, dropped to trained, that warns.
        min_groups: dropped groups in the window needed for a warning.

    Raises:
        ValueError: a setting is out of range.
    """

    def __init__(self, window: int = 20, ratio: float = 1.25, min_groups: int = 32) -> None:
        super().__init__()
        check_range("LengthBiasMonitor", "integer >= 1", window=window, min_groups=min_groups)
        check_range("LengthBiasMonitor", "> 1", ratio=ratio)
        self.window = window
        self.ratio = ratio
        self.min_groups = min_groups
        self._totals: deque[Mapping[str, FateTotals]] = deque(maxlen=window + 1)
        self._has_warned = False

    def on_train_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._totals.clear()
        self._totals.append({})

    def update(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: RolloutBatch) -> None:
        """Does nothing: the producer counts groups when it drops them."""

    def compute(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> Mapping[str, Any]:
        stats = rollout_data(trainer, "LengthBiasMonitor").stats()
        if stats is None:
            return {}
        self._totals.append(stats.fates)
        before = self._totals[0]
        changes = {fate: totals - before.get(fate, FateTotals()) for fate, totals in stats.fates.items()}
        self._warn(changes)
        return values(changes)

    def _warn(self, changes: Mapping[str, FateTotals]) -> None:
        trained = changes.get(TRAINED, FateTotals())
        for fate, dropped in changes.items():
            if self._has_warned or fate == TRAINED or not trained.length or dropped.num_groups < self.min_groups:
                continue
            times = (dropped.length / dropped.num_groups) / (trained.length / trained.num_groups)
            if times >= self.ratio:
                self._has_warned = True
                rank_zero_warn(
                    f"LengthBiasMonitor: completions of groups that were dropped (reason: `{fate}`) are {times:.2f} "
                    "times as long as completions of groups that were trained on, so training is biased towards short "
                    "completions. To drop fewer groups, raise data.max_staleness, or set data.admission=null, so "
                    "that no group expires."
                )


def values(changes: Mapping[str, FateTotals]) -> dict[str, float]:
    """Metrics of each fate: share of groups, mean length, seconds and pass rate."""
    num_groups = sum(totals.num_groups for totals in changes.values())
    result = {}
    for fate, totals in changes.items():
        result[f"intake/{fate}_share"] = totals.num_groups / max(1, num_groups)
        if totals.num_groups:
            result[f"intake/{fate}_length"] = totals.length / totals.num_groups
            result[f"intake/{fate}_s"] = totals.seconds / totals.num_groups
        if totals.num_measured:
            result[f"intake/{fate}_pass_rate"] = totals.pass_rate / totals.num_measured
    return result
