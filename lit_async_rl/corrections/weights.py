"""Truncated and masked importance weights; products and normalisation of corrections."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lit_async_rl.importance import (
    geometric_log_ratio,
    kl_k2,
    kl_k3,
    masked,
    safe_exp,
    second_moment_excess,
    sequence_log_ratio,
    sum_over_ranks,
)
from lit_async_rl.utils.checks import check_range, check_token_shape

# -- Base classes, and the three levels of ratios. B rollouts, T positions -------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CorrectionOutput:
    """Importance weights (>= 0, detached) and rejection mask; weights are 0 where rejected or not trained."""

    weights: Float[Tensor, "B T"]
    rejected: Bool[Tensor, "B T"]


class Correction(ABC):
    """Maps token log-ratios to token weights. Subclasses implement `weigh`."""

    def __call__(self, log_ratio: Float[Tensor, "B T"], loss_mask: Bool[Tensor, "B T"]) -> CorrectionOutput:
        """Weight of each token; `log_ratio` is log pi_prox - log mu.

        A completion with a non-finite log-ratio is rejected as a whole: its other ratios are unreliable, too.

        Raises:
            ValueError: weights or rejections have another shape than `loss_mask`.
        """
        log_ratio = log_ratio.detach()
        usable = loss_mask & (log_ratio.isfinite() | ~loss_mask).all(-1, keepdim=True)
        output = self.weigh(masked(log_ratio, usable), usable)
        for name, values in vars(output).items():
            check_token_shape(f"model.correction={type(self).__name__}", name, values, shape=tuple(loss_mask.shape))
        rejected = loss_mask & (output.rejected | ~usable)
        return CorrectionOutput(weights=masked(output.weights, loss_mask & ~rejected), rejected=rejected)

    @abstractmethod
    def weigh(self, log_ratio: Float[Tensor, "B T"], loss_mask: Bool[Tensor, "B T"]) -> CorrectionOutput:
        """Computes the weights. Log-ratios are finite, and 0 where `loss_mask` is False; outputs there do not count."""


Level = Literal["token", "sequence", "mean"]


class Leveled(Correction):
    """Correction by ratios pooled to a level.

    Attributes:
        level: `token`: ratios as they are. `sequence`: the product over the completion. `mean`: its geometric mean.
    """

    level: ClassVar[Level] = "token"

    def pool(self, values: Float[Tensor, "B T"], loss_mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
        """Sum or mean of token values over the completion, repeated at each of its tokens."""
        if self.level == "token":
            return values
        pooled = sequence_log_ratio if self.level == "sequence" else geometric_log_ratio
        return pooled(values, loss_mask)[:, None].expand_as(values)


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
class TokenTruncatedIS(TruncatedIS):
    """Truncated ratio of each token: TIS (Yao et al. 2025) with its usual cap, 2; MiniRL (arXiv:2512.01374): 5."""


@dataclass(frozen=True)
class SequenceTruncatedIS(TruncatedIS):
    """Truncated ratio of each completion, with the cap of VCPO's released code (arXiv:2602.17616).

    Completion ratios spread with length: that code chose 8 for 2,000 tokens.

    Example:
        ```python
        import torch

        import lit_async_rl as rl

        log_ratio = torch.tensor([[0.5, 0.2], [3.0, 1.0]])
        output = rl.SequenceTruncatedIS(cap=8.0)(log_ratio, torch.ones(2, 2, dtype=torch.bool))
        assert torch.allclose(output.weights[:, 0], torch.tensor([0.7, 4.0]).exp().clamp(max=8.0))
        ```
    """

    level: ClassVar[Level] = "sequence"

    cap: float = 8.0


@dataclass(frozen=True)
class GeometricTruncatedIS(TruncatedIS):
    """Truncated geometric mean of a completion's ratios: biased, with a spread that does not grow with length."""

    level: ClassVar[Level] = "mean"


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
class IcePop(MaskedIS):
    """Masked ratio of each token, defaults of the method's announcement (Ant group 2025, read in translation)."""

    high: float = 5.0


@dataclass(frozen=True)
class SequenceMaskedIS(MaskedIS):
    """Masked ratio of each completion: Seq-MIS, bounds of verl's preset."""

    level: ClassVar[Level] = "sequence"


@dataclass(frozen=True)
class GeometricMaskedIS(MaskedIS):
    """Masked geometric mean of each completion's ratios, bounds as SkyRL suggests.

    NeMo-RL's and OpenRLHF's "seq-mask-tis", with raw token ratios as weights, is
    `Product([GeometricRejection(min_ratio=0.999, max_ratio=1.002), TokenTruncatedIS(cap=inf)])`.
    """

    level: ClassVar[Level] = "mean"

    low: float = 0.99
    high: float = 1.01


@dataclass(frozen=True)
class Product(Correction):
    """Product of corrections: weights multiply, and any of them can reject a token.

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
        weights = torch.ones_like(log_ratio)
        rejected = torch.zeros_like(loss_mask)
        for correction in self.corrections:
            output = correction(log_ratio, loss_mask)
            weights = weights * output.weights
            rejected = rejected | output.rejected
        return CorrectionOutput(weights=weights, rejected=rejected)


@dataclass(frozen=True)
class BatchNormalized(Correction):
    """Another correction's weights divided by their mean over the tokens it keeps.

    Removes the common factor of all ratios (self-normalised importance sampling). The mean is over each micro-batch of
    all ranks: a collective. verl's `batch_normalize` normalises before rejection, and counts a sequence's weight once
    instead of once per token.

    Args:
        correction: correction whose weights are normalised.
    """

    correction: Correction

    def weigh(self, log_ratio: Float[Tensor, "B T"], loss_mask: Bool[Tensor, "B T"]) -> CorrectionOutput:
        """Weights scaled to a mean of 1."""
        output = self.correction(log_ratio, loss_mask)
        kept = loss_mask & ~output.rejected
        # sums, not means, are reduced: ranks have different numbers of tokens. float64, so that the count is exact
        total = sum_over_ranks(torch.stack([masked(output.weights, kept).double().sum(), kept.double().sum()]))
        mean = total[0] / total[1].clamp(min=1)
        weights = output.weights / torch.where(mean > 0, mean, 1.0).to(output.weights.dtype)
        return CorrectionOutput(weights=weights, rejected=output.rejected)


@dataclass
class BlendedIS(Correction):
    """Two estimators, with shares that `EstimatorBlend` chooses from the steps before.

        coefficient = share * w_sequence * A_baseline + (1 - share) * w_token * A_group

    The first, with the weight of the completion and the advantage of `model.baseline`, is nearly unbiased; the second,
    with those of the token and of `data.advantage`, has less variance. At a share of 1 or 0 only one is computed, to
    the same bits as without the blend. Not from a paper; the parts are VCPO's (arXiv:2602.17616) and TIS.

    Args:
        sequence: correction of the first estimator.
        token: correction of the second one.

    Attributes:
        share: of the first estimator, in [0, 1]; 0 until a step was measured.
    """

    sequence: Correction = SequenceTruncatedIS(cap=8.0)
    token: Correction = TokenTruncatedIS(cap=2.0)
    share: float = field(default=0.0, init=False)

    def weigh(self, log_ratio: Float[Tensor, "B T"], loss_mask: Bool[Tensor, "B T"]) -> CorrectionOutput:
        """Mean of both weights by their shares; `Objective` also weighs the advantages."""
        outputs = [self.sequence(log_ratio, loss_mask), self.token(log_ratio, loss_mask)]
        weights = self.share * outputs[0].weights + (1 - self.share) * outputs[1].weights
        return CorrectionOutput(weights=weights, rejected=outputs[0].rejected & outputs[1].rejected)


# -- Rejection: corrections with weight 1 or 0. Combine them with importance weights through `Product` ----------------


@dataclass(frozen=True)
class Rejection(Correction):
    """Keeps tokens inside all bounds, with weight 1: verl's rollout correction by k1, k2 and k3.

    Bounds are on the ratio r = pi_prox / mu (verl's k1 bounds 1 / r: the same only if low = 1 / high).

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
            raise ValueError(
                f"the correction {name} has no limits, so it would reject nothing: set min_ratio, max_ratio, max_k2 or "
                "max_k3"
            )

    def weigh(self, log_ratio: Float[Tensor, "B T"], loss_mask: Bool[Tensor, "B T"]) -> CorrectionOutput:
        """Weight 1 for every token inside the bounds."""
        return CorrectionOutput(weights=torch.ones_like(log_ratio), rejected=self.rejects(log_ratio, loss_mask))

    @abstractmethod
    def rejects(self, log_ratio: Float[Tensor, "B T"], loss_mask: Bool[Tensor, "B T"]) -> Bool[Tensor, "B T"]:
        """Mask of rejected tokens."""

    def outside(
        self, k1: Float[Tensor, "B T"], k2: Float[Tensor, "B T"], k3: Float[Tensor, "B T"]
    ) -> Bool[Tensor, "B T"]:
        """Mask of values outside a bound; the log-ratio `k1` is compared in log space, which cannot overflow."""
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
class TokenRejection(LeveledRejection):
    """Drops single tokens (verl: token_k1, token_k2, token_k3)."""


@dataclass(frozen=True)
class SequenceRejection(LeveledRejection):
    """Drops completions by sums over their tokens (verl: seq_sum_k1 and so on, preset [0.5, 2])."""

    level: ClassVar[Level] = "sequence"


@dataclass(frozen=True)
class GeometricRejection(LeveledRejection):
    """Drops completions by means over their tokens (verl: seq_mean_k1 and so on; presets [0.999, 1.001], k3 0.01)."""

    level: ClassVar[Level] = "mean"


@dataclass(frozen=True)
class Veto(Rejection):
    """Drops a completion if one of its tokens is outside the bounds (verl: seq_max_k2, seq_max_k3, and token veto)."""

    min_ratio: float = 1e-4

    def rejects(self, log_ratio: Float[Tensor, "B T"], loss_mask: Bool[Tensor, "B T"]) -> Bool[Tensor, "B T"]:
        """Mask of completions with a token outside the bounds."""
        outside = self.outside(log_ratio, kl_k2(log_ratio), kl_k3(log_ratio)) & loss_mask
        return outside.any(-1, keepdim=True).expand_as(loss_mask)


@dataclass(frozen=True)
class SecondMomentMask(Correction):
    """Drops the tokens with the largest (log r)^2 until the mean of the others is at most `budget`; weight 1.

    AReaL's variant of M2PO: on the ratio of proximal to behavior policy and on all tokens, for any advantage, with the
    usual clipped loss on the rest. Unlike AReaL, it may mask every token. The mean is over one micro-batch of all
    ranks: a collective.

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


# -- Choice of the proximal policy pi_prox between behavior policy mu and current policy pi ---------------------------
# The importance ratio has two factors, pi / mu = (pi / pi_prox) x (pi_prox / mu): the loss contains the first, the
# correction the second.


class Proximal(ABC):
    """Maps log-probabilities of pi (detached) and mu to those of the proximal policy.

    Values at tokens that do not train are ignored. Subclass it for log-probabilities recomputed under other weights.
    """

    @abstractmethod
    def __call__(
        self,
        logprobs: Float[Tensor, "B T"],
        behavior_logprobs: Float[Tensor, "B T"],
        staleness: Int[Tensor, "B T"],
    ) -> Float[Tensor, "B T"]:
        """Log-probabilities of the proximal policy; `staleness` is the number of versions between mu and pi."""


@dataclass(frozen=True)
class BehaviorProximal(Proximal):
    """pi_prox = mu: the loss contains the full ratio pi / mu, and no correction applies."""

    def __call__(
        self,
        logprobs: Float[Tensor, "B T"],
        behavior_logprobs: Float[Tensor, "B T"],
        staleness: Int[Tensor, "B T"],
    ) -> Float[Tensor, "B T"]:
        """Returns the log-probabilities of mu."""
        return behavior_logprobs


@dataclass(frozen=True)
class CurrentProximal(Proximal):
    """pi_prox = pi at the start of the step.

    With one optimizer step per batch this is the detached pi itself: the "recomputed" proximal policy of decoupled PPO
    (AReaL, arXiv:2505.24298) without another forward pass. The ratio is 1, no clip acts, and the gradient is
    REINFORCE's; the correction alone accounts for pi / mu.
    """

    def __call__(
        self,
        logprobs: Float[Tensor, "B T"],
        behavior_logprobs: Float[Tensor, "B T"],
        staleness: Int[Tensor, "B T"],
    ) -> Float[Tensor, "B T"]:
        """Returns the detached log-probabilities of pi."""
        return logprobs.detach()


@dataclass(frozen=True)
class InterpolatedProximal(Proximal):
    """Log-linear interpolation: log pi_prox = (1/d) log mu + (1 - 1/d) log pi, d = staleness of the token.

    A-3PO's approximation: the ratio is (pi / mu)^(1/d), as if every version had changed the policy equally. d = 1 gives
    mu; d = 0 gives pi, which leaves a difference in numerics to the correction. From the authors' description and
    AReaL's code, which takes mu at d = 0; the paper's text could not be checked.
    """

    def __call__(
        self,
        logprobs: Float[Tensor, "B T"],
        behavior_logprobs: Float[Tensor, "B T"],
        staleness: Int[Tensor, "B T"],
    ) -> Float[Tensor, "B T"]:
        """Interpolates the log-probabilities of mu and pi."""
        logprobs = logprobs.detach()
        share = 1.0 / staleness.clamp(min=1).to(logprobs.dtype)
        return torch.where(staleness > 0, share * behavior_logprobs + (1 - share) * logprobs, logprobs)
