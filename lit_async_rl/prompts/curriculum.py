"""Which prompts are worth sampling: a curriculum by measured difficulty.

Prompts keep their seeded order; a prompt that taught little when it was last sampled is skipped with some probability.
So the position in the stream still says which prompt it is, and a resumed run goes on with the pass rates it measured.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_async_rl.prompts.stream import PromptStream


class PassRates:
    """Measured difficulty: for each prompt the share of its rollouts that succeeded, p <- p + smoothing (new - p).

    Args:
        smoothing: weight of the newest group of a prompt; the first one counts fully.
    """

    def __init__(self, smoothing: float = 0.5) -> None:
        self.smoothing = smoothing
        self._rates: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._rates)

    def measure(self, number: int, pass_rate: float) -> None:
        """Adds the outcome of one group of prompt `number`."""
        before = self._rates.get(number, pass_rate)
        self._rates[number] = before + self.smoothing * (pass_rate - before)

    def of(self, number: int) -> float | None:
        """Pass rate of a prompt; None if it was never measured."""
        return self._rates.get(number)

    def state_dict(self) -> dict[str, Tensor]:
        """`numbers` [N] and `rates` [N] of the prompts measured."""
        numbers, rates = list(self._rates), list(self._rates.values())
        return {"numbers": torch.tensor(numbers, dtype=torch.long), "rates": torch.tensor(rates, dtype=torch.float64)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Goes on where `state_dict` was taken."""
        self._rates = dict(zip(state["numbers"].tolist(), state["rates"].tolist(), strict=True))


class Curriculum(ABC):
    """Says how likely a prompt is to be sampled when its turn comes; one never measured always is."""

    @abstractmethod
    def chance(self, pass_rate: float) -> float:
        """Probability for a prompt with this pass rate, more than 0: it must be possible to measure it again."""

    def advance(self, stream: PromptStream, rates: PassRates) -> int:
        """The position of the next prompt to sample; those that it skips count as handed out.

        What it does depends on the stream's seed, the position and the pass rates, and on nothing else.
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
        _check_floor(self.floor)


@dataclass(frozen=True)
class Learnability(_Floored):
    """max(floor, 4 p (1 - p)): the variance of a success, which is what a group's advantages are made of.

    The score of "sampling for learnability", arXiv:2408.15099; there the best ones are chosen from a large buffer, here
    each prompt is kept with that probability.

    Args:
        floor: least chance.

    Raises:
        ValueError: the floor is not in (0, 1].
    """

    def chance(self, pass_rate: float) -> float:
        """1 at a pass rate of one half."""
        return max(self.floor, 4 * pass_rate * (1 - pass_rate))


@dataclass(frozen=True)
class HardestFirst(_Floored):
    """max(floor, 1 - p): prompts in proportion to how often they fail. Kimi k1.5, arXiv:2501.12599.

    Args:
        floor: least chance.

    Raises:
        ValueError: the floor is not in (0, 1].
    """

    def chance(self, pass_rate: float) -> float:
        """Falls from 1 to the floor."""
        return max(self.floor, 1 - pass_rate)


@dataclass(frozen=True)
class DifficultyWindow(Curriculum):
    """1 for prompts of medium difficulty, `floor` for those outside.

    Args:
        low: pass rate below which a prompt is too hard.
        high: pass rate above which it is too easy.
        floor: chance of those.

    Raises:
        ValueError: bounds are out of order, or the floor is not in (0, 1].
    """

    low: float = 0.1
    high: float = 0.9
    floor: float = 0.1

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high <= 1:
            raise ValueError(f"DifficultyWindow needs 0 <= low < high <= 1, got {self.low} and {self.high}")
        _check_floor(self.floor)

    def chance(self, pass_rate: float) -> float:
        """All or little."""
        return 1.0 if self.low <= pass_rate <= self.high else self.floor


def _check_floor(floor: float) -> None:
    if not 0 < floor <= 1:
        raise ValueError(
            f"data.intake.curriculum.floor must be in (0, 1], or prompts are never measured again, got {floor}"
        )
