"""PPO-style losses: the gradient of a token is cut once its ratio to the proximal policy leaves an interval."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lit_async_rl.importance import geometric_log_ratio
from lit_async_rl.losses.base import LossInputs, LossOutput, PolicyLoss, surrogate
from lit_async_rl.utils.checks import check_range


def check_clip(name: str, clip_low: float, clip_high: float) -> None:
    """Checks the clip range of the loss `name`.

    Raises:
        ValueError: a bound is negative.
    """
    check_range(name, ">= 0", clip_low=clip_low, clip_high=clip_high)


Bound = float | Float[Tensor, "B T"]


def moved_away(
    ratio: Float[Tensor, "B _"], advantages: Float[Tensor, "B T"], low: Bound, high: Bound
) -> Bool[Tensor, "B T"]:
    """Mask of tokens whose ratio left [low, high] in the direction of their advantage, where PPO clips."""
    return ((advantages > 0) & (ratio > high)) | ((advantages < 0) & (ratio < low))


def clipped_surrogate(
    ratio: Float[Tensor, "B _"], advantages: Float[Tensor, "B T"], low: Bound, high: Bound
) -> tuple[Float[Tensor, "B T"], Bool[Tensor, "B T"]]:
    """Returns -min(r A, clip(r, low, high) A), and the mask of clipped tokens, whose gradient is 0."""
    cut = moved_away(ratio, advantages, low, high)
    clipped = ratio.detach().clamp(low, high)  # type: ignore[arg-type]  # the stubs know numbers or tensors, no union
    return -torch.where(cut, clipped, ratio) * advantages, cut


@dataclass(frozen=True)
class PPOClip(PolicyLoss):
    """Clipped surrogate: L = -min(r A, clip(r, 1 - low, 1 + high) A), r = pi / pi_prox.

    Schulman et al. 2017, arXiv:1707.06347, eq. 7. Other methods are this loss with other choices elsewhere:
    GRPO (arXiv:2402.03300) with `SequenceMean` and `GroupMeanStd`; Dr. GRPO (arXiv:2503.20783) with `FixedLength` and
    `GroupMean`; DAPO (arXiv:2503.14476) with `TokenMean` and `clip_high` 0.28; decoupled PPO (AReaL,
    arXiv:2505.24298) and A-3PO with `CurrentProximal` or `InterpolatedProximal` and a correction; TIS and IcePop the
    same with `TokenTruncatedIS` and `IcePop`. `dual_clip` bounds the loss of tokens with negative advantage at -c A
    (Ye et al. 2020, arXiv:1912.09729, eq. 5).

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
        loss, cut = clipped_surrogate(inputs.ratio, inputs.advantages, 1 - self.clip_low, 1 + self.clip_high)
        if self.dual_clip is not None:
            ceiling = -self.dual_clip * inputs.advantages
            too_high = (inputs.advantages < 0) & (loss > ceiling)
            loss, cut = torch.where(too_high, ceiling, loss), cut | too_high
        return LossOutput(per_token=loss, clipped=cut)


@dataclass(frozen=True)
class MiniRL(PolicyLoss):
    """L = -M sg(r) A log pi, r = pi / pi_prox; M = 0 where PPO would clip. Qwen, arXiv:2512.01374.

    The paper splits pi / mu = (pi_prox / mu) (pi / pi_prox) into the mismatch of engine and trainer and the staleness
    since the proximal policy. The first factor is the correction (`TokenTruncatedIS(cap=5.0)` in the paper), the second
    this loss; without a policy between mu and pi (`BehaviorProximal`) r is both. The gradient is PPO-clip's, the value
    is not. Advantages: `GroupMean`; averaging without lengths: `TokenMean` or `FixedLength`. From a summary of the
    paper; its text could not be checked.

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
        cut = moved_away(ratio, inputs.advantages, 1 - self.clip_low, 1 + self.clip_high)
        return LossOutput(per_token=surrogate(torch.where(cut, 0.0, ratio), inputs), clipped=cut)


@dataclass(frozen=True)
class ASPO(PolicyLoss):
    """PPO-clip with the weight inverted where A > 0 (1 / r in place of r), so that unlikely good tokens count more.

    A < 0: -r A, cut where r < 1 - low. A > 0: -sg(min(1 / r, cap)) (pi / sg(pi)) A, cut where r > 1 + high; the
    capped weight keeps its gradient. arXiv:2510.06062 v2; its code could not be checked, and the cap of 3 is read from
    a figure.

    Args:
        clip_low: how far r may fall below 1 where A < 0.
        clip_high: how far r may rise above 1 where A > 0.
        cap: largest flipped weight; the paper calls it a soft dual clip, without which gradients explode.

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
        cut = moved_away(ratio, inputs.advantages, 1 - self.clip_low, 1 + self.clip_high)
        one = (inputs.logprobs - inputs.logprobs.detach()).exp()  # carries the gradient of log pi
        one = torch.where(cut, 1.0, one)
        capped = (inputs.advantages > 0) & (1 / ratio > self.cap)
        return LossOutput(per_token=-weights * one * inputs.advantages, clipped=cut | capped)


@dataclass(frozen=True)
class OPSM(PolicyLoss):
    """PPO-clip with off-policy sequence masking (DeepSeek-V3.2): stale completions with A < 0 are masked.

    A completion's tokens with A < 0 are dropped if (1 / L) sum (log mu - log pi) > delta. DeepSeek's delta could not be
    checked; 0.5 is TRL's example, slime uses 1e-4.

    Args:
        delta: largest mean drift log mu - log pi, in nats per token, of a completion with A < 0.
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
        """PPO-clip, with 0 at the A < 0 tokens of completions that drifted by more than `delta`."""
        loss, cut = clipped_surrogate(inputs.ratio, inputs.advantages, 1 - self.clip_low, 1 + self.clip_high)
        drift = -geometric_log_ratio(inputs.logprobs.detach() - inputs.behavior_logprobs, inputs.loss_mask)
        dropped = (inputs.advantages < 0) & (drift > self.delta)[:, None]
        return LossOutput(per_token=torch.where(dropped, 0.0, loss), clipped=cut | dropped)
