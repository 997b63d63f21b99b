"""The reward from which a completion counts as right: in held-out accuracy and in the pass rates of a curriculum."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from lit_async_rl.rewards.combined import CombinedReward
from lit_async_rl.rewards.references import references_of
from lit_async_rl.types import Score

DEFAULT = 0.5  # tells 0 from 1, also where a reward has small terms besides them, and -1 from 1
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Success:
    """Tells right completions from wrong ones by their reward, or by one part of it.

    Attributes:
        threshold: least reward of a right completion.
        part: the part of a `CombinedReward` that decides; None is the reward itself.
    """

    threshold: float = DEFAULT
    part: str | None = None

    @classmethod
    def by(cls, setting: float | None, grader: Any) -> Success:
        """The setting; where it is None, full marks of a reward that declares itself a grader, else `DEFAULT`.

        Of several rewards, the part decides that `CombinedReward.success` names, or the only one that is a grader.
        """
        part: str | None = None
        if isinstance(grader, CombinedReward):
            part = grader.success or only_grader(grader)
            grader = grader.rewards.get(part) if part is not None else None
        references = references_of(grader)
        default = DEFAULT if references is None else references.full_marks
        return cls(default if setting is None else setting, part)

    def value(self, reward: float) -> float | None:
        """What is compared with the threshold; None if the part does not apply."""
        if self.part is None or not isinstance(reward, Score):
            return reward
        return reward.parts.get(self.part)

    def is_reached(self, reward: float) -> bool:
        """Whether the completion is right."""
        value = self.value(reward)
        return value is not None and value >= self.threshold

    def number(self, rewards: Iterable[float]) -> int:
        """Number of right completions."""
        return sum(self.is_reached(reward) for reward in rewards)


def only_grader(reward: CombinedReward) -> str | None:
    """Name of the only part that declares itself a grader; None if there are none or several."""
    graders = [name for name, part in reward.rewards.items() if references_of(part) is not None]
    return graders[0] if len(graders) == 1 else None


class SuccessWatch:
    """Says once, in one line, if rewards and the threshold do not fit.

    Either no reward reaches it, so that every rate is 0; or the threshold is a default, and rewards other than 0 and 1
    are told apart by it.

    Args:
        setting: name of the setting; `rates`: what it decides, for the line.
        is_default: whether the setting is None.
    """

    def __init__(self, setting: str, rates: str, is_default: bool) -> None:
        self._setting = setting
        self._rates = rates
        self._is_default = is_default
        self._lowest = float("inf")
        self._highest = float("-inf")
        self._is_binary = True
        self._has_spoken = False

    def add(self, rewards: Iterable[float | None]) -> None:
        """Adds rewards as they were given, before filters change them; None where what decides does not apply."""
        for reward in rewards:
            if reward is None:
                continue
            self._lowest = min(self._lowest, reward)
            self._highest = max(self._highest, reward)
            self._is_binary = self._is_binary and reward in (-1.0, 0.0, 1.0)

    def speak(self, threshold: float) -> None:
        """Logs the line, if there is one to log and it was not logged before."""
        if self._has_spoken or self._lowest == self._highest or self._highest == float("-inf"):
            return
        if self._highest >= threshold and (self._is_binary or not self._is_default):
            return
        self._has_spoken = True
        seen = f"rewards so far lie between {self._lowest:.4g} and {self._highest:.4g}"
        which = f"{self._setting}={threshold:g}" + (" (the default)" if self._is_default else "")
        if self._highest < threshold:
            log.warning(
                "no reward reaches %s, so %s are 0: %s. Set it to that of a right answer", which, self._rates, seen
            )
        else:
            log.warning(
                "%s count a reward of at least %s as right: %s. Set it if a right answer has another reward",
                self._rates,
                which,
                seen,
            )
