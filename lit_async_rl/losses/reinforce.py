"""REINFORCE-style losses: the gradient is a detached weight times A grad log pi, and no token is masked."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from lit_async_rl.losses.base import LossInputs, LossOutput, PolicyLoss, surrogate
from lit_async_rl.utils.checks import check_range


@dataclass(frozen=True)
class Reinforce(PolicyLoss):
    """Policy gradient: L = -A log pi. Williams 1992.

    Off-policy data need a correction (`lit_async_rl.corrections`) with `proximal: CurrentProximal`: its weights
    pi / mu then multiply each token's loss. With `SequenceTruncatedIS(cap=8.0)` that is the base objective of VCPO
    (arXiv:2602.17616; from its released code, the paper's text could not be checked).
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

    MiniMax-M1, arXiv:2506.13585 (formula as several frameworks implement it; the paper's text could not be checked).
    Only the upper bound is active in the original, so `clip_low` is off by default. The paper's bound could not be
    checked: implementations range from 1.02 (PipelineRL, whose REINFORCE is the same loss) to 5; the default here is 5.

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
        weights = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        return LossOutput(per_token=surrogate(weights, inputs), clipped=weights != ratio)


@dataclass(frozen=True)
class SAPO(PolicyLoss):
    """Soft gate instead of a clip: L = -(4 / tau) sigmoid(tau (r - 1)) A, r = pi / pi_prox.

    The gradient weight r / cosh(tau (r - 1) / 2)^2 is 1 on-policy and fades smoothly on both sides. Qwen,
    arXiv:2511.20347 (formula and defaults as in three frameworks; the paper's text could not be checked).

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
