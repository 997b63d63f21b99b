"""ESTR: a trust region that is as wide as the sampler was uncertain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from lit_async_rl.losses.base import LossInputs, LossOutput, PolicyLoss
from lit_async_rl.losses.clipped import check_clip, clipped_surrogate
from lit_async_rl.utils.checks import check_range


@dataclass(frozen=True)
class ESTR(PolicyLoss):
    """PPO-clip on the tokens with d^2 / (H + eps) <= tau; the others get no gradient, and stay in the average.

    d = log pi - log mu, H the entropy of mu at the token (`data.sampling.head: 0` records it). The expected square of d
    grows with H, so that one bound for all tokens keeps the noise of nearly certain tokens and cuts exploration where
    the sampler was undecided. Entropy-scaled trust region, arXiv:2607.22186; its tau could not be found: calibrate it
    by the share of tokens that is cut, which is logged.

    Args:
        tau: largest scaled square; `inf` is PPO-clip.
        eps: added to the entropy, in nats.
        clip_low: how far r may fall below 1.
        clip_high: how far r may rise above 1.

    Raises:
        ValueError: a setting is out of range.
    """

    needs_behavior_proximal: ClassVar[bool] = True
    needs_entropy: ClassVar[bool] = True
    needs_head: ClassVar[int | None] = 0

    tau: float = 0.5
    eps: float = 0.01
    clip_low: float = 0.2
    clip_high: float = 0.2

    def __post_init__(self) -> None:
        check_range("ESTR", "> 0", tau=self.tau, eps=self.eps)
        check_clip("ESTR", self.clip_low, self.clip_high)

    def token_loss(self, inputs: LossInputs) -> LossOutput:
        """PPO-clip, with 0 at the tokens outside of the region."""
        if inputs.behavior_entropy is None:
            raise ValueError("ESTR needs the entropy of the sampling distribution: set data.sampling.head: 0")
        if inputs.behavior_entropy.isnan().any():  # nothing is farther than NaN: that would be PPO-clip
            raise ValueError("ESTR needs the entropy of the sampling distribution, which the engine has not recorded")
        loss, cut = clipped_surrogate(inputs.ratio, inputs.advantages, 1 - self.clip_low, 1 + self.clip_high)
        outside = inputs.log_ratio.detach().square() > self.tau * (inputs.behavior_entropy + self.eps)
        return LossOutput(per_token=torch.where(outside, 0.0, loss), clipped=cut | outside)
