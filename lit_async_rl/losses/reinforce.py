"""REINFORCE-style losses: the gradient is a detached weight times A grad log pi, and no token is masked."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from lit_async_rl.importance import masked, safe_exp
from lit_async_rl.losses.base import LossInputs, LossOutput, PolicyLoss, surrogate
from lit_async_rl.losses.clipped import is_truncated
from lit_async_rl.utils.checks import check_range


@dataclass(frozen=True)
class Reinforce(PolicyLoss):
    """Policy gradient: L = -A log pi. Williams 1992.

    Off-policy data need a correction (`lit_async_rl.corrections`) with `proximal: CurrentProximal`, whose weights
    pi / mu multiply each token's loss. With `SequenceTruncatedIS(cap=8.0)` this is the base objective of VCPO
    (arXiv:2602.17616, from its released code).
    """

    uses_proximal: ClassVar[bool] = False

    def token_loss(self, inputs: LossInputs) -> LossOutput:
        """-A log pi."""
        return LossOutput(
            per_token=surrogate(torch.ones_like(inputs.logprobs), inputs), clipped=torch.zeros_like(inputs.loss_mask)
        )


@dataclass(frozen=True)
class CISPO(PolicyLoss):
    """Truncated, detached weight: L = -sg(clip(r, 1 - low, 1 + high)) A log pi, r = pi / pi_prox; no token is masked.

    MiniMax-M1, arXiv:2506.13585, with the formula of several frameworks; the paper's text could not be checked. Only
    the upper bound is active in the original, so `clip_low` is off by default. Implementations bound the weight
    by 1.02 (PipelineRL's REINFORCE, the same loss) to 5, the default here.

    Args:
        clip_low: how far below 1 the weight may fall; `inf` does not bound it.
        clip_high: how far above 1 the weight may rise.

    Raises:
        ValueError: a bound is negative.
    """

    clip_low: float = math.inf
    clip_high: float = 4.0

    def __post_init__(self) -> None:
        check_range("CISPO", ">= 0", clip_low=self.clip_low, clip_high=self.clip_high)

    def token_loss(self, inputs: LossInputs) -> LossOutput:
        """-sg(clip(r)) A log pi."""
        ratio = inputs.ratio
        low = 1 - self.clip_low
        high = 1 + self.clip_high
        loss = surrogate(ratio.clamp(low, high), inputs)
        return LossOutput(per_token=loss, clipped=is_truncated(ratio, low, high))


@dataclass(frozen=True)
class SAPO(PolicyLoss):
    """Soft gate instead of a clip: L = -(4 / tau) sigmoid(tau (r - 1)) A, r = pi / pi_prox.

    The gradient weight r / cosh(tau (r - 1) / 2)^2 is 1 on-policy and fades smoothly on both sides. Qwen,
    arXiv:2511.20347, formula and defaults from three frameworks; the paper's text could not be checked.

    Args:
        tau_positive: sharpness of the gate where A > 0.
        tau_negative: sharpness elsewhere; larger, because negative tokens are less stable.

    Raises:
        ValueError: a sharpness is not positive.
    """

    tau_positive: float = 1.0
    tau_negative: float = 1.05

    def __post_init__(self) -> None:
        check_range("SAPO", "> 0", tau_positive=self.tau_positive, tau_negative=self.tau_negative)

    def token_loss(self, inputs: LossInputs) -> LossOutput:
        """-(4 / tau) sigmoid(tau (r - 1)) A."""
        tau = torch.full_like(inputs.advantages, self.tau_negative).masked_fill(
            inputs.advantages > 0, self.tau_positive
        )
        gate = 4 / tau * torch.sigmoid(tau * (inputs.ratio - 1))
        return LossOutput(per_token=-gate * inputs.advantages, clipped=torch.zeros_like(inputs.loss_mask))


# -- Score centering: REINFORCE on off-policy data without the drift of its score's expectation -----------------------


MIN_TAIL_PROBABILITY = 1e-6  # rounding error of a float32 sum of probabilities


class ImportanceWeight(Enum):
    """f(r) of a token's ratio r = pi / mu."""

    NONE = "none"  # 1
    TRUNCATED = "truncated"  # min(r, cap)
    MASKED = "masked"  # r inside [low, high], else 0
    FULL = "full"  # r


@dataclass(frozen=True)
class ScoreCentering(PolicyLoss):
    """REINFORCE with weights w = f(pi / mu) and the score's expectation under the sampler subtracted.

    On-policy the score s_v = grad log pi_v has expectation 0. Under another sampler mu it does not, and the term E[A]
    E_mu[w s] of the gradient moves the policy wherever the mean advantage is not 0. With that term subtracted, per
    token y:

        L = -A (sg(w_y) log pi_y - sum over v in H of sg(mu_v w_v - alpha pi_v) log pi_v)

    H are the k likeliest tokens under mu (`data.sampling.head: k`), with their true probabilities; outside of H, mu_v
    is approximated by rho pi_v, rho = (1 - sum_H mu) / (1 - sum_H pi), and alpha = rho f(1 / rho). Exact where H is the
    whole vocabulary (or the whole support of a truncated sampler). f(r) = r needs no centering, and gets none.
    arXiv:2609.20807, with k = 128 and advantages not divided by their standard deviation (`GroupMean`).

    Args:
        weight: f: `NONE` (score centering alone), `TRUNCATED` (with TIS), `MASKED` (with MIS) or `FULL`.
        cap: largest weight of `TRUNCATED`.
        low: smallest ratio that `MASKED` keeps.
        high: largest ratio that `MASKED` keeps.

    Raises:
        ValueError: a bound is out of range.
    """

    needs_behavior_proximal: ClassVar[bool] = True
    needs_head: ClassVar[int | None] = 1

    weight: ImportanceWeight = ImportanceWeight.NONE
    cap: float = 2.0
    low: float = 0.5
    high: float = 5.0

    def __post_init__(self) -> None:
        check_range("ScoreCentering", "> 0", cap=self.cap)
        check_range("ScoreCentering", ">= 0", low=self.low)
        check_range("ScoreCentering", f"> {self.low}", high=self.high)

    def weigh(self, log_ratio: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """The weight f(r) of each ratio, from log r."""
        ratio = safe_exp(log_ratio)
        match self.weight:
            case ImportanceWeight.NONE:
                return torch.ones_like(ratio)
            case ImportanceWeight.TRUNCATED:
                return ratio.clamp(max=self.cap)
            case ImportanceWeight.MASKED:
                return masked(ratio, (ratio >= self.low) & (ratio <= self.high))
            case ImportanceWeight.FULL:
                return ratio

    def centering(self, log_p: Float[Tensor, "B T k"], log_q: Float[Tensor, "B T k"]) -> Float[Tensor, "B T k"]:
        """mu_v w_v - alpha pi_v of the tokens of the head, from log pi (detached) and log mu; 0 where mu_v is 0."""
        possible = log_q > -math.inf
        p = log_p.exp()
        q = log_q.exp()
        weights = self.weigh(torch.where(possible, log_p - log_q, 0.0))
        rest_p, rest_q = ((1 - known.sum(-1, keepdim=True)).clamp(min=MIN_TAIL_PROBABILITY) for known in (p, q))
        rho = rest_q / rest_p
        alpha = rho * self.weigh(-rho.log())
        return torch.where(possible, q * weights - alpha * p, 0.0)

    def token_loss(self, inputs: LossInputs) -> LossOutput:
        """-A (sg(w) log pi - sum over the head of sg(mu w - alpha pi) log pi)."""
        log_p = inputs.head_logprobs
        log_q = inputs.head_behavior_logprobs
        if log_p is None or log_q is None or log_q.shape[-1] < 1:  # a tape may have been recorded with other settings
            raise ValueError("ScoreCentering needs the sampler's likeliest tokens: set data.sampling.head to 1 or more")
        weights = self.weigh(inputs.log_ratio.detach())
        score = weights * inputs.logprobs - (self.centering(log_p.detach(), log_q) * log_p).sum(-1)
        cap = self.cap if self.weight is ImportanceWeight.TRUNCATED else math.inf
        cut = (weights == 0) | is_truncated(inputs.ratio, 0.0, cap)
        return LossOutput(per_token=-inputs.advantages * score, clipped=cut)
