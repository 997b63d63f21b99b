"""Credit of branches: which part of an episode's advantage each of its rows gets.

The advantage of a sample comes from the one reward of its episode. The rows of the episode (its main conversation,
branches, summaries, sub-agents) train with that advantage times their credit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from lit_async_rl.utils.checks import check_range


@dataclass(frozen=True, kw_only=True)
class BranchInfo:
    """A row of an episode.

    Attributes:
        is_main: whether it is the main conversation: that of the first call.
        last_call: number of the last call in it, from 0.
        num_turns: turns of the policy that train in it.
        num_tokens: tokens that train in it.
        system: system prompt; empty without one.
    """

    is_main: bool
    last_call: int
    num_turns: int
    num_tokens: int
    system: str = ""


class BranchCredit(ABC):
    """Rule for the credit of an episode's rows."""

    @abstractmethod
    def __call__(self, branches: Sequence[BranchInfo]) -> Sequence[float]:
        """Factor of the advantage for each row; the main conversation comes first."""


@dataclass(frozen=True)
class Share(BranchCredit):
    """1 for each: all rows share the episode's advantage, so each of its tokens counts the same."""

    def __call__(self, branches: Sequence[BranchInfo]) -> list[float]:
        return [1.0] * len(branches)


@dataclass(frozen=True)
class Discount(BranchCredit):
    """gamma^k, where k rows have ended later: what was done last gets the whole advantage.

    AReaL discounts the reward in the same way, by calls instead of rows.

    Args:
        gamma: discount factor.

    Raises:
        ValueError: gamma is not in [0, 1].
    """

    gamma: float = 0.9

    def __post_init__(self) -> None:
        check_range("Discount", "in [0, 1]", gamma=self.gamma)

    def __call__(self, branches: Sequence[BranchInfo]) -> list[float]:
        return [self.gamma ** sum(other.last_call > one.last_call for other in branches) for one in branches]


@dataclass(frozen=True)
class MeanByLeaf(BranchCredit):
    """1 / n with n rows: an episode of many branches weighs as much as one without."""

    def __call__(self, branches: Sequence[BranchInfo]) -> list[float]:
        return [1 / len(branches)] * len(branches)
