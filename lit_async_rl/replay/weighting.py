"""Sampling weights of the replay buffer."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from lit_async_rl.utils.checks import check_range


class ReplayWeighting(ABC):
    """Log-weights of prompts and rollouts, up to an additive constant."""

    def prompt_log_weight(self, age: int) -> float:
        """Log-weight of a prompt whose newest completion is `age` versions old."""
        return 0.0

    @abstractmethod
    def rollout_log_weight(self, reward: float, age: int) -> float:
        """Log-weight of a completion within its prompt."""


@dataclass(frozen=True)
class UniformReplay(ReplayWeighting):
    """Uniform over prompts and over the completions of a prompt."""

    def rollout_log_weight(self, reward: float, age: int) -> float:
        """0."""
        return 0.0


@dataclass(frozen=True)
class RewardReplay(ReplayWeighting):
    """Completions in proportion to exp(inverse_temperature * reward), prompts uniformly, as in TBA.

    Args:
        inverse_temperature: 0 is `UniformReplay`.
    """

    inverse_temperature: float = 1.0

    def rollout_log_weight(self, reward: float, age: int) -> float:
        """inverse_temperature * reward."""
        return self.inverse_temperature * reward


@dataclass(frozen=True)
class RecencyReplay(ReplayWeighting):
    """Weights of prompts and completions halve every `half_life` versions of age.

    Args:
        half_life: in versions.

    Raises:
        ValueError: `half_life` is not positive.
    """

    half_life: float = 10.0

    def __post_init__(self) -> None:
        check_range("RecencyReplay", "positive", half_life=self.half_life)

    def prompt_log_weight(self, age: int) -> float:
        """-log 2 * age / half_life."""
        return -math.log(2) * age / self.half_life

    def rollout_log_weight(self, reward: float, age: int) -> float:
        """-log 2 * age / half_life."""
        return self.prompt_log_weight(age)
