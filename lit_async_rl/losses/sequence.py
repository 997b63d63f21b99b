"""Sequence-level losses: one importance weight or clip decision per completion."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from lit_async_rl.importance import MAX_LOG_RATIO, safe_exp
from lit_async_rl.losses.base import LossInputs, LossOutput, PolicyLoss, surrogate
from lit_async_rl.losses.clipped import check_clip, clipped_surrogate, is_truncated
from lit_async_rl.utils.checks import check_range


@dataclass(frozen=True)
class GSPO(PolicyLoss):
    """PPO-clip of the geometric-mean ratio s_i = (prod_t r_t)^(1 / L_i): L = -min(s A, clip(s, 1 - low, 1 + high) A).

    Every token takes the value of its completion; use `SequenceMean`, as the paper does. arXiv:2507.18071 (formula and
    defaults read through three frameworks).

    Args:
        clip_low: how far s may fall below 1.
        clip_high: how far s may rise above 1.

    Raises:
        ValueError: a bound is negative.
    """

    clip_low: float = 3e-4
    clip_high: float = 4e-4

    def __post_init__(self) -> None:
        check_clip("GSPO", self.clip_low, self.clip_high)

    def token_loss(self, inputs: LossInputs) -> LossOutput:
        """-min(s A, clip(s) A)."""
        ratio = safe_exp(inputs.geometric_log_ratio)
        loss, cut = clipped_surrogate(ratio, inputs.advantages, 1 - self.clip_low, high=1 + self.clip_high)
        return LossOutput(per_token=loss, clipped=cut)


@dataclass(frozen=True)
class GSPOToken(PolicyLoss):
    """GSPO's token variant: s_t = sg(s_i) pi / sg(pi), so that advantages may differ between tokens of a completion.

    arXiv:2507.18071. Same gradient as `GSPO` when advantages and token weights are constant over a completion.

    Args:
        clip_low: how far s may fall below 1.
        clip_high: how far s may rise above 1.

    Raises:
        ValueError: a bound is negative.
    """

    clip_low: float = 3e-4
    clip_high: float = 4e-4

    def __post_init__(self) -> None:
        check_clip("GSPOToken", self.clip_low, self.clip_high)

    def token_loss(self, inputs: LossInputs) -> LossOutput:
        """-min(s_t A, clip(s_t) A)."""
        ratio = safe_exp(inputs.geometric_log_ratio).detach() * (inputs.logprobs - inputs.logprobs.detach()).exp()
        loss, cut = clipped_surrogate(ratio, inputs.advantages, 1 - self.clip_low, high=1 + self.clip_high)
        return LossOutput(per_token=loss, clipped=cut)


@dataclass(frozen=True)
class TOPR(PolicyLoss):
    """Tapered off-policy REINFORCE: L = -sg(clip(w_i, low, high)) A log pi, w_i = prod_t r_t, bounds by the sign of A.

    With the paper's bounds, the defaults, good completions have weight 1 at any ratio, and bad ones min(w, 1), so that
    unlikely completions are not pushed down further. arXiv:2503.14286, no official code; the paper splits by the sign
    of the *reward* (±1, no baseline), which is the sign of A with `Raw` advantages. Unlike the paper, ROLL takes token
    ratios, other frameworks length-normalised ones.

    Args:
        positive_low: smallest weight where A > 0.
        positive_high: largest weight where A > 0.
        negative_low: smallest weight elsewhere.
        negative_high: largest weight elsewhere.

    Raises:
        ValueError: bounds are negative or in the wrong order.
    """

    positive_low: float = 1.0
    positive_high: float = 1.0
    negative_low: float = 0.0
    negative_high: float = 1.0

    needs_behavior_proximal: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_range("TOPR", ">= 0", positive_low=self.positive_low, negative_low=self.negative_low)
        check_range("TOPR", f">= {self.positive_low}", positive_high=self.positive_high)
        check_range("TOPR", f">= {self.negative_low}", negative_high=self.negative_high)

    def token_loss(self, inputs: LossInputs) -> LossOutput:
        """-sg(clip(w)) A log pi."""
        ratio = safe_exp(inputs.sequence_log_ratio).expand_as(inputs.logprobs)
        good = inputs.advantages > 0
        low = torch.where(good, ratio.new_tensor(self.positive_low), self.negative_low)
        high = torch.where(good, ratio.new_tensor(self.positive_high), self.negative_high)
        # a constant weight does not cut the gradient of any token
        is_constant = good & (self.positive_low == self.positive_high)
        cut = is_truncated(ratio, low, high, num_tokens=inputs.loss_mask.sum(-1, keepdim=True)) & ~is_constant
        return LossOutput(per_token=surrogate(ratio.clamp(low, high), inputs), clipped=cut)


@dataclass(frozen=True)
class VESPO(PolicyLoss):
    """Smooth sequence weight: L = -sg(phi(W_i)) A log pi, phi(W) = W^c1 exp(c2 (1 - W)), W_i = prod_t r_t.

    phi(1) = 1 is close to the maximum, and phi vanishes on both sides: weights of long stale completions underflow to
    0, so monitor their mean. arXiv:2602.10693 v3, with its constants; log W is limited to ±20 as in its code.

    Args:
        c1_positive: exponent where A >= 0.
        c2_positive: decay where A >= 0.
        c1_negative: exponent where A < 0.
        c2_negative: decay where A < 0.

    Raises:
        ValueError: a constant is negative.
    """

    c1_positive: float = 2.0
    c2_positive: float = 3.0
    c1_negative: float = 3.0
    c2_negative: float = 2.0

    needs_behavior_proximal: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_range("VESPO", ">= 0", **vars(self))

    def token_loss(self, inputs: LossInputs) -> LossOutput:
        """-sg(phi(W)) A log pi."""
        log_w = inputs.sequence_log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        positive = self.c1_positive * log_w + self.c2_positive * (1 - log_w.exp())
        negative = self.c1_negative * log_w + self.c2_negative * (1 - log_w.exp())
        weights = torch.where(inputs.advantages >= 0, positive, negative).exp()
        return LossOutput(per_token=surrogate(weights, inputs), clipped=torch.zeros_like(inputs.loss_mask))
