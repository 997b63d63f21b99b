"""Prefix ratios: the weight of a token also depends on the ratios of the tokens before it.

The off-policy policy gradient of token t is weighted by the ratio of the whole prefix, prod over i <= t of r_i, whose
variance grows with t. Both losses replace the product by something that does not accumulate. Tokens that do not train
(a tool's answer) are not part of any prefix. r = pi / pi_prox of a token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lit_async_rl.importance import masked, safe_exp
from lit_async_rl.losses.base import LossInputs, LossOutput, PolicyLoss, surrogate
from lit_async_rl.losses.clipped import check_clip, clipped_surrogate
from lit_async_rl.utils.checks import check_range


def minimum_before(log_ratio: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Smallest log-ratio of the trained tokens before each token; 0 where there is none."""
    values = torch.where(mask, log_ratio, math.inf)
    values = torch.cat([torch.full_like(values[:, :1], math.inf), values[:, :-1]], dim=1)
    smallest = values.cummin(dim=1).values
    return torch.where(smallest == math.inf, 0.0, smallest)


def mean_up_to(log_ratio: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Mean log-ratio of the trained tokens up to and including each token."""
    return masked(log_ratio, mask).cumsum(dim=1) / mask.cumsum(dim=1).clamp(min=1)


@dataclass(frozen=True)
class MinPRO(PolicyLoss):
    """L = -sg(min(w, cap)) A log pi with w_t = r_t min over i < t of r_i (w_1 = r_1). arXiv:2601.22718.

    The smallest ratio of the preceding tokens stands for the product of all of them. From the paper's abstract; its
    truncation could not be checked: the cap is that of truncated importance sampling.

    Args:
        cap: largest weight; `inf` does not truncate.

    Raises:
        ValueError: the cap is not positive.
    """

    cap: float = 2.0

    def __post_init__(self) -> None:
        check_range("MinPRO", "> 0", cap=self.cap)

    def token_loss(self, inputs: LossInputs) -> LossOutput:
        """-sg(min(w, cap)) A log pi."""
        log_ratio = inputs.log_ratio.detach()
        weights = safe_exp(log_ratio + minimum_before(log_ratio, inputs.loss_mask))
        return LossOutput(per_token=surrogate(weights.clamp(max=self.cap), inputs), clipped=weights > self.cap)


@dataclass(frozen=True)
class PNPO(PolicyLoss):
    """L = -min(s A, clip(s, 1 - low, 1 + high) A), s_t the geometric mean of r_1 ... r_t. arXiv:2608.01418.

    s_t has the gradient of its own token, s_t grad log pi_t, as in GSPO-token: the last token's s is GSPO's ratio. From
    a summary of the paper; its text, its bounds and the gradient through the prefix could not be checked.

    Args:
        clip_low: how far s may fall below 1; `inf` does not clip.
        clip_high: how far s may rise above 1; `inf` does not clip.

    Raises:
        ValueError: a bound is negative.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2

    def __post_init__(self) -> None:
        check_clip("PNPO", self.clip_low, self.clip_high)

    def token_loss(self, inputs: LossInputs) -> LossOutput:
        """-min(s A, clip(s) A)."""
        prefix = safe_exp(mean_up_to(inputs.log_ratio.detach(), inputs.loss_mask))
        one = (inputs.logprobs - inputs.logprobs.detach()).exp()  # carries the gradient of log pi
        loss, cut = clipped_surrogate(prefix * one, inputs.advantages, 1 - self.clip_low, 1 + self.clip_high)
        return LossOutput(per_token=loss, clipped=cut)
