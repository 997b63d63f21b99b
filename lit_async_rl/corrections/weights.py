"""Truncated and masked importance weights; products and normalisation of corrections."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lit_async_rl.corrections.base import Correction, CorrectionOutput, Leveled, OfMean, OfSequence, OfToken
from lit_async_rl.importance import masked, safe_exp, sum_over_ranks
from lit_async_rl.utils.checks import check_range


@dataclass(frozen=True)
class TruncatedIS(Leveled):
    """Truncated importance sampling, w = min(max(r, floor), cap): biased, with bounded variance.

    Args:
        cap: largest weight; `inf` does not truncate (ratios are limited to e^20 all the same).
        floor: smallest weight.

    Raises:
        ValueError: not 0 <= floor <= cap, or cap is 0.
    """

    cap: float = 2.0
    floor: float = 0.0

    def __post_init__(self) -> None:
        check_range(type(self).__name__, "> 0", cap=self.cap)
        check_range(type(self).__name__, f"in [0, {self.cap}]", floor=self.floor)

    def weigh(self, log_ratio: Float[Tensor, "B T"], loss_mask: Bool[Tensor, "B T"]) -> CorrectionOutput:
        """Ratio clamped to [floor, cap]."""
        weights = safe_exp(self.pool(log_ratio, loss_mask)).clamp(self.floor, self.cap)
        return CorrectionOutput(weights=weights, rejected=torch.zeros_like(loss_mask))


@dataclass(frozen=True)
class TokenTruncatedIS(OfToken, TruncatedIS):
    """Truncated ratio of each token: TIS (Yao et al. 2025) with its usual cap of 2. MiniRL (arXiv:2512.01374): 5."""


@dataclass(frozen=True)
class SequenceTruncatedIS(OfSequence, TruncatedIS):
    """Truncated ratio of each completion, the cap that of VCPO's released code (arXiv:2602.17616).

    Ratios of completions spread with length: 8 was chosen there for 2,000 tokens.
    """

    cap: float = 8.0


@dataclass(frozen=True)
class GeometricTruncatedIS(OfMean, TruncatedIS):
    """Truncated geometric mean of a completion's ratios: does not spread with length, and does not correct for it."""


@dataclass(frozen=True)
class MaskedIS(Leveled):
    """w = r if low <= r <= high, else 0 (MIS): tokens outside the interval do not train.

    Args:
        low: smallest ratio that is kept.
        high: largest ratio that is kept.

    Raises:
        ValueError: not 0 <= low < high.
    """

    low: float = 0.5
    high: float = 2.0

    def __post_init__(self) -> None:
        check_range(type(self).__name__, ">= 0", low=self.low)
        check_range(type(self).__name__, f"> {self.low}", high=self.high)

    def weigh(self, log_ratio: Float[Tensor, "B T"], loss_mask: Bool[Tensor, "B T"]) -> CorrectionOutput:
        """Ratio inside the interval, rejection outside."""
        ratio = safe_exp(self.pool(log_ratio, loss_mask))
        return CorrectionOutput(weights=ratio, rejected=(ratio < self.low) | (ratio > self.high))


@dataclass(frozen=True)
class IcePop(OfToken, MaskedIS):
    """Masked ratio of each token, defaults of the method's announcement (Ant group 2025, read in translation)."""

    high: float = 5.0


@dataclass(frozen=True)
class SequenceMaskedIS(OfSequence, MaskedIS):
    """Masked ratio of each completion: Seq-MIS, bounds of verl's preset."""


@dataclass(frozen=True)
class GeometricMaskedIS(OfMean, MaskedIS):
    """Masked geometric mean of each completion's ratios, bounds as SkyRL suggests.

    The mask of NeMo-RL and OpenRLHF's "seq-mask-tis", which keeps raw token ratios as weights, is
    `Product([GeometricRejection(min_ratio=0.999, max_ratio=1.002), TokenTruncatedIS(cap=inf)])`.
    """

    low: float = 0.99
    high: float = 1.01


@dataclass(frozen=True)
class Product(Correction):
    """Product of corrections: weights multiply, and a token is rejected if any of them rejects it.

    Args:
        corrections: at least one.

    Raises:
        ValueError: there is none.
    """

    corrections: Sequence[Correction]

    def __post_init__(self) -> None:
        if not self.corrections:
            raise ValueError("Product.corrections must name at least one correction")

    def weigh(self, log_ratio: Float[Tensor, "B T"], loss_mask: Bool[Tensor, "B T"]) -> CorrectionOutput:
        """Product of weights, union of rejections."""
        weights, rejected = torch.ones_like(log_ratio), torch.zeros_like(loss_mask)
        for correction in self.corrections:
            output = correction(log_ratio, loss_mask)
            weights, rejected = weights * output.weights, rejected | output.rejected
        return CorrectionOutput(weights=weights, rejected=rejected)


@dataclass(frozen=True)
class BatchNormalized(Correction):
    """Another correction's weights divided by their mean over the tokens it keeps, so that they average to 1.

    Removes the common factor of all ratios (self-normalised importance sampling). The mean is over the micro-batch
    of all ranks: a collective that every rank calls. With several micro-batches a step each is normalised by itself.
    verl's `batch_normalize` does it before anything is rejected, and counts a sequence's weight once, not once a token.

    Args:
        correction: correction whose weights are normalised.
    """

    correction: Correction

    def weigh(self, log_ratio: Float[Tensor, "B T"], loss_mask: Bool[Tensor, "B T"]) -> CorrectionOutput:
        """Weights scaled to a mean of 1."""
        output = self.correction(log_ratio, loss_mask)
        kept = loss_mask & ~output.rejected
        total = sum_over_ranks(torch.stack([masked(output.weights, kept).double().sum(), kept.double().sum()]))
        mean = total[0] / total[1].clamp(min=1)
        # without any weight there is nothing to scale
        weights = output.weights / torch.where(mean > 0, mean, 1.0).to(output.weights.dtype)
        return CorrectionOutput(weights=weights, rejected=output.rejected)
