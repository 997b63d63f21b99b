"""SAT: PPO-clip with a smaller trust region for the tokens that drifted most."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from lit_async_rl.importance import gather_over_ranks, masked_quantiles
from lit_async_rl.losses.base import LossInputs, LossOutput, PolicyLoss
from lit_async_rl.losses.clipped import check_clip, clipped_surrogate
from lit_async_rl.utils.checks import check_range

# drifts below are rounding of the engine against the trainer, and no reason for a smaller region
SMALLEST_DRIFT = 1e-4


@dataclass(frozen=True)
class SAT(PolicyLoss):
    """PPO-clip whose bound shrinks for tokens beyond a quantile of |log r|. Staleness-adaptive, arXiv:2607.18722.

    With d = log r, r = pi / pi_prox, and q the `quantile` of |d| over the tokens of the micro-batch, of all ranks:
    where |d| > q the bound on the token's side (`clip_high` where d > 0, `clip_low` where d < 0) is multiplied by
    2 / (1 + (|d| / q)^2). Like PPO-clip, tokens that move back toward r = 1 keep their gradient. quantile = 1 is
    PPO-clip. From a summary of the paper: the exponent 2 is the paper's, the rest of the kernel ours (1 at the
    threshold, decreasing).

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
        threshold = masked_quantiles(counted, everything, [self.quantile]).clamp(min=SMALLEST_DRIFT)
        relative = drift / threshold
        return torch.where(relative > 1, 2 / (1 + relative.square()), 1.0)

    def token_loss(self, inputs: LossInputs) -> LossOutput:
        """-min(r A, clip(r, 1 - low k, 1 + high k) A), k the token's factor."""
        factor = self.shrinkage(inputs)
        low, high = 1 - self.clip_low * factor, 1 + self.clip_high * factor
        loss, cut = clipped_surrogate(inputs.ratio, inputs.advantages, low, high)
        return LossOutput(per_token=loss, clipped=cut)
