"""Rejection: corrections with weight 1 or 0. Combine them with importance weights through `Product`."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lit_async_rl.corrections.base import Correction, CorrectionOutput, Leveled, OfMean, OfSequence, OfToken
from lit_async_rl.importance import kl_k2, kl_k3, second_moment_excess
from lit_async_rl.utils.checks import check_range


@dataclass(frozen=True)
class Rejection(Correction):
    """Keeps tokens inside all bounds, with weight 1. Rollout correction as in verl, which names them k1, k2 and k3.

    Bounds are on the ratio r = pi_prox / mu itself (verl's k1 bounds 1 / r, which differs unless low = 1 / high).

    Args:
        min_ratio: smallest ratio that is kept.
        max_ratio: largest ratio that is kept.
        max_k2: largest (log r)^2 / 2.
        max_k3: largest r - 1 - log r.

    Raises:
        ValueError: bounds are in the wrong order, or none is set.
    """

    min_ratio: float = 0.0
    max_ratio: float = math.inf
    max_k2: float = math.inf
    max_k3: float = math.inf

    def __post_init__(self) -> None:
        name = type(self).__name__
        check_range(name, ">= 0", min_ratio=self.min_ratio, max_k2=self.max_k2, max_k3=self.max_k3)
        check_range(name, f"> {self.min_ratio}", max_ratio=self.max_ratio)
        if self.min_ratio == 0 and min(self.max_ratio, self.max_k2, self.max_k3) == math.inf:
            raise ValueError(f"{name} rejects nothing: set min_ratio, max_ratio, max_k2 or max_k3")

    def weigh(self, log_ratio: Float[Tensor, "B T"], loss_mask: Bool[Tensor, "B T"]) -> CorrectionOutput:
        """Weight 1 for every token inside the bounds."""
        return CorrectionOutput(weights=torch.ones_like(log_ratio), rejected=self.rejects(log_ratio, loss_mask))

    @abstractmethod
    def rejects(self, log_ratio: Float[Tensor, "B T"], loss_mask: Bool[Tensor, "B T"]) -> Bool[Tensor, "B T"]:
        """Mask of rejected tokens."""

    def outside(
        self, k1: Float[Tensor, "B T"], k2: Float[Tensor, "B T"], k3: Float[Tensor, "B T"]
    ) -> Bool[Tensor, "B T"]:
        """Mask of values outside a bound; `k1` is the log-ratio, compared in log space to avoid overflow."""
        low = math.log(self.min_ratio) if self.min_ratio > 0 else -math.inf
        return (k1 < low) | (k1 > math.log(self.max_ratio)) | (k2 > self.max_k2) | (k3 > self.max_k3)


@dataclass(frozen=True)
class LeveledRejection(Rejection, Leveled):
    """Rejection by token log-ratio, k2 and k3, pooled to a level."""

    def rejects(self, log_ratio: Float[Tensor, "B T"], loss_mask: Bool[Tensor, "B T"]) -> Bool[Tensor, "B T"]:
        """Mask of tokens with a pooled quantity outside its bounds."""
        k1, k2, k3 = (self.pool(k, loss_mask) for k in (log_ratio, kl_k2(log_ratio), kl_k3(log_ratio)))
        return self.outside(k1, k2, k3)


@dataclass(frozen=True)
class TokenRejection(OfToken, LeveledRejection):
    """Drops single tokens (verl: token_k1, token_k2, token_k3)."""


@dataclass(frozen=True)
class SequenceRejection(OfSequence, LeveledRejection):
    """Drops completions by sums over their tokens (verl: seq_sum_k1 and so on; its preset keeps ratios in [0.5, 2])."""


@dataclass(frozen=True)
class GeometricRejection(OfMean, LeveledRejection):
    """Drops completions by means over their tokens (verl: seq_mean_k1 and so on; presets [0.999, 1.001], k3 0.01)."""


@dataclass(frozen=True)
class Veto(Rejection):
    """Drops a completion if one of its tokens is outside the bounds (verl: seq_max_k2, seq_max_k3, and its veto)."""

    min_ratio: float = 1e-4

    def rejects(self, log_ratio: Float[Tensor, "B T"], loss_mask: Bool[Tensor, "B T"]) -> Bool[Tensor, "B T"]:
        """Masks all tokens of a completion that has one outside the bounds."""
        outside = self.outside(log_ratio, kl_k2(log_ratio), kl_k3(log_ratio)) & loss_mask
        return outside.any(-1, keepdim=True).expand_as(loss_mask)


@dataclass(frozen=True)
class SecondMomentMask(Correction):
    """Drops the tokens with the largest (log r)^2 until the mean of the others is at most `budget`; weight 1.

    AReaL's variant of M2PO: on the ratio of proximal to behavior policy and on all tokens, for any advantage,
    with the usual clipped loss on the rest. Unlike AReaL, it may mask every token. Over one micro-batch of all
    ranks.

    Args:
        budget: largest mean of (log r)^2.

    Raises:
        ValueError: the budget is negative.
    """

    budget: float = 0.04

    def __post_init__(self) -> None:
        check_range("SecondMomentMask", ">= 0", budget=self.budget)

    def weigh(self, log_ratio: Float[Tensor, "B T"], loss_mask: Bool[Tensor, "B T"]) -> CorrectionOutput:
        """Weight 1 for every token that is kept."""
        rejected = second_moment_excess(log_ratio.square(), loss_mask, self.budget)
        return CorrectionOutput(weights=torch.ones_like(log_ratio), rejected=rejected)
