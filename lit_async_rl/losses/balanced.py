"""BAPO: PPO-clip with adaptive bounds that balance positive and negative contributions to the surrogate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from lit_async_rl.importance import masked, sum_over_ranks
from lit_async_rl.losses.base import LossInputs, LossOutput, PolicyLoss
from lit_async_rl.losses.clipped import clipped_surrogate
from lit_async_rl.utils.checks import check_range


def _grid(start: float, stop: float, step: float) -> list[float]:
    """start, start + step, ... and stop, which the last step reaches even if it is a shorter one."""
    below = [start + n * step for n in range(1, math.ceil((stop - start) / step))]
    inner = [value for value in below if value < stop - 1e-9 * step]  # 1e-9 of a step is rounding, not a step
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

    The clip only bounds r from above where A > 0, and from below where A < 0, so each sum depends on one bound. All
    sums are reduced over ranks in one collective, so that every rank picks the same candidate.
    """
    ratio = inputs.ratio.detach().double()
    size = masked(scale.double() * inputs.advantages.double().abs(), inputs.loss_mask)
    positive, negative = masked(size, inputs.advantages > 0), masked(size, inputs.advantages < 0)
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
        positive, negative = _contributions(inputs, inputs.behavior_logprobs.exp(), lows, highs)
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
    """BAPO as its repository computes it: positive / negative sums, c_low raised first, and a dual clip.

    ratio(c_low, c_high) = sum over A > 0 of min(r, c_high) A / |sum over A < 0 of max(r, c_low) A|, without mu; c_low
    rises to its maximum, then c_high, until the ratio is at least the target. (Raising c_low lowers the ratio, so
    half of the path moves away from the target.) Constants are those of the repository's example script; its
    configuration defaults differ: target 1, c_low 0.6 to 0.8, both steps 0.05. Reimplemented, no code taken.

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
        positive, negative = _contributions(inputs, torch.ones_like(inputs.logprobs), lows, highs)
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
