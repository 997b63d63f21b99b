"""REINFORCE and the clipped surrogates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from lit_async_rl.importance import masked
from lit_async_rl.losses.base import LossInputs, LossOutput, PolicyLoss


@dataclass(frozen=True)
class Reinforce(PolicyLoss):
    """Policy gradient: L = -A log pi. Williams 1992.

    Off-policy data need a correction (`lit_async_rl.corrections`) with `proximal: CurrentProximal`: its weights
    pi / mu then multiply each token's loss.
    """

    anchored: ClassVar[bool] = False

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Loss of each token."""
        loss = -masked(inputs.advantages, inputs.loss_mask) * masked(inputs.logprobs, inputs.loss_mask)
        return LossOutput(per_token=loss, clipped=torch.zeros_like(inputs.loss_mask))


@dataclass(frozen=True)
class PPOClip(PolicyLoss):
    """Clipped surrogate: L = -min(r A, clip(r, 1 - low, 1 + high) A), r = pi / anchor.

    Schulman et al. 2017, arXiv:1707.06347, eq. 7; it is the loss of GRPO (arXiv:2402.03300) and Dr. GRPO
    (arXiv:2503.20783). Separate bounds are DAPO's clip-higher (arXiv:2503.14476); `dual_clip` bounds the loss of tokens
    with negative advantage at -c A (Ye et al. 2020, arXiv:1912.09729, eq. 5).

    Args:
        clip_low: how far r may fall below 1; `inf` does not clip.
        clip_high: how far r may rise above 1; `inf` does not clip.
        dual_clip: c > 1, or None for none.

    Raises:
        ValueError: a bound is out of range.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None

    anchored: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.clip_low < 0 or self.clip_high < 0:
            raise ValueError(f"clip_low and clip_high must be >= 0, got {self.clip_low} and {self.clip_high}")
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ValueError(f"dual_clip must be > 1, got {self.dual_clip}")

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Loss of each token."""
        ratio = inputs.log_ratio.exp()
        advantages = masked(inputs.advantages, inputs.loss_mask)
        free, bounded = -ratio * advantages, -ratio.clamp(1 - self.clip_low, 1 + self.clip_high) * advantages
        loss = torch.maximum(free, bounded)
        clipped = bounded > free
        if self.dual_clip is not None:
            ceiling = -self.dual_clip * advantages
            cut = (advantages < 0) & (loss > ceiling)
            loss, clipped = torch.where(cut, ceiling, loss), clipped | cut
        return LossOutput(per_token=masked(loss, inputs.loss_mask), clipped=clipped & inputs.loss_mask)
