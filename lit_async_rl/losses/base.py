"""What every loss takes and gives. B rollouts, T positions; rows are whole completions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """One micro-batch, as losses see it.

    Attributes:
        logprobs: of the policy being trained, with gradient.
        anchor_logprobs: of the policy that ratios are taken against (see `lit_async_rl.proximal`), without gradient.
        behavior_logprobs: of the policy that sampled.
        staleness: versions between sampling and now.
        token_weights: what each token counts in the average over the step.
    """

    logprobs: Float[Tensor, "B T"]
    anchor_logprobs: Float[Tensor, "B T"]
    behavior_logprobs: Float[Tensor, "B T"]
    advantages: Float[Tensor, "B T"]
    loss_mask: Bool[Tensor, "B T"]
    staleness: Int[Tensor, "B T"]
    token_weights: Float[Tensor, "B T"]

    @property
    def log_ratio(self) -> Float[Tensor, "B T"]:
        """log pi - log anchor, with gradient; exactly 0 where a token does not train, whatever stands there."""
        # the inner `where` keeps junk out of the gradient: 0 * NaN is NaN
        junk_free = torch.where(self.loss_mask, self.logprobs, 0.0) - torch.where(
            self.loss_mask, self.anchor_logprobs, 0.0
        )
        return torch.where(self.loss_mask, junk_free, 0.0)


@dataclass(frozen=True, kw_only=True)
class LossOutput:
    """`per_token` is never reduced and 0 where `loss_mask` is False; `clipped` marks tokens whose gradient was cut."""

    per_token: Float[Tensor, "B T"]
    clipped: Bool[Tensor, "B T"]


class PolicyLoss(ABC):
    """A per-token loss; averaging is a separate choice (`lit_async_rl.aggregation`).

    Attributes:
        anchored: True if the loss contains the ratio to the anchor, False if it only takes log-probabilities (then
            ratios enter as correction weights).
    """

    anchored: ClassVar[bool]

    @abstractmethod
    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Loss of each token."""
