"""Importance corrections: weights between the anchor of the loss and the policy that sampled.

B rollouts, T positions. `log_ratio` is log anchor - log mu, detached. Weights multiply the per-token loss; a rejected
token has weight 0 and stays in the denominator of the average.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lit_async_rl.importance import geometric_log_ratio, masked, sequence_log_ratio

SAFE_LOG_RATIO = 20.0  # beyond e^20 a weight is noise; the bound keeps float32 finite


@dataclass(frozen=True, kw_only=True)
class CorrectionOutput:
    """`weights` >= 0, without gradient, 0 where `rejected` and where a token does not train."""

    weights: Float[Tensor, "B T"]
    rejected: Bool[Tensor, "B T"]


class Correction(ABC):
    """Log-ratios of tokens to weights of tokens."""

    @abstractmethod
    def __call__(self, log_ratio: Float[Tensor, "B T"], loss_mask: Bool[Tensor, "B T"]) -> CorrectionOutput:
        """Weight of each token."""


class Level(Enum):
    """What one ratio belongs to."""

    TOKEN = "token"
    SEQUENCE = "sequence"
    GEOMETRIC = "geometric"


def level_log_ratio(log_ratio: Tensor, loss_mask: Tensor, level: Level) -> Float[Tensor, "B T"]:
    """The ratio of each token, of its whole rollout, or the geometric mean over it; NaN counts as 0."""
    log_ratio = torch.nan_to_num(masked(log_ratio.detach().float(), loss_mask), nan=0.0)
    if level is Level.TOKEN:
        return log_ratio
    of_rollout = sequence_log_ratio if level is Level.SEQUENCE else geometric_log_ratio
    return of_rollout(log_ratio, loss_mask)[:, None].expand_as(log_ratio)


@dataclass(frozen=True)
class TruncatedIS(Correction):
    """w = min(r, threshold), r at the given level; optionally max(w, minimum) and a mean of 1 over the micro-batch.

    Token level is TIS (Yao et al. 2025), sequence level that of VCPO (arXiv:2602.17616, threshold 8).

    Args:
        level: token, sequence, or geometric (mean over the rollout).
        threshold: largest weight.
        minimum: smallest weight.
        normalize: divide by the mean weight.
    """

    level: Level = Level.TOKEN
    threshold: float = 2.0
    minimum: float = 0.0
    normalize: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.minimum <= self.threshold or self.threshold <= 0:
            raise ValueError(f"TruncatedIS needs 0 <= minimum <= threshold, got {self.minimum} and {self.threshold}")

    def __call__(self, log_ratio: Tensor, loss_mask: Tensor) -> CorrectionOutput:
        """Truncated weights."""
        ratio = level_log_ratio(log_ratio, loss_mask, self.level).clamp(-SAFE_LOG_RATIO, SAFE_LOG_RATIO).exp()
        weights = masked(ratio.clamp(self.minimum, self.threshold), loss_mask)
        if self.normalize:
            weights = weights / (weights.sum() / loss_mask.sum().clamp(min=1)).clamp(min=1e-8)
        return CorrectionOutput(weights=weights, rejected=torch.zeros_like(loss_mask))


@dataclass(frozen=True)
class MaskedIS(Correction):
    """w = r if low <= r <= high else 0, r at the given level (MIS). At token level with [0.5, 5] it is IcePop."""

    level: Level = Level.SEQUENCE
    low: float = 0.5
    high: float = 2.0

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high:
            raise ValueError(f"{type(self).__name__} needs 0 <= low < high, got {self.low} and {self.high}")

    def __call__(self, log_ratio: Tensor, loss_mask: Tensor) -> CorrectionOutput:
        """Ratios inside the bounds."""
        ratio = level_log_ratio(log_ratio, loss_mask, self.level).clamp(-SAFE_LOG_RATIO, SAFE_LOG_RATIO).exp()
        rejected = ((ratio < self.low) | (ratio > self.high)) & loss_mask
        return CorrectionOutput(weights=masked(ratio, loss_mask & ~rejected), rejected=rejected)


@dataclass(frozen=True)
class IcePop(MaskedIS):
    """w = r if 0.5 <= r <= 5 else 0 for each token. IcePop (Ant group 2025), defaults from its announcement."""

    level: Level = Level.TOKEN
    low: float = 0.5
    high: float = 5.0
