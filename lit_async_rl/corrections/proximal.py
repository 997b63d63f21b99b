"""Which policy a loss's ratio is anchored at: the middle one of behavior mu, proximal, and current policy pi.

Loss and correction share the way from mu to pi: pi / mu = (pi / anchor) x (anchor / mu), the first factor in the loss,
the second in the correction.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


class Proximal(ABC):
    """Log-probabilities of the anchor from those of pi (detached) and mu.

    Values at tokens that do not train may be anything. One that reads log-probabilities recomputed under other weights
    subclasses this too; with one optimizer step on each batch those of the start of the step are `CurrentProximal`.
    """

    @abstractmethod
    def __call__(
        self,
        logprobs: Float[Tensor, "B T"],
        behavior_logprobs: Float[Tensor, "B T"],
        staleness: Int[Tensor, "B T"],
    ) -> Float[Tensor, "B T"]:
        """Log-probabilities of the anchor; `staleness` is versions between mu and pi."""


@dataclass(frozen=True)
class BehaviorProximal(Proximal):
    """The anchor is mu: the ratio is pi / mu, no matter how stale. Leaves nothing for a correction to correct."""

    def __call__(
        self,
        logprobs: Float[Tensor, "B T"],
        behavior_logprobs: Float[Tensor, "B T"],
        staleness: Int[Tensor, "B T"],
    ) -> Float[Tensor, "B T"]:
        """Those of mu."""
        return behavior_logprobs


@dataclass(frozen=True)
class CurrentProximal(Proximal):
    """The anchor is pi at the start of the step.

    With one optimizer step on each batch that is the detached pi itself: the "recomputed" proximal policy of decoupled
    PPO (AReaL, arXiv:2505.24298) without another forward pass. The ratio is 1, no clip ever acts, and the gradient is
    that of REINFORCE; the correction alone takes care of pi / mu.
    """

    def __call__(
        self,
        logprobs: Float[Tensor, "B T"],
        behavior_logprobs: Float[Tensor, "B T"],
        staleness: Int[Tensor, "B T"],
    ) -> Float[Tensor, "B T"]:
        """Those of pi."""
        return logprobs.detach()


@dataclass(frozen=True)
class InterpolatedProximal(Proximal):
    """The anchor is between mu and pi: log pi_prox = (1/d) log mu + (1 - 1/d) log pi, d = staleness of the token.

    A-3PO's log-linear approximation: the ratio is (pi / mu)^(1/d), as if every version had moved the policy as much.
    d = 1 gives mu; d = 0 gives pi, so that a difference there (the engine's numerics) is left to the correction. From
    its authors' description and AReaL's code, which takes mu at d = 0; the paper's text could not be checked.
    """

    def __call__(
        self,
        logprobs: Float[Tensor, "B T"],
        behavior_logprobs: Float[Tensor, "B T"],
        staleness: Int[Tensor, "B T"],
    ) -> Float[Tensor, "B T"]:
        """Between those of mu and pi."""
        logprobs = logprobs.detach()
        share = 1.0 / staleness.clamp(min=1).to(logprobs.dtype)
        return torch.where(staleness > 0, share * behavior_logprobs + (1 - share) * logprobs, logprobs)
