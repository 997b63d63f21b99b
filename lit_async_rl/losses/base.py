"""Inputs, outputs and base class of policy losses. B rollouts, T positions; rows are whole completions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lit_async_rl.importance import MAX_LOG_RATIO, geometric_log_ratio, masked, sequence_log_ratio
from lit_async_rl.utils.checks import check_token_shape


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """One micro-batch of per-token inputs to a policy loss.

    Attributes:
        logprobs: log pi of the current policy, with gradient.
        proximal_logprobs: log pi_prox of the proximal policy, the denominator of the ratio (see `Proximal`), without
            gradient.
        behavior_logprobs: log mu of the behavior policy, which sampled the tokens.
        staleness: age of each token in policy versions.
        token_weights: weight of each token in the average over the step.
        group_index: group of each row, the completions of one prompt.
        advantages: advantage A of each token.
        loss_mask: True where a token trains.
        head_logprobs: log pi, with gradient, of the k likeliest tokens at each position, which the engine recorded
            (`sampling.head`); None if the loss does not need them.
        head_behavior_logprobs: log mu of the same tokens; -inf where mu is 0.
        behavior_entropy: entropy of mu at each token, in nats.
    """

    logprobs: Float[Tensor, "B T"]
    proximal_logprobs: Float[Tensor, "B T"]
    behavior_logprobs: Float[Tensor, "B T"]
    advantages: Float[Tensor, "B T"]
    loss_mask: Bool[Tensor, "B T"]
    staleness: Int[Tensor, "B T"]
    token_weights: Float[Tensor, "B T"]
    group_index: Int[Tensor, " B"]
    head_logprobs: Float[Tensor, "B T k"] | None = None
    head_behavior_logprobs: Float[Tensor, "B T k"] | None = None
    behavior_entropy: Float[Tensor, "B T"] | None = None

    @property
    def log_ratio(self) -> Float[Tensor, "B T"]:
        """Token log-ratio log r = log pi - log pi_prox, with gradient; clamped to ±20, with gradient 0 beyond."""
        return (self.logprobs - self.proximal_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    @property
    def ratio(self) -> Float[Tensor, "B T"]:
        """Token ratio r = pi / pi_prox, with gradient."""
        return self.log_ratio.exp()

    @property
    def sequence_log_ratio(self) -> Float[Tensor, "B 1"]:
        """Sequence log-ratio log w_i = sum over tokens of log pi - log pi_prox, with gradient, not clamped."""
        return sequence_log_ratio(self.logprobs - self.proximal_logprobs, self.loss_mask)[:, None]

    @property
    def geometric_log_ratio(self) -> Float[Tensor, "B 1"]:
        """Length-normalised sequence log-ratio (log w_i) / L_i, with gradient, not clamped."""
        return geometric_log_ratio(self.logprobs - self.proximal_logprobs, self.loss_mask)[:, None]

    def cleaned(self) -> LossInputs:
        """Copy with 0 at every token that does not train.

        A completion with a non-finite value is masked as a whole: its sequence ratio would not be finite.
        """
        finite = torch.ones_like(self.loss_mask)
        for values in (self.logprobs, self.proximal_logprobs, self.behavior_logprobs, self.advantages):
            finite &= values.isfinite()
        usable = self.loss_mask & (finite | ~self.loss_mask).all(-1, keepdim=True)
        return replace(
            self,
            logprobs=masked(self.logprobs, usable),
            proximal_logprobs=masked(self.proximal_logprobs, usable),
            behavior_logprobs=masked(self.behavior_logprobs, usable),
            advantages=masked(self.advantages, usable),
            token_weights=masked(self.token_weights, usable),
            staleness=torch.where(usable, self.staleness, 0),
            loss_mask=usable,
            **self._cleaned_head(usable),
        )

    def _cleaned_head(self, usable: Bool[Tensor, "B T"]) -> dict[str, Tensor]:
        values: dict[str, Tensor] = {}
        if self.head_logprobs is not None and self.head_behavior_logprobs is not None:
            places = usable[..., None].expand_as(self.head_logprobs)
            values["head_logprobs"] = masked(self.head_logprobs, places)
            values["head_behavior_logprobs"] = torch.where(places, self.head_behavior_logprobs, -torch.inf)
        if self.behavior_entropy is not None:
            values["behavior_entropy"] = masked(self.behavior_entropy, usable)
        return values


@dataclass(frozen=True, kw_only=True)
class LossOutput:
    """Loss of each token, 0 where `loss_mask` is False; `clipped` marks tokens with a cut gradient."""

    per_token: Float[Tensor, "B T"]
    clipped: Bool[Tensor, "B T"]


class PolicyLoss(ABC):
    """A per-token loss; averaging is a separate choice (`lit_async_rl.losses.aggregation`).

    Subclasses implement `token_loss`.

    Attributes:
        uses_proximal: True if the loss contains the ratio to the proximal policy; if False, ratios enter as correction
            weights only.
        needs_behavior_proximal: True if that ratio is the method's off-policy correction: the proximal policy must then
            be the behavior policy, and another correction would count twice.
        needs_reference: True if the proximal policy is the frozen reference policy.
        needs_entropy: whether it reads the entropy of the sampling distributions.
        needs_head: smallest admissible `data.sampling.head`; None if the loss reads no recorded distributions, 0 if
            only their entropy.
        needs_whole_groups: True if it compares the completions of one prompt, which must be in one micro-batch.
        needs_single_rows: True if a token's loss reads the ratios of earlier tokens, so that no rollout may branch.
    """

    uses_proximal: ClassVar[bool] = True
    needs_behavior_proximal: ClassVar[bool] = False
    needs_reference: ClassVar[bool] = False
    needs_whole_groups: ClassVar[bool] = False
    needs_single_rows: ClassVar[bool] = False
    needs_entropy: ClassVar[bool] = False
    needs_head: ClassVar[int | None] = None

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Loss of each token; loss and gradient are exactly 0 where `loss_mask` is False, NaN inputs included.

        Raises:
            ValueError: the loss has another shape; a mean, for example, would be broadcast and count once per token.
        """
        clean = inputs.cleaned()
        output = self.token_loss(clean)
        for name, values in vars(output).items():
            check_token_shape(f"model.loss={type(self).__name__}", name, values, shape=tuple(clean.loss_mask.shape))
        return LossOutput(
            per_token=masked(output.per_token, clean.loss_mask),
            clipped=torch.where(clean.loss_mask, output.clipped, inputs.loss_mask),
        )

    @abstractmethod
    def token_loss(self, inputs: LossInputs) -> LossOutput:
        """Computes the loss. Inputs are finite, and 0 where `loss_mask` is False; the output is ignored there."""


def surrogate(weights: Float[Tensor, "B T"], inputs: LossInputs) -> Float[Tensor, "B T"]:
    """-sg(weight) * A * log pi: the REINFORCE loss with a detached weight."""
    return -weights.detach() * inputs.advantages * inputs.logprobs
