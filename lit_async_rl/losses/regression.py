"""Losses derived from regressing log-ratios on rewards: no importance weights, no clipping."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lit_async_rl.importance import masked
from lit_async_rl.losses.base import LossInputs, LossOutput, PolicyLoss, surrogate
from lit_async_rl.utils.checks import check_range


@dataclass(frozen=True)
class OPMD(PolicyLoss):
    """Online policy mirror descent in its simplest form: L = -A log pi / (1 + tau).

    As in Trinity-RFT (the method's derivation could not be checked). A = R - mean is `GroupMean`; the other baseline,
    tau log mean exp(R / tau), is `LogMeanExp`.

    Args:
        tau: temperature of the KL penalty.

    Raises:
        ValueError: tau is negative.
    """

    tau: float = 1.0

    uses_proximal: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_range("OPMD", ">= 0", tau=self.tau)

    def token_loss(self, inputs: LossInputs) -> LossOutput:
        """-A log pi / (1 + tau)."""
        weights = torch.full_like(inputs.logprobs, 1 / (1 + self.tau))
        return LossOutput(per_token=surrogate(weights, inputs), clipped=torch.zeros_like(inputs.loss_mask))


@dataclass(frozen=True)
class KimiRegression(PolicyLoss):
    """L = -A log pi + (tau / 2) (log pi - log pi_prox)^2: a quadratic penalty in place of a clip.

    After Kimi k1.5 (arXiv:2501.12599), per token as in ROLL; verl calls the same loss DRO. The paper's own form is per
    completion and could not be checked.

    Args:
        tau: coefficient of the quadratic penalty.

    Raises:
        ValueError: tau is negative.
    """

    tau: float = 0.1

    def __post_init__(self) -> None:
        check_range("KimiRegression", ">= 0", tau=self.tau)

    def token_loss(self, inputs: LossInputs) -> LossOutput:
        """-A log pi + (tau / 2) (log r)^2, with the log-ratio unclamped: the penalty must not vanish far away."""
        pull = self.tau / 2 * (inputs.logprobs - inputs.proximal_logprobs).square()
        loss = surrogate(torch.ones_like(inputs.logprobs), inputs) + pull
        return LossOutput(per_token=loss, clipped=torch.zeros_like(inputs.loss_mask))


# -- Squared losses: regress the log-ratio of a completion on its reward ----------------------------------------------
# The minimiser is the KL-regularised optimal policy for any sampling distribution, so data may be of any age. B
# rollouts, T positions.


def group_mean(
    values: Float[Tensor, " B"], group_index: Int[Tensor, " B"], counts: Bool[Tensor, " B"]
) -> Float[Tensor, " B"]:
    """Mean of each row's group over the rows for which `counts` is True; 0 if there are none."""
    same = ((group_index[:, None] == group_index) & counts).to(values.dtype)
    return (same @ masked(values, counts)) / same.sum(-1).clamp(min=1)


def spread_square(
    residual: Float[Tensor, " B"], logprobs: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """Spreads residual^2 evenly over the tokens of a completion, with the gradient 2 residual d log pi at each token.

    If all tokens have the weight w and d residual = d log pi of the completion, the weighted sum has the value and the
    gradient of w residual^2.
    """
    residual = residual.detach()[:, None]
    share = residual.square() / mask.sum(-1, keepdim=True).clamp(min=1)
    return share + 2 * residual * (logprobs - logprobs.detach())


def _row_advantage(inputs: LossInputs) -> Float[Tensor, " B"]:
    return inputs.advantages.sum(-1) / inputs.loss_mask.sum(-1).clamp(min=1)


@dataclass(frozen=True)
class TrajectoryBalance(PolicyLoss):
    """L_i = (log Z + log pi(y_i) - log ref(y_i) - r_i / beta)^2, log Z = mean of log ref - log pi + r / beta.

    TBA, arXiv:2503.18929 (VarGrad's estimate of log Z). With k_i = log pi(y_i) - log ref(y_i), log Z of the group
    without gradient, and A_i = r_i - mean r (`GroupMean`), the loss is ((k_i - mean k) - A_i / beta)^2, with the
    gradient -(2 / beta) (A_i - beta (k_i - mean k)) grad log pi(y_i): REINFORCE with the KL penalty in the reward, at
    the current log-probabilities.

    Groups must be whole in a micro-batch (`data.keep_groups_whole`, which `WeightSync` sets); every token must have
    the same weight (`FixedLength(1)` is the paper's mean of squares).

    Args:
        beta: strength of the KL penalty, constant here; the paper lowers it over time.

    Raises:
        ValueError: beta is not positive.
    """

    beta: float = 0.05

    needs_reference: ClassVar[bool] = True
    needs_whole_groups: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_range(type(self).__name__, "> 0", beta=self.beta)

    def residual(self, inputs: LossInputs) -> Float[Tensor, " B"]:
        """Residual (k - mean k) - A / beta; `proximal_logprobs` are those of the reference policy."""
        log_ratio = inputs.sequence_log_ratio[:, 0].detach()
        mean = group_mean(log_ratio, inputs.group_index, inputs.loss_mask.any(-1))
        return log_ratio - mean - _row_advantage(inputs) / self.beta

    def token_loss(self, inputs: LossInputs) -> LossOutput:
        """Squared residual, spread evenly over the tokens."""
        loss = spread_square(self.residual(inputs), inputs.logprobs, inputs.loss_mask)
        return LossOutput(per_token=loss, clipped=torch.zeros_like(inputs.loss_mask))


@dataclass(frozen=True)
class TrajectoryBalancePrime(TrajectoryBalance):
    """L_i = (beta log Z + beta k_i - r_i)^2 / (2 beta): `TrajectoryBalance` times beta / 2, on the scale of REINFORCE.

    TBA' of the authors' PRIME-RL fork, with `FixedLength(max_tokens)`. The fork takes log Z from the policy before the
    batch: the current one, with one optimizer step per batch.
    """

    beta: float = 0.005

    def token_loss(self, inputs: LossInputs) -> LossOutput:
        """Squared residual times beta / 2."""
        output = super().token_loss(inputs)
        return LossOutput(per_token=self.beta / 2 * output.per_token, clipped=output.clipped)


@dataclass(frozen=True)
class OAPL(PolicyLoss):
    """L_i = (beta log(pi(y_i) / mu(y_i)) - A_i)^2, A_i = r_i - V, V = tau log mean exp(r / tau) (`LogMeanExp(tau)`).

    Optimal-advantage regression, arXiv:2602.19362: fits mu exp(r / beta) / Z, the optimal policy under a KL penalty to
    the sampling policy mu. mu stays for `data.weight_sync_steps` optimizer steps; `data.max_staleness: 0` trains on no
    older data, like the paper's cleared buffer. beta and tau are the paper's beta_2 and beta_1, whose values there are
    not known.

    Args:
        beta: strength of the KL penalty.

    Raises:
        ValueError: beta is not positive.
    """

    beta: float = 0.1

    needs_behavior_proximal: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_range("OAPL", "> 0", beta=self.beta)

    def token_loss(self, inputs: LossInputs) -> LossOutput:
        """Squared residual, spread evenly over the tokens; d residual = beta d log pi."""
        residual = self.beta * inputs.sequence_log_ratio[:, 0].detach() - _row_advantage(inputs)
        loss = spread_square(residual, self.beta * inputs.logprobs, inputs.loss_mask)
        return LossOutput(per_token=loss, clipped=torch.zeros_like(inputs.loss_mask))
