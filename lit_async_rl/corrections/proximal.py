"""Choice of the proximal policy pi_prox between behavior policy mu and current policy pi.

Loss and correction factor the importance ratio: pi / mu = (pi / pi_prox) x (pi_prox / mu), the first factor in the
loss, the second in the correction.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


class Proximal(ABC):
    """Maps log-probabilities of pi (detached) and mu to those of the proximal policy.

    Values at tokens that do not train are ignored. Subclass it for log-probabilities recomputed under other weights;
    with one optimizer step per batch, those at the start of the step are `CurrentProximal`.
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

    With one optimizer step per batch that is the detached pi itself: the "recomputed" proximal policy of decoupled
    PPO (AReaL, arXiv:2505.24298) without another forward pass. The ratio is 1, no clip ever acts, and the gradient is
    that of REINFORCE; the correction alone accounts for pi / mu.
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

    A-3PO's approximation: the ratio is (pi / mu)^(1/d), as if every version had changed the policy equally.
    d = 1 gives mu; d = 0 gives pi, so that a difference there (the engine's numerics) is left to the correction. From
    its authors' description and AReaL's code, which takes mu at d = 0; the paper's text could not be checked.
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
