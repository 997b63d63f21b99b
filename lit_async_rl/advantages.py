"""What a reward is worth relative to others. Outer lists are the groups of one optimizer step, inner ones rollouts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

Rewards = Sequence[Sequence[float]]


class AdvantageEstimator(ABC):
    """Rewards of one optimizer step to advantages. A group that says nothing (all equal, or one rollout) gives 0."""

    @abstractmethod
    def __call__(self, rewards: Rewards, lengths: Sequence[Sequence[int]]) -> list[list[float]]:
        """Advantage of each rollout; `lengths` are its trained tokens."""


class Raw(AdvantageEstimator):
    """A = R: no baseline."""

    def __call__(self, rewards: Rewards, lengths: Sequence[Sequence[int]]) -> list[list[float]]:
        """Rewards themselves."""
        return [list(group) for group in rewards]


class GroupMean(AdvantageEstimator):
    """A = R - mean of the group. Dr. GRPO, arXiv:2503.20783."""

    def __call__(self, rewards: Rewards, lengths: Sequence[Sequence[int]]) -> list[list[float]]:
        """Centered rewards."""
        return [_centered(group) for group in rewards]


@dataclass(frozen=True)
class GroupMeanStd(AdvantageEstimator):
    """A = (R - mean) / (std + eps) of the group. GRPO, arXiv:2402.03300, with the population standard deviation."""

    eps: float = 1e-6

    def __call__(self, rewards: Rewards, lengths: Sequence[Sequence[int]]) -> list[list[float]]:
        """Standardized rewards."""
        return [[a / (pstdev(group) + self.eps) for a in _centered(group)] for group in rewards]


class LeaveOneOut(AdvantageEstimator):
    """A_i = R_i - mean of the group's others = (R_i - mean) N / (N - 1). RLOO, arXiv:2402.14740."""

    def __call__(self, rewards: Rewards, lengths: Sequence[Sequence[int]]) -> list[list[float]]:
        """Rewards less the others' mean."""
        return [[a * len(group) / max(1, len(group) - 1) for a in _centered(group)] for group in rewards]


@dataclass(frozen=True)
class GlobalMeanStd(AdvantageEstimator):
    """A = (R - mean) / (std + eps) over the whole step. REINFORCE++, arXiv:2501.03262, without its token-level KL.

    With `group_baseline` the group's mean is taken off first, as in its variant REINFORCE++-baseline.
    """

    group_baseline: bool = False
    eps: float = 1e-6

    def __call__(self, rewards: Rewards, lengths: Sequence[Sequence[int]]) -> list[list[float]]:
        """Rewards standardized over the step."""
        groups = [_centered(group) for group in rewards] if self.group_baseline else rewards
        flat = [reward for group in groups for reward in group]
        mean, std = fmean(flat), pstdev(flat)
        return [[0.0 if std == 0 else (reward - mean) / (std + self.eps) for reward in group] for group in groups]


class LengthWeighted(AdvantageEstimator):
    """A = R - b, b = sum L_i R_i / sum L_i over the group. OPO, arXiv:2505.23585.

    The variance-optimal baseline if the squared gradient norm of a rollout grows with its length.
    """

    def __call__(self, rewards: Rewards, lengths: Sequence[Sequence[int]]) -> list[list[float]]:
        """Rewards less the length-weighted mean."""
        result = []
        for group, tokens in zip(rewards, lengths, strict=True):
            total = sum(tokens)
            if total == 0 or max(group) == min(group):
                result.append([0.0] * len(group))
                continue
            baseline = sum(n * reward for n, reward in zip(tokens, group, strict=True)) / total
            result.append([reward - baseline for reward in group])
        return result


def _centered(group: Sequence[float]) -> list[float]:
    """Exactly 0 for equal rewards: the rounding error of a mean must not become a signal when divided by a tiny std."""
    if max(group) == min(group):
        return [0.0] * len(group)
    mean = fmean(group)
    return [reward - mean for reward in group]
