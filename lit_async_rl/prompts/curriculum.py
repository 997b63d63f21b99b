"""Curriculum by measured difficulty.

Prompts keep their seeded order and are skipped with a probability that depends on the measured pass rate. A position in
the stream therefore identifies a prompt, and a resumed run continues with the measured rates.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_async_rl.prompts.stream import PromptStream
from lit_async_rl.utils.checks import check_range


class PassRates:
    """Measured pass rate of each prompt, p <- p + smoothing (new - p).

    Args:
        smoothing: weight of the newest group of a prompt; the first measurement has weight 1.
    """

    def __init__(self, smoothing: float = 0.5) -> None:
        self.smoothing = smoothing
        self._rates: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._rates)

    def measure(self, number: int, pass_rate: float) -> None:
        """Updates the pass rate of prompt `number` with the pass rate of one group."""
        before = self._rates.get(number, pass_rate)
        self._rates[number] = before + self.smoothing * (pass_rate - before)

    def of(self, number: int) -> float | None:
        """Smoothed pass rate of a prompt; None if it was never measured."""
        return self._rates.get(number)

    def state_dict(self) -> dict[str, Tensor]:
        """State: `numbers` [N] and `rates` [N] of the measured prompts."""
        numbers = list(self._rates)
        rates = list(self._rates.values())
        return {"numbers": torch.tensor(numbers, dtype=torch.long), "rates": torch.tensor(rates, dtype=torch.float64)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restores the state of `state_dict`."""
        self._rates = dict(zip(state["numbers"].tolist(), state["rates"].tolist(), strict=True))


class Curriculum(ABC):
    """Rule for the probability of sampling a prompt of the stream; unmeasured ones are always sampled."""

    @abstractmethod
    def chance(self, pass_rate: float) -> float:
        """Probability of sampling a prompt with this pass rate; > 0, so that it can be measured again."""

    def advance(self, stream: PromptStream, rates: PassRates) -> int:
        """Advances the stream to the next prompt to sample and returns its position.

        A deterministic function of the stream's seed, the position and the pass rates.
        """
        while True:
            position = stream.advance()
            rate = rates.of(stream.number_at(position))
            if rate is None or random.Random(f"{stream.seed} {position}").random() < self.chance(rate):
                return position


@dataclass(frozen=True)
class _Floored(Curriculum):
    floor: float = 0.1

    def __post_init__(self) -> None:
        check_range(type(self).__name__, "in (0, 1]", floor=self.floor)


@dataclass(frozen=True)
class Learnability(_Floored):
    """max(floor, 4 p (1 - p)): proportional to the reward variance p (1 - p) of a group.

    The score of "sampling for learnability", arXiv:2408.15099, which chooses the highest scores from a large buffer;
    here it is the probability of sampling a prompt.

    Args:
        floor: minimum probability.

    Raises:
        ValueError: the floor is not in (0, 1].
    """

    def chance(self, pass_rate: float) -> float:
        """max(floor, 4 p (1 - p)), which is 1 at a pass rate of 1/2."""
        return max(self.floor, 4 * pass_rate * (1 - pass_rate))


@dataclass(frozen=True)
class HardestFirst(_Floored):
    """max(floor, 1 - p): proportional to the failure rate. Prioritized sampling of Kimi k1.5, arXiv:2501.12599.

    Args:
        floor: minimum probability.

    Raises:
        ValueError: the floor is not in (0, 1].
    """

    def chance(self, pass_rate: float) -> float:
        """max(floor, 1 - p), falling from 1 to the floor."""
        return max(self.floor, 1 - pass_rate)


@dataclass(frozen=True)
class DifficultyWindow(Curriculum):
    """Probability 1 for pass rates in [low, high], `floor` outside.

    Args:
        low: lower bound; below it prompts are too hard.
        high: upper bound; above it prompts are too easy.
        floor: probability outside of the window.

    Raises:
        ValueError: bounds are out of order, or the floor is not in (0, 1].
    """

    low: float = 0.1
    high: float = 0.9
    floor: float = 0.1

    def __post_init__(self) -> None:
        check_range("DifficultyWindow", "in [0, 1)", low=self.low)
        check_range("DifficultyWindow", f"in ({self.low}, 1]", high=self.high)
        check_range("DifficultyWindow", "in (0, 1]", floor=self.floor)

    def chance(self, pass_rate: float) -> float:
        """Returns 1 inside of the window, `floor` outside."""
        return 1.0 if self.low <= pass_rate <= self.high else self.floor
