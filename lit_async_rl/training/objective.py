"""Loss of one micro-batch: policy loss, importance weights, KL and entropy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lit_async_rl import rules
from lit_async_rl.baselines.ghost_norms import surrogate_loss
from lit_async_rl.baselines.optimal import Norms, OptimalBaseline
from lit_async_rl.corrections import Correction
from lit_async_rl.corrections.weights import BlendedIS, CurrentProximal, Proximal
from lit_async_rl.errors import SetupError
from lit_async_rl.importance import masked
from lit_async_rl.losses import LossInputs, PolicyLoss
from lit_async_rl.losses.reference_kl import KLEstimator, reference_kl
from lit_async_rl.models.policy import CausalPolicy, TokenStats
from lit_async_rl.problem import Prompt
from lit_async_rl.training.distillation import Distillation, Distiller, SourceTeachers, TeacherView
from lit_async_rl.training.token_stats import Reference, token_stats
from lit_async_rl.training.whole_rollouts import WholeRollouts
from lit_async_rl.types import RolloutBatch
from lit_async_rl.utils.checks import check_token_shape


@dataclass(frozen=True)
class _Estimator:
    """Policy-gradient estimator with its share in the loss."""

    share: float
    correction: Correction | None
    baseline: OptimalBaseline | None


@dataclass
class Objective:
    """Loss of one micro-batch, composed of independent parts: the arguments of `PolicyModule` of the same names.

    Attributes:
        baseline: replaces the advantages of the batch; None keeps them.
        distiller: adds the divergence from a teacher to the policy loss, or replaces that by it; None is neither.

    Raises:
        ValueError: parts are incompatible, see `lit_async_rl.rules.of_objective`.
    """

    loss: PolicyLoss
    proximal: Proximal
    correction: Correction | None
    baseline: OptimalBaseline | None
    kl_coefficient: float
    entropy_coefficient: float
    kl_estimator: KLEstimator = "token"
    distiller: Distiller | None = None

    def __post_init__(self) -> None:
        rules.refuse(rules.of_objective(self.loss, self.proximal, self.correction, baseline=self.baseline))
        rules.refuse(rules.of_distillation(self.distillation, self.baseline))

    @property
    def distillation(self) -> Distillation | None:
        """Settings of the distillation; None without it."""
        return None if self.distiller is None else self.distiller.settings

    @property
    def source_of(self) -> Callable[[Prompt], int] | None:
        """Number of the teacher for a prompt; None if all have one."""
        teacher = None if self.distillation is None else self.distillation.source
        return teacher.number_of if isinstance(teacher, SourceTeachers) else None

    @property
    def trains_rewards(self) -> bool:
        """Whether the policy loss is part of the loss; else rewards are measured only."""
        return self.distillation is None or self.distillation.with_reward

    @property
    def needs_reference(self) -> bool:
        """Whether it contains log-probabilities of a frozen reference policy."""
        return self.kl_coefficient > 0 or self.loss.needs_reference

    @property
    def needs_whole_groups(self) -> bool:
        """Whether all completions of a prompt must be in one micro-batch."""
        compares = self.kl_coefficient > 0 and self.kl_estimator == "sequence"
        return compares or self.baseline is not None or self.loss.needs_whole_groups

    @property
    def needs_single_rows(self) -> str:
        """The setting that refuses rollouts of several rows, and its remedy; empty if there is none."""
        if self.loss.needs_single_rows:
            return f"model.loss={type(self.loss).__name__}: use a loss of tokens or of whole completions"
        if self.kl_coefficient > 0 and self.kl_estimator == "sequence":  # branches have no order of their tokens
            return "model.kl_estimator=sequence: use token"
        if self.baseline is not None and self.baseline.norms is Norms.GHOST:  # norms of rows do not add up
            return "model.baseline.norms=GHOST: use SCORE or PER_TRAJECTORY"
        return ""

    def corrected(self, correction: Correction) -> Objective | None:
        """The same objective with this correction; None if it has one, or its loss contains the ratio."""
        if self.correction is not None or self.loss.uses_proximal:
            return None
        return dataclasses.replace(self, proximal=CurrentProximal(), correction=correction)

    def __call__(
        self, policy: CausalPolicy, reference: Reference | None, batch: RolloutBatch, version: int
    ) -> tuple[Float[Tensor, ""], dict[str, Any]]:
        """The micro-batch's share of the step's loss, and the signals of `lit_async_rl.stabilizers.signals`.

        Args:
            policy: policy in training.
            reference: reference policy; None if `needs_reference` is False.
            batch: the micro-batch.
            version: version of the policy in training.
        """
        reference_logprobs = None
        if reference is not None:
            with torch.no_grad():
                reference_logprobs = token_stats(reference, batch).logprobs
        distiller = self.distiller
        view = TeacherView() if distiller is None else distiller.look(batch)
        estimators = self._estimators()
        baseline = estimators[0].baseline  # no other one has any
        with baseline.record(policy) if baseline is not None else nullcontext() as tape:
            stats = token_stats(
                policy,
                batch,
                self.entropy_coefficient != 0,
                experts=batch.experts,
                more_ids=view.head_ids,
                compare=view.compare,
            )
        divergence = None if distiller is None else _divergence(distiller, view, stats, batch=batch)
        rollouts = None if batch.rollout is None else WholeRollouts(batch.rollout)
        rows = batch
        packed = stats.rows
        if rollouts is not None:
            batch = rollouts.of_batch(batch)
            stats = _of_rollouts(stats, rollouts)
            reference_logprobs = None if reference_logprobs is None else rollouts.of_tokens(reference_logprobs)
            divergence = None if divergence is None else rollouts.of_tokens(divergence)
        detached = stats.logprobs.detach()
        staleness = torch.where(batch.loss_mask, version - batch.versions, 0)
        proximal_logprobs = self._proximal_logprobs(detached, reference_logprobs, staleness, batch=batch)
        found: dict[str, list[Tensor]] = {"loss": [], "advantages": [], "weights": []}
        for estimator in estimators:
            weights = torch.ones_like(detached)
            if estimator.correction is not None:
                weights = estimator.correction(proximal_logprobs - batch.behavior_logprobs, batch.loss_mask).weights
            advantages = batch.advantages
            if estimator.baseline is not None:
                advantages = estimator.baseline.advantages(policy, tape, stats, weights, batch)
            output = self.loss(_loss_inputs(stats, proximal_logprobs, advantages, staleness=staleness, batch=batch))
            loss = (batch.token_weights * output.per_token * weights).sum()
            for name, value in {"loss": loss, "advantages": advantages, "weights": weights}.items():
                found[name].append(value)
        loss, blended_advantages, blended_weights = (_blended(estimators, values) for values in found.values())
        if len(estimators) == 1 and baseline is not None and tape is not None and baseline.can_keep_books(tape):
            # without the credits, which are in the coefficients of the tape; a row without any has no gradient there
            credits = batch.loss_mask if batch.credits is None else masked(batch.credits, batch.loss_mask)
            total = credits.sum(-1)
            of_rollouts = advantages.sum(-1) / torch.where(total == 0, 1, total)
            loss = surrogate_loss(tape, -of_rollouts, loss)
        signals: dict[str, Any] = {
            "log_ratio": detached - batch.behavior_logprobs,
            "mask": batch.loss_mask,
            "entropy": stats.entropy.detach(),
            "staleness": staleness,
            "advantages": blended_advantages,
            "clipped": output.clipped,
            "correction_weights": blended_weights,
        }
        if reference_logprobs is not None:
            signals["ref_log_ratio"] = detached - reference_logprobs
        if divergence is not None:
            signals["divergence"] = divergence.detach()
        if rollouts is not None:
            signals = {name: rollouts.to_rows(values) for name, values in signals.items()} | {"rollout": rows.rollout}
        signals["rewards"] = torch.where(rows.group_index >= 0, rows.rewards, torch.nan)  # NaN in padding rows
        signals["version"] = version
        if packed is not None:
            signals["num_tokens"] = packed.num_tokens, packed.num_row_tokens
        if not self.trains_rewards:
            loss = torch.zeros_like(loss)  # not 0 times it, which may be infinite
        if divergence is not None and self.distillation is not None:
            loss = loss + self.distillation.coefficient * (batch.token_weights * divergence).sum()
        loss = loss + self._penalty(stats, reference_logprobs, batch)
        signals["loss"] = loss.detach()
        return loss, signals

    def _estimators(self) -> list[_Estimator]:
        """The estimators that the loss sums; of a blend those with a share, the one with a baseline first."""
        blend = self.correction
        if not isinstance(blend, BlendedIS):
            return [_Estimator(1.0, blend, self.baseline)]
        both = [_Estimator(blend.share, blend.sequence, self.baseline), _Estimator(1 - blend.share, blend.token, None)]
        return [estimator for estimator in both if estimator.share > 0]

    def _proximal_logprobs(
        self,
        logprobs: Float[Tensor, "B T"],
        reference: Float[Tensor, "B T"] | None,
        staleness: Int[Tensor, "B T"],
        batch: RolloutBatch,
    ) -> Float[Tensor, "B T"]:
        if not self.loss.needs_reference:
            proximal = self.proximal(logprobs, batch.behavior_logprobs, staleness)
            owner = f"model.proximal={type(self.proximal).__name__}"
            check_token_shape(owner, "its log-probabilities", proximal, shape=tuple(logprobs.shape))
            return proximal
        if reference is None:
            raise SetupError("the loss needs a reference policy, but there is none")
        return reference

    def _penalty(
        self, stats: TokenStats, reference: Float[Tensor, "B T"] | None, batch: RolloutBatch
    ) -> Float[Tensor, ""]:
        """KL to the reference less the entropy bonus."""
        penalty = stats.logprobs.new_zeros(())
        if reference is not None and self.kl_coefficient > 0:
            kl = reference_kl(
                self.kl_estimator,
                logprobs=stats.logprobs,
                reference_logprobs=reference,
                behavior_logprobs=batch.behavior_logprobs,
                loss_mask=batch.loss_mask,
                group_index=batch.group_index,
            )
            penalty = self.kl_coefficient * (batch.token_weights * kl).sum()
        if self.entropy_coefficient != 0:
            penalty = penalty - self.entropy_coefficient * (batch.token_weights * stats.entropy).sum()
        return penalty


def _of_rollouts(stats: TokenStats, rollouts: WholeRollouts) -> TokenStats:
    """Statistics with one row for each rollout."""
    return TokenStats(
        logprobs=rollouts.of_tokens(stats.logprobs),
        entropy=rollouts.of_tokens(stats.entropy),
        head=rollouts.of_tokens(stats.head),
    )


def _blended(estimators: Sequence[_Estimator], values: Sequence[Tensor]) -> Tensor:
    """Mean of the estimators' values by their shares; the value itself of a single one."""
    if len(values) == 1:
        return values[0]
    return sum((e.share * value for e, value in zip(estimators, values, strict=True)), torch.zeros_like(values[0]))


def _loss_inputs(
    stats: TokenStats,
    proximal_logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    staleness: Int[Tensor, "B T"],
    batch: RolloutBatch,
) -> LossInputs:
    return LossInputs(
        logprobs=stats.logprobs,
        proximal_logprobs=proximal_logprobs,
        behavior_logprobs=batch.behavior_logprobs,
        advantages=advantages,
        loss_mask=batch.loss_mask,
        staleness=staleness,
        token_weights=batch.token_weights,
        group_index=batch.group_index,
        head_logprobs=None if batch.head_logprobs is None else stats.head,
        head_behavior_logprobs=batch.head_logprobs,
        behavior_entropy=batch.behavior_entropy,
    )


def _divergence(
    distiller: Distiller, view: TeacherView, stats: TokenStats, batch: RolloutBatch
) -> Float[Tensor, "B T"]:
    """Divergence from the teacher at each token that trains, with gradient."""
    if stats.compared is not None:
        return stats.compared
    if stats.more is not None:
        return torch.where(batch.loss_mask, distiller.of_head(stats.more, view), 0.0)
    return distiller.of_tokens(stats.logprobs, distiller.ready.sampled(batch), batch)
