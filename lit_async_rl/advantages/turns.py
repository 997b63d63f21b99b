"""Turn-level advantage estimators for multi-turn rollouts: each turn has its own advantage.

A rollout without `turns` is one turn. r_k is the reward of turn k, G_k = sum_{j >= k} gamma^(j - k) r_j its return.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from lit_async_rl.advantages.group import AdvantageEstimator, Lengths, Rewards, centered, standardized
from lit_async_rl.errors import InvariantError
from lit_async_rl.types import Rollout, RolloutGroup, Turn
from lit_async_rl.utils.checks import check_range

Turns = Sequence[Sequence[Turn]]  # of the rollouts of one group


def returns(turns: Sequence[Turn], gamma: float) -> list[float]:
    """Discounted return G_k of each turn."""
    result: list[float] = []
    for turn in reversed(turns):
        result.insert(0, turn.reward + gamma * (result[0] if result else 0.0))
    return result


class TurnAdvantageEstimator(AdvantageEstimator):
    """Base class: maps the turns of a group to an advantage per turn."""

    @abstractmethod
    def of_group(self, turns: Turns) -> list[list[float]]:
        """Advantage of each turn of each rollout of a group; `turns` has one list per rollout."""

    def estimate(self, rewards: Rewards, lengths: Lengths) -> list[list[float]]:
        """Advantages of single-turn rollouts."""
        groups = [[[Turn(end=0, reward=reward, state=0)] for reward in group] for group in rewards]
        return [[row[0] for row in self.of_group(group)] for group in groups]

    def per_token(self, groups: Sequence[RolloutGroup]) -> list[list[list[float]]]:
        """Advantage of each token, that of its turn; environment tokens, which do not train, take the next turn's."""
        result = []
        for group in groups:
            turns = [_turns(rollout) for rollout in group.rollouts]
            rows = zip(group.rollouts, turns, self.of_group(turns), strict=True)
            result.append([_spread(rollout, own, values) for rollout, own, values in rows])
        return result


@dataclass(frozen=True)
class TurnReturns(TurnAdvantageEstimator):
    """A_k = G_k - mean of the group's G_k at turn k, over the rollouts with a turn k; optionally / (std + eps).

    Reward-to-go with a baseline per turn; equal to `GroupMean` or `GroupMeanStd` for single-turn rollouts. Not from a
    paper. With gamma 1 and a reward in the last turn only, it is the advantage among the rollouts still running.

    Args:
        gamma: discount factor per turn.
        standardize: divide by the standard deviation.
        eps: added to the standard deviation, which bounds advantages of nearly equal returns.

    Raises:
        ValueError: a setting is out of range.
    """

    gamma: float = 1.0
    standardize: bool = False
    eps: float = 1e-6

    def __post_init__(self) -> None:
        _check("TurnReturns", self.gamma, self.eps)

    def of_group(self, turns: Turns) -> list[list[float]]:
        """Returns minus their mean at the same turn."""
        to_go = [returns(own, self.gamma) for own in turns]
        places = [range(len(own)) for own in turns]
        return _relative(to_go, places, self.standardize, self.eps)


@dataclass(frozen=True)
class GiGPO(TurnAdvantageEstimator):
    """A_k = A_E + omega A_S: episode advantage within the group plus step advantage among turns in the same state.

    A_E = (R - mean R) / F over rollouts, R = sum_k r_k; A_S = (G_k - mean G) / F over all turns of the group that began
    in the state that turn k began in. F is 1, or the standard deviation + eps with `standardize`. A state
    visited once gives A_S = 0. arXiv:2505.10978, equations 3, 6 and 7; standard deviations are the population's here.
    The step- and trajectory-level advantage of SAMPO (ARLArena, arXiv:2602.21534).

    Args:
        omega: weight of A_S.
        gamma: discount factor per turn.
        standardize: divide by the standard deviation.
        eps: added to the standard deviation, which bounds advantages of nearly equal returns.

    Raises:
        ValueError: a setting is out of range.
    """

    omega: float = 1.0
    gamma: float = 0.95
    standardize: bool = True
    eps: float = 1e-6

    def __post_init__(self) -> None:
        _check("GiGPO", self.gamma, self.eps)
        check_range("GiGPO", ">= 0", omega=self.omega)

    def of_group(self, turns: Turns) -> list[list[float]]:
        """Sum of episode and step advantages."""
        totals = [sum(turn.reward for turn in own) for own in turns]
        whole = standardized(totals, self.eps) if self.standardize else centered(totals)
        to_go = [returns(own, self.gamma) for own in turns]
        states = [[turn.state for turn in own] for own in turns]
        steps = _relative(to_go, states, self.standardize, self.eps)
        return [[value + self.omega * step for step in row] for value, row in zip(whole, steps, strict=True)]


def _relative(
    values: Sequence[Sequence[float]], keys: Sequence[Sequence[int]], standardize: bool, eps: float
) -> list[list[float]]:
    """Centers (or standardizes) values among those with the same key."""
    cells: dict[int, list[tuple[int, int]]] = {}
    for i, row in enumerate(keys):
        for k, key in enumerate(row):
            cells.setdefault(key, []).append((i, k))
    result = [[0.0] * len(row) for row in values]
    for members in cells.values():
        found = [values[i][k] for i, k in members]
        relative = standardized(found, eps) if standardize else centered(found)
        for (i, k), value in zip(members, relative, strict=True):
            result[i][k] = value
    return result


def _turns(rollout: Rollout) -> Sequence[Turn]:
    return rollout.turns or [Turn(end=len(rollout.completion_ids), reward=rollout.reward, state=0)]


def _spread(rollout: Rollout, turns: Sequence[Turn], values: Sequence[float]) -> list[float]:
    tokens: list[float] = []
    for turn, value in zip(turns, values, strict=True):
        tokens += [value] * (turn.end - len(tokens))
    if len(tokens) != len(rollout.completion_ids):
        raise InvariantError("the last turn ends with the rollout")
    return tokens


def _check(name: str, gamma: float, eps: float) -> None:
    check_range(name, "in [0, 1]", gamma=gamma)
    check_range(name, ">= 0", eps=eps)
