"""What every loss takes and gives. B rollouts, T positions; rows are whole completions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lit_async_rl.importance import MAX_LOG_RATIO, geometric_log_ratio, masked, sequence_log_ratio


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """One micro-batch, as losses see it.

    Attributes:
        logprobs: of the policy being trained, with gradient.
        anchor_logprobs: of the policy that ratios are taken against (see `corrections.proximal`), without gradient.
        behavior_logprobs: of the policy that sampled.
        staleness: versions between sampling and now.
        token_weights: what each token counts in the average over the step.
        group_index: completions of one prompt have the same number.
    """

    logprobs: Float[Tensor, "B T"]
    anchor_logprobs: Float[Tensor, "B T"]
    behavior_logprobs: Float[Tensor, "B T"]
    advantages: Float[Tensor, "B T"]
    loss_mask: Bool[Tensor, "B T"]
    staleness: Int[Tensor, "B T"]
    token_weights: Float[Tensor, "B T"]
    group_index: Int[Tensor, " B"]

    @property
    def log_ratio(self) -> Float[Tensor, "B T"]:
        """Of tokens: log r = log pi - log anchor, with gradient; limited to ±20, beyond which the gradient is 0."""
        return (self.logprobs - self.anchor_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    @property
    def ratio(self) -> Float[Tensor, "B T"]:
        """Of tokens: r = pi / anchor, with gradient."""
        return self.log_ratio.exp()

    @property
    def sequence_log_ratio(self) -> Float[Tensor, "B 1"]:
        """Of completions: log w_i = sum over tokens of log pi - log anchor, with gradient, not limited."""
        return sequence_log_ratio(self.logprobs - self.anchor_logprobs, self.loss_mask)[:, None]

    @property
    def geometric_log_ratio(self) -> Float[Tensor, "B 1"]:
        """Of completions, the mean over tokens: (log w_i) / L_i, with gradient, not limited."""
        return geometric_log_ratio(self.logprobs - self.anchor_logprobs, self.loss_mask)[:, None]

    def cleaned(self) -> LossInputs:
        """The same with 0 wherever a token does not train.

        A completion with a number that is not finite does not train at all: one broken token says nothing good about
        the others, and would make every ratio of the sequence wrong.
        """
        finite = torch.ones_like(self.loss_mask)
        for values in (self.logprobs, self.anchor_logprobs, self.behavior_logprobs, self.advantages):
            finite &= values.isfinite()
        usable = self.loss_mask & (finite | ~self.loss_mask).all(-1, keepdim=True)
        return replace(
            self,
            logprobs=masked(self.logprobs, usable),
            anchor_logprobs=masked(self.anchor_logprobs, usable),
            behavior_logprobs=masked(self.behavior_logprobs, usable),
            advantages=masked(self.advantages, usable),
            token_weights=masked(self.token_weights, usable),
            staleness=torch.where(usable, self.staleness, 0),
            loss_mask=usable,
        )


@dataclass(frozen=True, kw_only=True)
class LossOutput:
    """`per_token` is never reduced and 0 where `loss_mask` is False; `clipped` marks tokens whose gradient was cut."""

    per_token: Float[Tensor, "B T"]
    clipped: Bool[Tensor, "B T"]


class PolicyLoss(ABC):
    """A per-token loss; averaging is a separate choice (`lit_async_rl.losses.aggregation`).

    Subclasses write `token_loss` and never meet padding or numbers that are not finite.

    Attributes:
        anchored: True if the loss contains the ratio to the anchor, False if it only takes log-probabilities (then
            ratios enter as correction weights).
        needs_behavior_anchor: True if that ratio is the method's own correction of off-policy data, so that it must be
            the ratio to the policy that sampled, and any other correction would count twice.
        needs_reference: True if the anchor is the frozen reference policy.
        needs_whole_groups: True if it compares the completions of one prompt, which must be in one micro-batch.
    """

    anchored: ClassVar[bool] = True
    needs_behavior_anchor: ClassVar[bool] = False
    needs_reference: ClassVar[bool] = False
    needs_whole_groups: ClassVar[bool] = False

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Loss of each token, exactly 0 with gradient exactly 0 where `loss_mask` is False, whatever stands there."""
        clean = inputs.cleaned()
        output = self.token_loss(clean)
        return LossOutput(
            per_token=masked(output.per_token, clean.loss_mask),
            clipped=torch.where(clean.loss_mask, output.clipped, inputs.loss_mask),
        )

    @abstractmethod
    def token_loss(self, inputs: LossInputs) -> LossOutput:
        """The formula. All inputs are finite, and 0 where `loss_mask` is False; the output may be anything there."""


def surrogate(weights: Float[Tensor, "B T"], inputs: LossInputs) -> Float[Tensor, "B T"]:
    """-sg(weight) * A * log pi: REINFORCE's loss with a weight that carries no gradient."""
    return -weights.detach() * inputs.advantages * inputs.logprobs
