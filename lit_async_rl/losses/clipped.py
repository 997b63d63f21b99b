"""PPO-style losses: the gradient of a token is cut once its ratio to the proximal policy leaves an interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lit_async_rl.importance import (
    gather_over_ranks,
    geometric_log_ratio,
    masked,
    masked_quantiles,
    safe_exp,
    sum_over_ranks,
)
from lit_async_rl.losses.base import LossInputs, LossOutput, PolicyLoss, surrogate
from lit_async_rl.utils.checks import check_range


def check_clip(name: str, clip_low: float, clip_high: float) -> None:
    """Checks the clip range of the loss `name`.

    Raises:
        ValueError: a bound is negative.
    """
    check_range(name, ">= 0", clip_low=clip_low, clip_high=clip_high)


Bound = float | Float[Tensor, "B T"]

# smaller drifts of a token are rounding differences between engine and trainer
MIN_DRIFT = 1e-4


def is_truncated(
    weights: Float[Tensor, "B T"], low: Bound, high: Bound, num_tokens: int | Int[Tensor, "B 1"] = 1
) -> Bool[Tensor, "B T"]:
    """Mask of weights, products of `num_tokens` ratios each, that a truncation changes by more than rounding."""
    slack = torch.as_tensor(num_tokens * MIN_DRIFT, dtype=weights.dtype, device=weights.device).exp()
    return (weights > high * slack) | (weights * slack < low)


def left_interval(
    ratio: Float[Tensor, "B _"], advantages: Float[Tensor, "B T"], low: Bound, high: Bound
) -> Bool[Tensor, "B T"]:
    """Mask of tokens that PPO clips: ratio above `high` with A > 0, or below `low` with A < 0."""
    return ((advantages > 0) & (ratio > high)) | ((advantages < 0) & (ratio < low))


def clipped_surrogate(
    ratio: Float[Tensor, "B _"], advantages: Float[Tensor, "B T"], low: Bound, high: Bound
) -> tuple[Float[Tensor, "B T"], Bool[Tensor, "B T"]]:
    """Returns -min(r A, clip(r, low, high) A), and the mask of clipped tokens, which have gradient 0."""
    cut = left_interval(ratio, advantages, low, high=high)
    clipped = ratio.detach().clamp(low, high)  # type: ignore[arg-type]  # the stubs know numbers or tensors, no union
    return -torch.where(cut, clipped, ratio) * advantages, cut


@dataclass(frozen=True)
class PPOClip(PolicyLoss):
    """Clipped surrogate: L = -min(r A, clip(r, 1 - low, 1 + high) A), r = pi / pi_prox.

    Schulman et al. 2017, arXiv:1707.06347, eq. 7. Other methods are this loss: GRPO (arXiv:2402.03300) with
    `SequenceMean` and `GroupMeanStd`; Dr. GRPO (arXiv:2503.20783) with `FixedLength` and `GroupMean`; DAPO
    (arXiv:2503.14476) with `TokenMean` and `clip_high` 0.28; decoupled PPO (AReaL, arXiv:2505.24298) and A-3PO with
    `CurrentProximal` or `InterpolatedProximal` and a correction; TIS and IcePop the same with `TokenTruncatedIS` and
    `IcePop`. `dual_clip` bounds the loss of tokens with negative advantage at -c A (Ye et al. 2020, arXiv:1912.09729,
    eq. 5).

    Example:
        ```python
        import lit_async_rl as rl

        dapo = rl.PPOClip(clip_low=0.2, clip_high=0.28)
        with_dual_clip = rl.PPOClip(dual_clip=3.0)
        module = rl.PolicyModule(rl.asset("sort_policy"), loss=dapo)
        ```

    Args:
        clip_low: how far r may fall below 1; `inf` does not clip.
        clip_high: how far r may rise above 1; `inf` does not clip.
        dual_clip: c > 1; None disables the dual clip.

    Raises:
        ValueError: a bound is out of range.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None

    def __post_init__(self) -> None:
        check_clip("PPOClip", self.clip_low, self.clip_high)
        check_range("PPOClip", "> 1", dual_clip=self.dual_clip)

    def token_loss(self, inputs: LossInputs) -> LossOutput:
        """-min(r A, clip(r) A), for A < 0 at most -c A."""
        loss, cut = clipped_surrogate(inputs.ratio, inputs.advantages, 1 - self.clip_low, high=1 + self.clip_high)
        if self.dual_clip is not None:
            ceiling = -self.dual_clip * inputs.advantages
            too_high = (inputs.advantages < 0) & (loss > ceiling)
            loss = torch.where(too_high, ceiling, loss)
            cut = cut | too_high
        return LossOutput(per_token=loss, clipped=cut)


@dataclass(frozen=True)
class MiniRL(PolicyLoss):
    """L = -M sg(r) A log pi, r = pi / pi_prox; M = 0 where PPO would clip. Qwen, arXiv:2512.01374.

    The paper splits pi / mu = (pi_prox / mu) (pi / pi_prox) into the mismatch of engine and trainer, handled by the
    correction (`TokenTruncatedIS(cap=5.0)` in the paper), and the staleness since the proximal policy, handled by this
    loss; with `BehaviorProximal` r is their product. The gradient is PPO-clip's, the value is not. Advantages:
    `GroupMean`; averages without length weights: `TokenMean` or `FixedLength`. From a summary of the paper.

    Args:
        clip_low: how far r may fall below 1.
        clip_high: how far r may rise above 1.

    Raises:
        ValueError: a bound is negative.
    """

    clip_low: float = 0.2
    clip_high: float = 0.27

    def __post_init__(self) -> None:
        check_clip("MiniRL", self.clip_low, self.clip_high)

    def token_loss(self, inputs: LossInputs) -> LossOutput:
        """-M sg(r) A log pi."""
        ratio = inputs.ratio
        cut = left_interval(ratio, inputs.advantages, 1 - self.clip_low, high=1 + self.clip_high)
        return LossOutput(per_token=surrogate(torch.where(cut, 0.0, ratio), inputs), clipped=cut)


@dataclass(frozen=True)
class ASPO(PolicyLoss):
    """PPO-clip with the weight inverted where A > 0 (1 / r in place of r), so that unlikely good tokens count more.

    A < 0: -r A, cut where r < 1 - low. A > 0: -sg(min(1 / r, cap)) (pi / sg(pi)) A, cut where r > 1 + high; tokens at
    the cap keep their gradient. arXiv:2510.06062 v2; its code could not be checked, and the cap of 3 is read from a
    figure.

    Args:
        clip_low: how far r may fall below 1 where A < 0.
        clip_high: how far r may rise above 1 where A > 0.
        cap: largest inverted weight (the paper's soft dual clip); without it gradients explode.

    Raises:
        ValueError: a bound is negative, or the cap is below 1.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    cap: float = 3.0

    def __post_init__(self) -> None:
        check_clip("ASPO", self.clip_low, self.clip_high)
        check_range("ASPO", ">= 1", cap=self.cap)

    def token_loss(self, inputs: LossInputs) -> LossOutput:
        """-r A where A <= 0, -sg(min(1 / r, cap)) pi / sg(pi) A where A > 0, with PPO's cut."""
        ratio = inputs.ratio.detach()
        weights = torch.where(inputs.advantages > 0, (1 / ratio).clamp(max=self.cap), ratio)
        cut = left_interval(ratio, inputs.advantages, 1 - self.clip_low, high=1 + self.clip_high)
        one = (inputs.logprobs - inputs.logprobs.detach()).exp()  # carries the gradient of log pi
        one = torch.where(cut, 1.0, one)
        capped = (inputs.advantages > 0) & is_truncated(1 / ratio, 0.0, self.cap)
        return LossOutput(per_token=-weights * one * inputs.advantages, clipped=cut | capped)


@dataclass(frozen=True)
class OPSM(PolicyLoss):
    """PPO-clip with off-policy sequence masking (DeepSeek-V3.2).

    A completion's tokens with A < 0 are dropped if (1 / L) sum (log mu - log pi) > delta. DeepSeek's delta could not be
    checked; 0.5 is TRL's example, slime uses 1e-4.

    Args:
        delta: largest mean drift of a completion with A < 0, in nats per token.
        clip_low: how far r may fall below 1.
        clip_high: how far r may rise above 1.

    Raises:
        ValueError: a bound is negative.
    """

    delta: float = 0.5
    clip_low: float = 0.2
    clip_high: float = 0.2

    def __post_init__(self) -> None:
        check_clip("OPSM", self.clip_low, self.clip_high)
        check_range("OPSM", ">= 0", delta=self.delta)

    def token_loss(self, inputs: LossInputs) -> LossOutput:
        """PPO-clip, with 0 at dropped tokens."""
        loss, cut = clipped_surrogate(inputs.ratio, inputs.advantages, 1 - self.clip_low, high=1 + self.clip_high)
        drift = -geometric_log_ratio(inputs.logprobs.detach() - inputs.behavior_logprobs, inputs.loss_mask)
        dropped = (inputs.advantages < 0) & (drift > self.delta)[:, None]
        return LossOutput(per_token=torch.where(dropped, 0.0, loss), clipped=cut | dropped)


# -- SAT: PPO-clip with a smaller trust region for the tokens that drifted most ---------------------------------------


@dataclass(frozen=True)
class SAT(PolicyLoss):
    """PPO-clip with a bound that shrinks beyond a quantile of |log r|. Staleness-adaptive, arXiv:2607.18722.

    With d = log r, r = pi / pi_prox, and q the `quantile` of |d| over the tokens of the micro-batch, of all ranks (a
    collective): where |d| > q the bound on the token's side (`clip_high` where d > 0, `clip_low` where d < 0) is
    multiplied by 2 / (1 + (|d| / q)^2). As in PPO-clip, tokens that move back toward r = 1 keep their gradient.
    quantile = 1 is PPO-clip. The exponent 2 is from a summary of the paper, the rest of the factor ours.

    Args:
        clip_low: how far r may fall below 1.
        clip_high: how far r may rise above 1.
        quantile: share of tokens with the full trust region.

    Raises:
        ValueError: a bound is negative, or the quantile is outside (0, 1].
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    quantile: float = 0.9

    def __post_init__(self) -> None:
        check_clip("SAT", self.clip_low, self.clip_high)
        check_range("SAT", "in (0, 1]", quantile=self.quantile)

    def shrinkage(self, inputs: LossInputs) -> Float[Tensor, "B T"]:
        """Factor of each token's bound, 1 up to the quantile and below 1 beyond."""
        drift = inputs.log_ratio.detach().abs()
        counted = gather_over_ranks(drift[inputs.loss_mask])
        everything = torch.ones_like(counted, dtype=torch.bool)
        # rounding must not shrink the region
        threshold = masked_quantiles(counted, everything, [self.quantile]).clamp(min=MIN_DRIFT)
        relative = drift / threshold
        return torch.where(relative > 1, 2 / (1 + relative.square()), 1.0)

    def token_loss(self, inputs: LossInputs) -> LossOutput:
        """-min(r A, clip(r, 1 - low k, 1 + high k) A), k the token's factor."""
        factor = self.shrinkage(inputs)
        low = 1 - self.clip_low * factor
        high = 1 + self.clip_high * factor
        loss, cut = clipped_surrogate(inputs.ratio, inputs.advantages, low, high=high)
        return LossOutput(per_token=loss, clipped=cut)


# -- ESTR: a trust region in proportion to the sampler's entropy ------------------------------------------------------


@dataclass(frozen=True)
class ESTR(PolicyLoss):
    """PPO-clip on the tokens with d^2 / (H + eps) <= tau; the others get no gradient, and stay in the average.

    d = log pi - log mu, H the entropy of mu at the token (`data.sampling.head: 0` records it). The expected square of d
    grows with H: a single bound for all tokens keeps the noise of nearly certain tokens and cuts exploration where the
    sampler was uncertain. Entropy-scaled trust region, arXiv:2607.22186. The paper's tau could not be found: calibrate
    it by the logged share of clipped tokens.

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
            raise ValueError(
                "ESTR needs the entropy of the sampling distribution: set data.sampling.head to 0 or more to record it"
            )
        if inputs.behavior_entropy.isnan().any():  # comparisons with NaN are False, which would be plain PPO-clip
            raise ValueError("ESTR needs the entropy of the sampling distribution, which the engine has not recorded")
        loss, cut = clipped_surrogate(inputs.ratio, inputs.advantages, 1 - self.clip_low, high=1 + self.clip_high)
        outside = inputs.log_ratio.detach().square() > self.tau * (inputs.behavior_entropy + self.eps)
        return LossOutput(per_token=torch.where(outside, 0.0, loss), clipped=cut | outside)


# -- Prefix ratios: the weight of a token also depends on the ratios of the tokens before it --------------------------
# The exact off-policy gradient weights token t by the ratio of the whole prefix, prod over i <= t of r_i: its variance
# grows with t. Both losses replace the product by a statistic that does not accumulate. Tokens that do not train (a
# tool's answer) are not part of any prefix. r = pi / pi_prox of a token.


def minimum_before(log_ratio: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Smallest log-ratio of the trained tokens before each token; 0 where there is none."""
    values = torch.where(mask, log_ratio, math.inf)
    values = torch.cat([torch.full_like(values[:, :1], math.inf), values[:, :-1]], dim=1)
    smallest = values.cummin(dim=1).values
    return torch.where(smallest == math.inf, 0.0, smallest)


def mean_up_to(log_ratio: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Mean log-ratio of the trained tokens up to and including each token."""
    return masked(log_ratio, mask).cumsum(dim=1) / mask.cumsum(dim=1).clamp(min=1)


@dataclass(frozen=True)
class MinPRO(PolicyLoss):
    """L = -sg(min(w, cap)) A log pi with w_t = r_t min over i < t of r_i (w_1 = r_1). arXiv:2601.22718.

    The smallest ratio of the preceding tokens stands for the product of all of them. From the paper's abstract; its
    truncation could not be checked: the cap is that of truncated importance sampling.

    Args:
        cap: largest weight; `inf` does not truncate.

    Raises:
        ValueError: the cap is not positive.
    """

    needs_single_rows: ClassVar[bool] = True

    cap: float = 2.0

    def __post_init__(self) -> None:
        check_range("MinPRO", "> 0", cap=self.cap)

    def token_loss(self, inputs: LossInputs) -> LossOutput:
        """-sg(min(w, cap)) A log pi."""
        log_ratio = inputs.log_ratio.detach()
        weights = safe_exp(log_ratio + minimum_before(log_ratio, inputs.loss_mask))
        capped = is_truncated(weights, 0.0, self.cap, num_tokens=2)
        return LossOutput(per_token=surrogate(weights.clamp(max=self.cap), inputs), clipped=capped)


@dataclass(frozen=True)
class PNPO(PolicyLoss):
    """L = -min(s A, clip(s, 1 - low, 1 + high) A), s_t the geometric mean of r_1 ... r_t. arXiv:2608.01418.

    s_t has the gradient of its own token, s_t grad log pi_t, as in GSPO-token: the last token's s is GSPO's ratio. From
    a summary of the paper; its bounds and its gradient through the prefix could not be checked.

    Args:
        clip_low: how far s may fall below 1; `inf` does not clip.
        clip_high: how far s may rise above 1; `inf` does not clip.

    Raises:
        ValueError: a bound is negative.
    """

    needs_single_rows: ClassVar[bool] = True

    clip_low: float = 0.2
    clip_high: float = 0.2

    def __post_init__(self) -> None:
        check_clip("PNPO", self.clip_low, self.clip_high)

    def token_loss(self, inputs: LossInputs) -> LossOutput:
        """-min(s A, clip(s) A)."""
        prefix = safe_exp(mean_up_to(inputs.log_ratio.detach(), inputs.loss_mask))
        one = (inputs.logprobs - inputs.logprobs.detach()).exp()  # carries the gradient of log pi
        loss, cut = clipped_surrogate(prefix * one, inputs.advantages, 1 - self.clip_low, high=1 + self.clip_high)
        return LossOutput(per_token=loss, clipped=cut)


# -- BAPO: PPO-clip with adaptive bounds that balance positive and negative contributions to the surrogate ------------


def _grid(start: float, stop: float, step: float) -> list[float]:
    """start, start + step, ... and stop; the last step may be shorter."""
    below = [start + n * step for n in range(1, math.ceil((stop - start) / step))]
    inner = [value for value in below if value < stop - 1e-9 * step]  # closer to `stop` is `stop` itself, rounded
    return [start, *inner, stop] if stop > start else [start]


def _check_grids(loss: BAPO | BAPOReleased) -> None:
    owner = type(loss).__name__
    check_range(owner, ">= 0", low_start=loss.low_start, high_start=loss.high_start)
    check_range(owner, f">= {loss.low_start}", low_stop=loss.low_stop)
    check_range(owner, f">= {loss.high_start}", high_stop=loss.high_stop)
    check_range(owner, "> 0", low_step=loss.low_step, high_step=loss.high_step)


def _contributions(
    inputs: LossInputs, scale: Float[Tensor, "B T"], lows: Sequence[float], highs: Sequence[float]
) -> tuple[list[float], list[float]]:
    """Sums of |min(r A, clip(r, low, high) A)| over A > 0 for each `high`, and over A < 0 for each `low`.

    Each sum depends on one bound only: the clip bounds r from above where A > 0, and from below where A < 0. One
    collective reduces all sums over ranks, so that every rank picks the same candidate.
    """
    ratio = inputs.ratio.detach().double()
    size = masked(scale.double() * inputs.advantages.double().abs(), inputs.loss_mask)
    positive = masked(size, inputs.advantages > 0)
    negative = masked(size, inputs.advantages < 0)
    sums = [(positive * ratio.clamp(max=high)).sum() for high in highs]
    sums += [(negative * ratio.clamp(min=low)).sum() for low in lows]
    total = sum_over_ranks(torch.stack(sums)).tolist()
    return total[: len(highs)], total[len(highs) :]


@dataclass(frozen=True)
class BAPO(PolicyLoss):
    """PPO-clip with bounds [c_low, c_high], raised until the share of positive tokens in the surrogate is rho_0.

    share(c_low, c_high) = |sum over A > 0 of mu min(r A, clip(r, 0, c_high) A)| / |sum over all of mu min(r A,
    clip(r, c_low, c_high) A)|. From the lowest bounds, c_high rises step by step to its maximum, then c_low, until
    share >= rho_0. arXiv:2510.18927: the paper's statistic, order and constants; sums over the micro-batch of all
    ranks. With advantages of one sign the share is 1 (bounds stay) or 0 (both end at their maximum). The released code
    differs in all three: `BAPOReleased`.

    Args:
        target_share: rho_0, the target share of positive tokens.
        low_start: initial c_low.
        low_stop: largest c_low.
        low_step: increment of c_low.
        high_start: initial c_high.
        high_stop: largest c_high.
        high_step: increment of c_high.

    Raises:
        ValueError: bounds are in the wrong order, or a step is not positive.
    """

    target_share: float = 0.4
    low_start: float = 0.6
    low_stop: float = 0.9
    low_step: float = 0.02
    high_start: float = 1.2
    high_stop: float = 3.0
    high_step: float = 0.05

    def __post_init__(self) -> None:
        _check_grids(self)

    def bounds(self, inputs: LossInputs) -> tuple[float, float]:
        """(c_low, c_high) for this micro-batch, the same on every rank. A collective: all ranks call."""
        lows = _grid(self.low_start, self.low_stop, self.low_step)
        highs = _grid(self.high_start, self.high_stop, self.high_step)
        positive, negative = _contributions(inputs, inputs.behavior_logprobs.exp(), lows, highs=highs)
        path = [(0, j) for j in range(len(highs))] + [(i, len(highs) - 1) for i in range(1, len(lows))]
        for i, j in path:
            if positive[j] >= self.target_share * abs(positive[j] - negative[i]):
                break
        return lows[i], highs[j]

    def token_loss(self, inputs: LossInputs) -> LossOutput:
        """-min(r A, clip(r, c_low, c_high) A)."""
        loss, cut = clipped_surrogate(inputs.ratio, inputs.advantages, *self.bounds(inputs))
        return LossOutput(per_token=loss, clipped=cut)


@dataclass(frozen=True)
class BAPOReleased(PolicyLoss):
    """BAPO as released: the ratio of positive to negative sums, c_low raised first, and a dual clip.

    ratio(c_low, c_high) = sum over A > 0 of min(r, c_high) A / |sum over A < 0 of max(r, c_low) A|, without mu; c_low
    rises to its maximum, then c_high, until the ratio is at least the target. (Raising c_low lowers the ratio, so half
    of the path moves away from the target.) Constants are from the repository's example script; the defaults of its
    configuration are target 1, c_low 0.6 to 0.8, and steps of 0.05. Reimplemented, no code taken.

    Args:
        target_ratio: target ratio of positive to negative sums.
        low_start: initial c_low.
        low_stop: largest c_low.
        low_step: increment of c_low.
        high_start: initial c_high.
        high_stop: largest c_high.
        high_step: increment of c_high.
        dual_clip: bounds the loss of tokens with A < 0 at -dual_clip * A.

    Raises:
        ValueError: bounds are in the wrong order, a step is not positive, or `dual_clip` is not above 1.
    """

    target_ratio: float = 0.5
    low_start: float = 0.8
    low_stop: float = 0.95
    low_step: float = 0.05
    high_start: float = 1.2
    high_stop: float = 2.0
    high_step: float = 0.1
    dual_clip: float = 3.0

    def __post_init__(self) -> None:
        _check_grids(self)
        check_range("BAPOReleased", "> 1", dual_clip=self.dual_clip)

    def bounds(self, inputs: LossInputs) -> tuple[float, float]:
        """(c_low, c_high) for this micro-batch, the same on every rank. A collective: all ranks call."""
        lows = _grid(self.low_start, self.low_stop, self.low_step)
        highs = _grid(self.high_start, self.high_stop, self.high_step)
        positive, negative = _contributions(inputs, torch.ones_like(inputs.logprobs), lows, highs=highs)
        path = [(i, 0) for i in range(len(lows))] + [(len(lows) - 1, j) for j in range(1, len(highs))]
        for i, j in path:
            if positive[j] >= self.target_ratio * negative[i]:
                break
        return lows[i], highs[j]

    def token_loss(self, inputs: LossInputs) -> LossOutput:
        """-min(r A, clip(r, c_low, c_high) A), for A < 0 at most -dual_clip A."""
        loss, cut = clipped_surrogate(inputs.ratio, inputs.advantages, *self.bounds(inputs))
        ceiling = -self.dual_clip * inputs.advantages
        too_high = (inputs.advantages < 0) & (loss > ceiling)
        return LossOutput(per_token=torch.where(too_high, ceiling, loss), clipped=cut | too_high)
