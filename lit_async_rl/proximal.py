"""Which policy a loss's ratio is anchored at: the middle one of behavior mu, proximal, and current policy pi."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from jaxtyping import Float, Int
from torch import Tensor


class Proximal(ABC):
    """Log-probabilities of the anchor from those of pi (detached) and mu."""

    @abstractmethod
    def __call__(
        self,
        logprobs: Float[Tensor, "B T"],
        behavior_logprobs: Float[Tensor, "B T"],
        staleness: Int[Tensor, "B T"],
    ) -> Float[Tensor, "B T"]:
        """Log-probabilities of the anchor."""


class BehaviorProximal(Proximal):
    """The anchor is mu: the ratio is pi / mu, no matter how stale. Leaves nothing for a correction to correct."""

    def __call__(self, logprobs: Tensor, behavior_logprobs: Tensor, staleness: Tensor) -> Tensor:
        """Those of mu."""
        return behavior_logprobs


class CurrentProximal(Proximal):
    """The anchor is pi at the start of the step.

    With one optimizer step on each batch that is the detached pi itself: the "recomputed" proximal policy of decoupled
    PPO (AReaL, arXiv:2505.24298, section 5.2) without another forward pass. The ratio is 1 and the gradient that of
    REINFORCE; the correction takes care of pi / mu.
    """

    def __call__(self, logprobs: Tensor, behavior_logprobs: Tensor, staleness: Tensor) -> Tensor:
        """Those of pi."""
        return logprobs


class InterpolatedProximal(Proximal):
    """The anchor is between mu and pi: log pi_prox = (1/d) log mu + (1 - 1/d) log pi, d = staleness.

    A-3PO's log-linear approximation, as its authors' documentation in AReaL describes it; d = 0 gives pi. (AReaL's code
    takes mu there; the paper's text could not be checked.)
    """

    def __call__(self, logprobs: Tensor, behavior_logprobs: Tensor, staleness: Tensor) -> Tensor:
        """Between those of mu and pi."""
        share = 1.0 / staleness.clamp(min=1).to(logprobs.dtype)
        return torch.where(staleness > 0, share * behavior_logprobs + (1 - share) * logprobs, logprobs)
