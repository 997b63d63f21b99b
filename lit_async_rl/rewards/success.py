"""Reward threshold of correct completions, for held-out accuracy and the pass rates of a curriculum."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from lit_async_rl.problem import Score
from lit_async_rl.rewards.combined import CombinedReward
from lit_async_rl.rewards.references import references_of
from lit_async_rl.types import SamplingParams

DEFAULT_THRESHOLD = 0.5  # separates 0 from 1 and -1 from 1, also with small terms added
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Success:
    """Classifies completions as correct or wrong by their reward, or by one part of it.

    Attributes:
        threshold: minimum reward of a correct completion.
        part: of a `CombinedReward`, compared with the threshold; None is the reward itself.
    """

    threshold: float = DEFAULT_THRESHOLD
    part: str | None = None

    @classmethod
    def by(cls, setting: float | None, grader: Any) -> Success:
        """A threshold from the setting and the reward.

        Args:
            setting: threshold; None is full marks of a grader, else `DEFAULT_THRESHOLD`.
            grader: reward function. Of a `CombinedReward`, the part `success` is compared, or its only grader.
        """
        part: str | None = None
        if isinstance(grader, CombinedReward):
            part = grader.success or only_grader(grader)
            grader = grader.rewards.get(part) if part is not None else None
        references = references_of(grader)
        default = DEFAULT_THRESHOLD if references is None else references.full_marks
        return cls(default if setting is None else setting, part)

    def value(self, reward: float) -> float | None:
        """The value to compare with the threshold; None if the part does not apply."""
        if self.part is None or not isinstance(reward, Score):
            return reward
        return reward.parts.get(self.part)

    def is_reached(self, reward: float) -> bool:
        """Whether the completion is correct."""
        value = self.value(reward)
        return value is not None and value >= self.threshold

    def number(self, rewards: Iterable[float]) -> int:
        """Number of correct completions."""
        return sum(self.is_reached(reward) for reward in rewards)


def only_grader(reward: CombinedReward) -> str | None:
    """Name of the only part that declares itself a grader; None if no part does, or several do."""
    graders = [name for name, part in reward.rewards.items() if references_of(part) is not None]
    return graders[0] if len(graders) == 1 else None


class SuccessWatch:
    """Warns once if no reward reaches the threshold, or if it is the default although rewards are not all -1, 0 or 1.

    Args:
        setting: of the threshold, for the message.
        rates: metrics that depend on it, for the message.
        is_default: whether the setting is None.
    """

    def __init__(self, setting: str, rates: str, is_default: bool) -> None:
        self._setting = setting
        self._rates = rates
        self._is_default = is_default
        self._lowest = float("inf")
        self._highest = float("-inf")
        self._is_binary = True
        self._has_warned = False

    def add(self, rewards: Iterable[float | None]) -> None:
        """Adds unfiltered rewards; None where the compared part does not apply."""
        known = [reward for reward in rewards if reward is not None]
        self._lowest = min([self._lowest, *known])
        self._highest = max([self._highest, *known])
        self._is_binary = self._is_binary and all(reward in (-1.0, 0.0, 1.0) for reward in known)

    def warn_once(self, threshold: float) -> None:
        """Logs the warning if it is due and was not logged before."""
        if self._has_warned or self._lowest == self._highest or self._highest == float("-inf"):
            return
        if self._highest >= threshold and (self._is_binary or not self._is_default):
            return
        self._has_warned = True
        seen = f"rewards so far lie between {self._lowest:.4g} and {self._highest:.4g}"
        limit = f"{self._setting}={threshold:g}" + (" (the default)" if self._is_default else "")
        if self._highest < threshold:
            log.warning(
                "no reward reaches the threshold %s, so %s are 0: %s. Set this threshold to the reward of a correct "
                "answer",
                limit,
                self._rates,
                seen,
            )
        else:
            log.warning(
                "%s count an answer as correct if its reward is at least %s: %s. Change this threshold if correct "
                "answers get a different reward",
                self._rates,
                limit,
                seen,
            )


class CutWatch:
    """Warns once if most completions are cut at their limit; names its setting, and the metric of cut completions."""

    def __init__(self, setting: str, metric: str) -> None:
        self._setting = setting
        self._metric = metric
        self._has_warned = False

    def warn_once(self, share: float, max_tokens: int) -> None:
        """Logs the warning if more than half are cut, and it was not logged before."""
        if share <= 0.5 or self._has_warned:
            return
        self._has_warned = True
        is_default = max_tokens == SamplingParams.max_tokens
        log.warning(
            "%.0f %% of the completions were cut off at the limit %s=%d%s (see %s), so their rewards are "
            "computed on incomplete answers",
            100 * share,
            self._setting,
            max_tokens,
            " (the default)" if is_default else "",
            self._metric,
        )
