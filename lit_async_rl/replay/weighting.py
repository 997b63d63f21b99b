"""What a replay buffer draws how often."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from lit_async_rl.utils.checks import check_range


class ReplayWeighting(ABC):
    """How likely something stored is drawn; log-weights may have any constant added."""

    def prompt_log_weight(self, age: int) -> float:
        """Of a prompt whose newest completion is `age` versions old."""
        return 0.0

    @abstractmethod
    def rollout_log_weight(self, reward: float, age: int) -> float:
        """Of a completion among those of its prompt."""


@dataclass(frozen=True)
class UniformReplay(ReplayWeighting):
    """Everything alike."""

    def rollout_log_weight(self, reward: float, age: int) -> float:
        """0."""
        return 0.0


@dataclass(frozen=True)
class RewardReplay(ReplayWeighting):
    """Completions in proportion to exp(inverse_temperature * reward), prompts alike, as in TBA.

    Args:
        inverse_temperature: 0 is `UniformReplay`.
    """

    inverse_temperature: float = 1.0

    def rollout_log_weight(self, reward: float, age: int) -> float:
        """inverse_temperature * reward."""
        return self.inverse_temperature * reward


@dataclass(frozen=True)
class RecencyReplay(ReplayWeighting):
    """Prompts and completions half as likely for every `half_life` versions of age.

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
