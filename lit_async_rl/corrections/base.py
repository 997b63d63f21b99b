"""Base classes of importance corrections, and the three levels of ratios. B rollouts, T positions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

from lit_async_rl.importance import geometric_log_ratio, masked, sequence_log_ratio
from lit_async_rl.utils.checks import check_token_shape


@dataclass(frozen=True, kw_only=True)
class CorrectionOutput:
    """Importance weights (>= 0, detached) and rejection mask; weights are 0 where rejected or not trained."""

    weights: Float[Tensor, "B T"]
    rejected: Bool[Tensor, "B T"]


class Correction(ABC):
    """Maps token log-ratios to token weights. Subclasses implement `weigh`, whose inputs are finite and masked."""

    def __call__(self, log_ratio: Float[Tensor, "B T"], loss_mask: Bool[Tensor, "B T"]) -> CorrectionOutput:
        """Weight of each token; `log_ratio` is log pi_prox - log mu.

        A completion with a non-finite log-ratio is rejected as a whole: its other ratios cannot be trusted.

        Raises:
            ValueError: weights or rejections have another shape than `loss_mask`.
        """
        log_ratio = log_ratio.detach()
        usable = loss_mask & (log_ratio.isfinite() | ~loss_mask).all(-1, keepdim=True)
        output = self.weigh(masked(log_ratio, usable), usable)
        for name, values in vars(output).items():
            check_token_shape(f"model.correction={type(self).__name__}", name, values, tuple(loss_mask.shape))
        rejected = loss_mask & (output.rejected | ~usable)
        return CorrectionOutput(weights=masked(output.weights, loss_mask & ~rejected), rejected=rejected)

    @abstractmethod
    def weigh(self, log_ratio: Float[Tensor, "B T"], loss_mask: Bool[Tensor, "B T"]) -> CorrectionOutput:
        """Computes the weights. Log-ratios are finite, and 0 where `loss_mask` is False; outputs there are ignored."""


class Leveled(Correction):
    """Correction whose ratios are pooled to a level: token, sequence, or mean over the sequence."""

    @abstractmethod
    def pool(self, values: Float[Tensor, "B T"], loss_mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
        """Pools token values to the level and broadcasts the result back to the tokens."""


class OfToken(Leveled):
    """Token level: values are not pooled."""

    def pool(self, values: Float[Tensor, "B T"], loss_mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
        """Returns `values` unchanged."""
        return values


class OfSequence(Leveled):
    """Sequence level: values are summed over the completion."""

    def pool(self, values: Float[Tensor, "B T"], loss_mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
        """Sum over the completion; for log-ratios, the log of their product."""
        return sequence_log_ratio(values, loss_mask)[:, None].expand_as(values)


class OfMean(Leveled):
    """Geometric level: values are averaged over the tokens of the completion."""

    def pool(self, values: Float[Tensor, "B T"], loss_mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
        """Mean over the completion; for log-ratios, the log of their geometric mean."""
        return geometric_log_ratio(values, loss_mask)[:, None].expand_as(values)
