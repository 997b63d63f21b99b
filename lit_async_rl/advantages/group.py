"""Advantage estimators over groups. Outer lists are the groups of one optimizer step, inner ones rollouts.

N rollouts of a group, R_i their rewards, L_i the tokens of each that the policy wrote, masked or not.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from lit_async_rl.errors import InvariantError
from lit_async_rl.types import Rollout, RolloutGroup, Turn
from lit_async_rl.utils.checks import check_range

Rewards = Sequence[Sequence[float]]
Lengths = Sequence[Sequence[int]]


class AdvantageEstimator(ABC):
    """Maps the rewards of one optimizer step to advantages.

    A group without signal (equal rewards, or one rollout) has advantages of exactly 0, unless documented otherwise.
    """

    def __call__(self, rewards: Rewards, lengths: Lengths | None = None) -> list[list[float]]:
        """Advantage of each rollout; `lengths` count the policy's tokens of each, None for equal lengths.

        Raises:
            ValueError: a reward is not finite.
        """
        for n, group in enumerate(rewards):
            if not all(math.isfinite(reward) for reward in group):
                raise ValueError(f"rewards must be finite, but group {n} of the step has the rewards {list(group)}")
        if lengths is None:
            lengths = [[1] * len(group) for group in rewards]
        if [len(group) for group in rewards] != [len(group) for group in lengths]:
            raise InvariantError("rewards and lengths must have the same shape")
        return self.estimate(rewards, lengths)

    def per_token(self, groups: Sequence[RolloutGroup]) -> list[list[list[float]]]:
        """Advantage of each token of each rollout, followed by those of branches; by default the rollout's."""
        rewards = [[rollout.reward for rollout in group.rollouts] for group in groups]
        values = self(rewards, [[rollout.num_policy_tokens for rollout in group.rollouts] for group in groups])
        return _of_tokens(groups, values)

    @abstractmethod
    def estimate(self, rewards: Rewards, lengths: Lengths) -> list[list[float]]:
        """Computes the advantages. Rewards are finite; groups may be empty."""


@dataclass(frozen=True)
class Raw(AdvantageEstimator):
    """A = R, without baseline; equal rewards do not give 0."""

    def estimate(self, rewards: Rewards, lengths: Lengths) -> list[list[float]]:
        """Returns the rewards."""
        return [list(group) for group in rewards]


@dataclass(frozen=True)
class GroupMean(AdvantageEstimator):
    """A = R - mean of the group. Dr. GRPO, arXiv:2503.20783."""

    def estimate(self, rewards: Rewards, lengths: Lengths) -> list[list[float]]:
        """Rewards minus the group mean."""
        return [centered(group) for group in rewards]


@dataclass(frozen=True)
class GroupMeanStd(AdvantageEstimator):
    """A = (R - mean) / (std + eps) of the group. GRPO, arXiv:2402.03300.

    The standard deviation is sqrt(sum (R - mean)^2 / (N - ddof)): the population's by default, as in VCPO and M2PO;
    verl and TRL divide by N - 1, which scales advantages by sqrt((N - 1) / N).

    Args:
        eps: added to the standard deviation, which bounds advantages of nearly equal rewards.
        ddof: 1 divides by N - 1.
        std_of_step: divide by the standard deviation of all rewards of the step (arXiv:2508.08221; TRL's
            `scale_rewards: batch`), which contains that between prompts.

    Raises:
        ValueError: a setting is out of range.
    """

    eps: float = 1e-6
    ddof: int = 0
    std_of_step: bool = False

    def __post_init__(self) -> None:
        check_range("GroupMeanStd", ">= 0", eps=self.eps)
        check_range("GroupMeanStd", "integer in [0, 1]", ddof=self.ddof)

    def estimate(self, rewards: Rewards, lengths: Lengths) -> list[list[float]]:
        """Rewards standardized within the group."""
        if not self.std_of_step:
            return [standardized(group, self.eps, self.ddof) for group in rewards]
        scale = _std(centered(list(chain.from_iterable(rewards))), self.ddof) + self.eps
        return [[a / scale if a else 0.0 for a in centered(group)] for group in rewards]


@dataclass(frozen=True)
class LeaveOneOut(AdvantageEstimator):
    """A_i = R_i - mean of the group's others = (R_i - mean) N / (N - 1). RLOO, arXiv:2402.14740."""

    def estimate(self, rewards: Rewards, lengths: Lengths) -> list[list[float]]:
        """Rewards minus the mean of the other rollouts."""
        return [[a * len(group) / max(1, len(group) - 1) for a in centered(group)] for group in rewards]


@dataclass(frozen=True)
class GlobalMeanStd(AdvantageEstimator):
    """A = (R - mean) / (std + eps) over the step. REINFORCE++, arXiv:2501.03262, without its token-level KL.

    Mean and standard deviation count each rollout once; OpenRLHF and verl count each of its tokens, so that long
    completions weigh more, and verl adds eps to the variance.

    A group of equal rewards gives 0 only if the whole step is equal, or with `group_baseline`.

    Args:
        group_baseline: subtract the group mean first, as in REINFORCE++-baseline.
        eps: added to the standard deviation.

    Raises:
        ValueError: eps is negative.
    """

    group_baseline: bool = False
    eps: float = 1e-6

    def __post_init__(self) -> None:
        check_range("GlobalMeanStd", ">= 0", eps=self.eps)

    def estimate(self, rewards: Rewards, lengths: Lengths) -> list[list[float]]:
        """Rewards standardized over all groups of the step."""
        groups = [centered(group) for group in rewards] if self.group_baseline else rewards
        flat = list(chain.from_iterable(groups))
        if self.group_baseline:  # the mean is 0 up to rounding, and subtracting that would add a signal of noise
            scale = math.sqrt(math.fsum(a * a for a in flat) / max(1, len(flat))) + self.eps
            values = [a / scale if a else 0.0 for a in flat]
        else:
            values = standardized(flat, self.eps)
        rest = iter(values)
        return [[next(rest) for _ in group] for group in groups]


@dataclass(frozen=True)
class GDPO(AdvantageEstimator):
    """Normalises each part of a reward within its group, adds the parts, and normalises the sum over the step.

    A_ik = (r_ik - mean_k) / (std_k + eps) over the rollouts i of a group, A_i = sum_k w_k A_ik, and then (A_i - mean) /
    (std + eps) over all rollouts of the step. GDPO, arXiv:2601.05242, eq. 4 to 6. Added before normalisation, the parts
    (1, 0) and (0, 1) could not be distinguished.

    r_ik is the unweighted reward of a part of `CombinedReward`; its `weights`, `gates` and `combine` do not apply. A
    reward without parts is one part. If part k does not apply to rollout i, A_ik is 0, and mean_k and std_k omit r_ik.
    A group with equal rewards in every part gives exactly 0.

    Args:
        weights: weight of each part by name; 1 by default, 0 excludes a part.
        eps: added to the standard deviations.
        ddof: see `GroupMeanStd`; of both standard deviations.

    Raises:
        ValueError: a setting is out of range, or a weight is not finite.
    """

    weights: Mapping[str, float] = field(default_factory=dict)
    eps: float = 1e-6
    ddof: int = 0

    def __post_init__(self) -> None:
        check_range("GDPO", ">= 0", eps=self.eps)
        check_range("GDPO", "integer in [0, 1]", ddof=self.ddof)
        check_range("GDPO.weights", "finite", **self.weights)

    def per_token(self, groups: Sequence[RolloutGroup]) -> list[list[list[float]]]:
        """Advantage of each token, from the parts of the rewards.

        Raises:
            ValueError: `weights` names a part that no rollout of the step has.
        """
        parts = [[r.reward_parts or {"reward": r.reward} for r in group.rollouts] for group in groups]
        known = {name for group in parts for row in group for name in row}
        if groups and (unknown := sorted(set(self.weights) - known)):
            raise ValueError(
                f"GDPO.weights must contain only names of reward parts ({', '.join(sorted(known))}), got "
                f"{', '.join(unknown)}"
            )
        return _of_tokens(groups, self._over_step([self._of_group(group) for group in parts]))

    def estimate(self, rewards: Rewards, lengths: Lengths) -> list[list[float]]:
        """Rewards without parts, as one part."""
        return self._over_step([standardized(group, self.eps, self.ddof) for group in rewards])

    def _of_group(self, parts: Sequence[Mapping[str, float]]) -> list[float]:
        totals = [0.0] * len(parts)
        for name in dict.fromkeys(name for row in parts for name in row):
            rows = [n for n, row in enumerate(parts) if name in row]
            values = standardized([parts[n][name] for n in rows], self.eps, self.ddof)
            for n, value in zip(rows, values, strict=True):
                totals[n] += self.weights.get(name, 1.0) * value
        return totals

    def _over_step(self, advantages: list[list[float]]) -> list[list[float]]:
        flat = list(chain.from_iterable(advantages))
        rest = iter(standardized(flat, self.eps, self.ddof))
        # a rollout without signal keeps exactly 0: the mean differs from 0 only by rounding
        return [[value if a else 0.0 for a, value in ((a, next(rest)) for a in group)] for group in advantages]


@dataclass(frozen=True)
class LengthWeighted(AdvantageEstimator):
    """A = R - b, b = sum L_i R_i / sum L_i over the group. OPO, arXiv:2505.23585.

    Variance-optimal if the squared gradient norm of a rollout is proportional to its length. Not with `SequenceMean`,
    which divides the gradient by the length.
    """

    def estimate(self, rewards: Rewards, lengths: Lengths) -> list[list[float]]:
        """Rewards minus the length-weighted mean; 0 for groups without tokens."""
        result = []
        for group, tokens in zip(rewards, lengths, strict=True):
            total = sum(tokens)
            if total == 0 or max(group) == min(group):
                result.append([0.0] * len(group))
                continue
            baseline = math.fsum(n * reward for n, reward in zip(tokens, group, strict=True)) / total
            result.append([reward - baseline for reward in group])
        return result


@dataclass(frozen=True)
class AsymRE(AdvantageEstimator):
    """A = R - (mean of the group + shift), shift < 0: good rollouts weigh more than bad ones.

    Asymmetric REINFORCE combines this with `Reinforce` and no importance weights, for off-policy data. Equal rewards
    give -shift, not 0, so the policy imitates such groups. From Trinity-RFT's implementation; the paper's text could
    not be checked.

    Args:
        shift: shift of the baseline.
    """

    shift: float = -0.1

    def estimate(self, rewards: Rewards, lengths: Lengths) -> list[list[float]]:
        """Centered rewards minus the shift."""
        return [[a - self.shift for a in centered(group)] for group in rewards]


@dataclass(frozen=True)
class LogMeanExp(AdvantageEstimator):
    """A = R - tau log mean exp(R / tau) of the group: the soft value of OPMD as the baseline.

    Between R - mean (large tau) and R - max (small tau). As in Trinity-RFT.

    Args:
        tau: temperature of the soft value.

    Raises:
        ValueError: tau is not positive.
    """

    tau: float = 1.0

    def __post_init__(self) -> None:
        check_range("LogMeanExp", "> 0", tau=self.tau)

    def estimate(self, rewards: Rewards, lengths: Lengths) -> list[list[float]]:
        """Rewards minus the soft value of the group."""
        result = []
        for group in rewards:
            top = max(group, default=0.0)
            mean = math.fsum(math.exp((reward - top) / self.tau) for reward in group) / max(1, len(group))
            # for equal rewards the mean is exactly 1, its logarithm exactly 0, and so is the advantage
            result.append([reward - top - self.tau * math.log(mean) for reward in group])
        return result


def _of_tokens(groups: Sequence[RolloutGroup], values: Rewards) -> list[list[list[float]]]:
    """Values of rollouts for each of their tokens, those of branches included."""
    return [
        [[value] * rollout.num_tokens for rollout, value in zip(group.rollouts, row, strict=True)]
        for group, row in zip(groups, values, strict=True)
    ]


def centered(values: Sequence[float]) -> list[float]:
    """Values minus their mean; exactly 0 if all are equal.

    A division by a tiny standard deviation would amplify rounding errors of the mean.
    """
    if not values or max(values) == min(values):
        return [0.0] * len(values)
    mean = math.fsum(values) / len(values)
    return [value - mean for value in values]


def standardized(values: Sequence[float], eps: float, ddof: int = 0) -> list[float]:
    """Centered values divided by (standard deviation + eps)."""
    differences = centered(values)
    std = _std(differences, ddof)
    return [a / (std + eps) if a else 0.0 for a in differences]


def _std(differences: Sequence[float], ddof: int) -> float:
    return math.sqrt(math.fsum(a * a for a in differences) / max(1, len(differences) - ddof))


# -- Turn-level advantage estimators for multi-turn rollouts: each turn has its own advantage -------------------------
# Turns of all rows of a rollout are ordered by the agent's calls: s_k is the number of turn k's call among those whose
# replies train, which is its position where nothing branches. A rollout without `turns` is one turn. r_k is the reward
# of turn k, and its return is what was rewarded from its call on, in whichever branch:
#
#     G_k = sum over j with s_j >= s_k of gamma^(s_j - s_k) r_j


Turns = Sequence[Sequence[Turn]]  # of the rollouts of one group


def steps_of(turns: Sequence[Turn]) -> list[int]:
    """Number s_k of each turn's call among those of the turns; its position if the call is unknown."""
    calls = [n if turn.call is None else turn.call for n, turn in enumerate(turns)]
    numbers = {call: n for n, call in enumerate(sorted(set(calls)))}
    return [numbers[call] for call in calls]


def returns(turns: Sequence[Turn], gamma: float) -> list[float]:
    """Discounted return G_k of each turn."""
    steps = steps_of(turns)
    to_go = [0.0] * (max(steps, default=-1) + 1)
    for step, turn in zip(steps, turns, strict=True):
        to_go[step] += turn.reward
    for step in reversed(range(len(to_go) - 1)):
        to_go[step] += gamma * to_go[step + 1]
    return [to_go[step] for step in steps]


class TurnAdvantageEstimator(AdvantageEstimator):
    """Base class: maps the turns of a group to an advantage per turn."""

    @abstractmethod
    def of_group(self, turns: Turns) -> list[list[float]]:
        """Advantage of each turn of each rollout; `turns` has one list per rollout, row by row."""

    def estimate(self, rewards: Rewards, lengths: Lengths) -> list[list[float]]:
        """Advantages of single-turn rollouts."""
        groups = [[[Turn(end=0, reward=reward, state=0)] for reward in group] for group in rewards]
        return [[row[0] for row in self.of_group(group)] for group in groups]

    def per_token(self, groups: Sequence[RolloutGroup]) -> list[list[list[float]]]:
        """Advantage of each token: that of its turn, or for environment tokens (which do not train) of the next turn.

        Raises:
            ValueError: a rollout has branches, and the turns of one are unknown.
        """
        result = []
        for group in groups:
            rows = [self._turns(rollout) for rollout in group.rollouts]
            values = self.of_group([[turn for turns, _ in own for turn in turns] for own in rows])
            result.append([_spread(*one) for one in zip(rows, values, strict=True)])
        return result

    def _turns(self, rollout: Rollout) -> list[tuple[Sequence[Turn], int]]:
        """Turns and number of tokens of each row of a rollout; one turn of all rows if it has none."""
        if not rollout.turns:
            return [([Turn(end=rollout.num_tokens, reward=rollout.reward, state=0)], rollout.num_tokens)]
        if not all(row.turns for row in rollout.rows):
            raise ValueError(
                f"data.advantage={type(self).__name__} needs the turns of each branch of an agent's conversation, but "
                "one branch of a rollout has no turns. The rollout comes from an earlier version of lit-async-rl, or "
                "from an engine that reports no turns. Use an advantage for whole rollouts, such as GroupMeanStd"
            )
        return [(row.turns or (), len(row.token_ids)) for row in rollout.rows]


@dataclass(frozen=True)
class TurnReturns(TurnAdvantageEstimator):
    """A_k = G_k - mean of the group's G_k with the same s_k; optionally / (std + eps).

    Reward-to-go with a baseline per turn; `GroupMean` or `GroupMeanStd` for single-turn rollouts. With gamma 1 and a
    reward in the last turn only, the baseline is the mean over the rollouts still running. Not from a paper.

    Args:
        gamma: discount factor per turn.
        standardize: divide by the standard deviation.
        eps: added to the standard deviation.

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
        return _relative(to_go, [steps_of(own) for own in turns], self.standardize, eps=self.eps)


@dataclass(frozen=True)
class GiGPO(TurnAdvantageEstimator):
    """A_k = A_E + omega A_S: episode advantage within the group plus step advantage among turns in the same state.

    A_E = (R - mean R) / F over rollouts, R = sum_k r_k; A_S = (G_k - mean G) / F over all turns of the group with the
    initial state of turn k, 0 for a state visited once. F is 1, or the standard deviation + eps with `standardize`.
    arXiv:2505.10978, equations 3, 6 and 7, with the population's standard deviation. Also the advantage of SAMPO
    (ARLArena, arXiv:2602.21534).

    Args:
        omega: weight of A_S.
        gamma: discount factor per turn.
        standardize: divide by the standard deviation.
        eps: added to the standard deviation.

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
        steps = _relative(to_go, states, self.standardize, eps=self.eps)
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
        cell = [values[i][k] for i, k in members]
        relative = standardized(cell, eps) if standardize else centered(cell)
        for (i, k), value in zip(members, relative, strict=True):
            result[i][k] = value
    return result


def _spread(rows: Sequence[tuple[Sequence[Turn], int]], values: Sequence[float]) -> list[float]:
    """Values of turns for the tokens of each row of a rollout, one row after the other."""
    rest = iter(values)
    tokens: list[float] = []
    for turns, length in rows:
        row: list[float] = []
        for turn in turns:
            row += [next(rest)] * (turn.end - len(row))
        if len(row) != length:
            raise InvariantError("the last turn must end at the last token of the rollout")
        tokens += row
    return tokens


def _check(name: str, gamma: float, eps: float) -> None:
    check_range(name, "in [0, 1]", gamma=gamma)
    check_range(name, ">= 0", eps=eps)
