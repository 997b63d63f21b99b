"""Trust-region losses bounded by probability differences, binary KL or second moments instead of ratios."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lit_async_rl.importance import gather_over_ranks, second_moment_excess
from lit_async_rl.losses.base import LossInputs, LossOutput, PolicyLoss, surrogate
from lit_async_rl.losses.clipped import clipped_surrogate, is_truncated
from lit_async_rl.utils.checks import check_range


def _probability_change(inputs: LossInputs) -> Float[Tensor, "B T"]:
    return inputs.logprobs.detach().exp() - inputs.proximal_logprobs.exp()


def _masked_surrogate(inputs: LossInputs, dropped: Bool[Tensor, "B T"], kl_coefficient: float) -> LossOutput:
    """-keep r A + kl_coefficient (log r)^2, with gradient."""
    log_ratio = inputs.log_ratio
    loss = -torch.where(dropped, 0.0, log_ratio.exp()) * inputs.advantages + kl_coefficient * log_ratio.square()
    return LossOutput(per_token=loss, clipped=dropped)


@dataclass(frozen=True)
class DPPO(PolicyLoss):
    """L = -keep r A + kl (log r)^2; a token is masked once its *probability* moved too far along its advantage.

    keep = not (A > 0 and pi - mu > max_increase, or A <= 0 and pi - mu < -max_decrease). Ratios mislead for rare
    tokens: from 1e-6 to 1e-5 is a ratio of 10 and hardly a change. arXiv:2602.04879, formula and constants from
    prime-rl, without its factor on the advantage (1 there); the paper's text could not be checked. verl's `dppo_tv` has
    no squared log-ratio, and its gradient is that of log pi with the detached weight min(r, 20).

    Args:
        max_increase: largest rise of the probability where A > 0.
        max_decrease: largest fall where A <= 0.
        kl_coefficient: coefficient of the squared log-ratio, which also acts on dropped tokens.

    Raises:
        ValueError: a setting is negative.
    """

    max_increase: float = 0.2
    max_decrease: float = 0.2
    kl_coefficient: float = 1e-3

    needs_behavior_proximal: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_range("DPPO", ">= 0", **vars(self))

    def token_loss(self, inputs: LossInputs) -> LossOutput:
        """-keep r A + kl (log r)^2."""
        change = _probability_change(inputs)
        positive = inputs.advantages > 0
        dropped = (positive & (change > self.max_increase)) | (~positive & (change < -self.max_decrease))
        return _masked_surrogate(inputs, dropped, self.kl_coefficient)


@dataclass(frozen=True)
class IPO(PolicyLoss):
    """`DPPO` with a two-sided mask: keep = |pi - mu| <= threshold, independent of the advantage. From prime-rl.

    Args:
        threshold: largest change of the probability.
        kl_coefficient: coefficient of the squared log-ratio, which also acts on dropped tokens.

    Raises:
        ValueError: a setting is negative.
    """

    threshold: float = 0.1
    kl_coefficient: float = 1e-3

    needs_behavior_proximal: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_range("IPO", ">= 0", **vars(self))

    def token_loss(self, inputs: LossInputs) -> LossOutput:
        """-keep r A + kl (log r)^2."""
        return _masked_surrogate(inputs, _probability_change(inputs).abs() > self.threshold, self.kl_coefficient)


@dataclass(frozen=True)
class DPPOBinaryKL(PolicyLoss):
    """L = -keep sg(min(r, cap)) A log pi; keep = the binary KL of the sampled token is small.

    KL = p log(p / q) + (1 - p) log((1 - p) / (1 - q)), p = mu's and q = pi's probability; a token is dropped only where
    the advantage pushes it further (A > 0 and r > 1, or A < 0 and r < 1). arXiv:2602.04879, as in verl; the default
    threshold is not the paper's, which could not be checked.

    Args:
        threshold: largest KL, in nats.
        cap: largest weight.

    Raises:
        ValueError: a setting is out of range.
    """

    threshold: float = 0.05
    cap: float = 20.0

    needs_behavior_proximal: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_range("DPPOBinaryKL", ">= 0", threshold=self.threshold)
        check_range("DPPOBinaryKL", ">= 1", cap=self.cap)

    def token_loss(self, inputs: LossInputs) -> LossOutput:
        """-keep sg(min(r, cap)) A log pi."""
        ratio = inputs.ratio
        divergence = binary_kl(inputs.proximal_logprobs, inputs.logprobs.detach())
        away = ((inputs.advantages > 0) & (ratio > 1)) | ((inputs.advantages < 0) & (ratio < 1))
        dropped = away & (divergence > self.threshold)
        weights = torch.where(dropped, 0.0, ratio.clamp(max=self.cap))
        return LossOutput(per_token=surrogate(weights, inputs), clipped=dropped | is_truncated(ratio, 0.0, self.cap))


def binary_kl(logprobs_p: Float[Tensor, "*shape"], logprobs_q: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """KL divergence of two Bernoulli distributions with the probabilities p and q of the sampled token."""
    # float64, because 1 - p loses its digits near p = 1 in float32; clamped, because log(1 - p) is infinite at p = 1
    logprobs_p = logprobs_p.double().clamp(max=-1e-12)
    logprobs_q = logprobs_q.double().clamp(max=-1e-12)
    others_p = -torch.expm1(logprobs_p)
    others_q = -torch.expm1(logprobs_q)
    divergence = logprobs_p.exp() * (logprobs_p - logprobs_q) + others_p * (others_p.log() - others_q.log())
    return divergence.clamp(min=0).float()


def _pushed_outward(inputs: LossInputs) -> Bool[Tensor, "B T"]:
    """Mask of tokens that their advantage pushes further from the proximal policy: only these can leave the region."""
    log_ratio = inputs.log_ratio
    pushed = ((inputs.advantages > 0) & (log_ratio > 0)) | ((inputs.advantages < 0) & (log_ratio < 0))
    return pushed & inputs.loss_mask


@dataclass(frozen=True)
class M2PO(PolicyLoss):
    """Second-moment trust region: L = -M r A without a clip, M drops tokens until mean (log r)^2 <= budget.

    The mean is over tokens that move further away (A > 0 and r > 1, or A < 0 and r < 1); while it is above the budget,
    the token with the largest (log r)^2 is dropped. arXiv:2510.01161 v2, algorithm 1, but over the micro-batch of all
    ranks (a collective), where the paper takes the training batch: the same with one micro-batch per step. The released
    code differs (`M2POAdaptiveClip`), and so does AReaL (`lit_async_rl.corrections.SecondMomentMask`).

    Args:
        budget: largest mean of (log r)^2; the paper reports little sensitivity up to 0.1.

    Raises:
        ValueError: the budget is negative.
    """

    budget: float = 0.04

    needs_behavior_proximal: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_range("M2PO", ">= 0", budget=self.budget)

    def token_loss(self, inputs: LossInputs) -> LossOutput:
        """-M r A."""
        dropped = second_moment_excess(inputs.log_ratio.detach().square(), _pushed_outward(inputs), self.budget)
        return _masked_surrogate(inputs, dropped, kl_coefficient=0.0)


@dataclass(frozen=True)
class M2POAdaptiveClip(PolicyLoss):
    """PPO-clip with bounds [e^-c, e^c], c such that mean min((log r)^2, c^2) = budget over tokens moving further away.

    The rule of M2PO's released code (per micro-batch of all ranks, a collective) in place of the paper's mask. Nothing
    is clipped while the mean is within the budget. Unlike there, c is exact, not approximated, and there are no floors
    under the clip range (0.3 and 0.5, inactive in the code's runs).

    Args:
        budget: largest mean of the capped (log r)^2.

    Raises:
        ValueError: the budget is not positive.
    """

    budget: float = 0.04

    needs_behavior_proximal: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_range("M2POAdaptiveClip", "> 0", budget=self.budget)

    def token_loss(self, inputs: LossInputs) -> LossOutput:
        """-min(r A, clip(r, e^-c, e^c) A)."""
        ratio = inputs.ratio
        squares = gather_over_ranks(inputs.log_ratio.detach().square()[_pushed_outward(inputs)])
        bound = math.sqrt(water_level(squares, self.budget))
        loss, cut = clipped_surrogate(ratio, inputs.advantages, math.exp(-bound), high=math.exp(min(bound, 80.0)))
        return LossOutput(per_token=loss, clipped=cut)


def water_level(values: Float[Tensor, " N"], budget: float) -> float:
    """Level c with mean min(values, c) = budget; infinite if the mean of the values is within the budget."""
    num = values.numel()
    if num == 0 or values.double().mean().item() <= budget:
        return math.inf
    values = values.double().sort().values
    below = torch.cat([values.new_zeros(1), values.cumsum(0)[:-1]])  # sum of the k smallest, k = 0 .. N - 1
    levels = (budget * num - below) / torch.arange(num, 0, -1, device=values.device)
    return levels[(levels <= values).int().argmax()].item()  # the first k whose level does not reach the next value
