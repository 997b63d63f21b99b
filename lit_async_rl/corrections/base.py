"""What a correction takes and gives, and the three levels at which ratios are taken. B rollouts, T positions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

from lit_async_rl.importance import geometric_log_ratio, masked, sequence_log_ratio


@dataclass(frozen=True, kw_only=True)
class CorrectionOutput:
    """`weights` >= 0, without gradient, 0 where `rejected` and where a token does not train."""

    weights: Float[Tensor, "B T"]
    rejected: Bool[Tensor, "B T"]


class Correction(ABC):
    """Log-ratios of tokens to weights of tokens. Subclasses write `weigh` and never meet padding or NaN."""

    def __call__(self, log_ratio: Float[Tensor, "B T"], loss_mask: Bool[Tensor, "B T"]) -> CorrectionOutput:
        """Weight of each token; `log_ratio` is log anchor - log mu.

        A completion with a log-ratio that is not finite is rejected as a whole: its other ratios cannot be trusted.
        """
        log_ratio = log_ratio.detach()
        usable = loss_mask & (log_ratio.isfinite() | ~loss_mask).all(-1, keepdim=True)
        output = self.weigh(masked(log_ratio, usable), usable)
        rejected = loss_mask & (output.rejected | ~usable)
        return CorrectionOutput(weights=masked(output.weights, loss_mask & ~rejected), rejected=rejected)

    @abstractmethod
    def weigh(self, log_ratio: Float[Tensor, "B T"], loss_mask: Bool[Tensor, "B T"]) -> CorrectionOutput:
        """The formula. Log-ratios are finite, and 0 where `loss_mask` is False; the output may be anything there."""


class Leveled(Correction):
    """A correction that looks at one ratio for each token, whatever the tokens it is made of."""

    @abstractmethod
    def pool(self, values: Float[Tensor, "B T"], loss_mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
        """Values of tokens to values of what the tokens belong to."""


class OfToken(Leveled):
    """Each token by itself."""

    def pool(self, values: Float[Tensor, "B T"], loss_mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
        """The values."""
        return values


class OfSequence(Leveled):
    """All tokens of a completion together."""

    def pool(self, values: Float[Tensor, "B T"], loss_mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
        """The sum over the completion: of log-ratios, the log of their product."""
        return sequence_log_ratio(values, loss_mask)[:, None].expand_as(values)


class OfMean(Leveled):
    """The average token of a completion."""

    def pool(self, values: Float[Tensor, "B T"], loss_mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
        """The mean over the completion: of log-ratios, the log of their geometric mean."""
        return geometric_log_ratio(values, loss_mask)[:, None].expand_as(values)
