"""Post-scoring group filters: keep, modify, or drop.

`data.intake.filters` is a list applied to each group in order. A dropped group returns its slot at once, and the next
prompt is submitted in the same call, so the engine does not idle; the new group is admitted at that time, so the
staleness bound holds for it as for any other.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import ClassVar

from lit_async_rl.types import Rollout, RolloutGroup
from lit_async_rl.utils.checks import check_range

log = logging.getLogger(__name__)


class GroupFilter(ABC):
    """Filter of finished groups, called in the order in which they finish.

    Attributes:
        drops: whether it may drop groups, which depends on timing and is refused with `FixedLag`.
        fate: label of its dropped groups in monitors.
    """

    drops: ClassVar[bool] = False
    fate: ClassVar[str] = "dropped"

    @abstractmethod
    def __call__(self, group: RolloutGroup) -> RolloutGroup | None:
        """The group, possibly modified; None drops it."""


class DynamicSampling(GroupFilter):
    """Drops groups whose rewards are all equal, which have zero advantage. DAPO, arXiv:2503.14476, eq. 11.

    The paper samples until a batch is full of other groups; here each slot is refilled on its own. Place it before
    `OverlongPenalty`, so that it sees accuracy and not the shaped reward. The groups that remain are not a uniform
    sample of the prompts and finish later on average; `LengthBiasMonitor` reports what was dropped.

    Args:
        tolerance: rewards that differ by at most this are equal.
        max_in_a_row: maximum number of consecutive drops; further groups are kept until one has unequal rewards, so
            that a run whose task is solved (or hopeless) ends instead of sampling forever.

    Raises:
        ValueError: a setting is out of range.
    """

    drops: ClassVar[bool] = True
    fate: ClassVar[str] = "no_signal"

    def __init__(self, tolerance: float = 0.0, max_in_a_row: int = 1000) -> None:
        check_range("DynamicSampling", ">= 0", tolerance=tolerance)
        check_range("DynamicSampling", "integer >= 1", max_in_a_row=max_in_a_row)
        self.tolerance, self.max_in_a_row = tolerance, max_in_a_row
        self._in_a_row = 0
        self._has_warned = False

    def __call__(self, group: RolloutGroup) -> RolloutGroup | None:
        rewards = [rollout.reward for rollout in group.rollouts]
        if max(rewards) - min(rewards) > self.tolerance:
            self._in_a_row = 0
            return group
        if self._in_a_row < self.max_in_a_row:
            self._in_a_row += 1
            return None
        if not self._has_warned:
            self._has_warned = True
            log.warning("DynamicSampling: max_in_a_row=%d groups had no signal; the next are kept", self.max_in_a_row)
        return group


class OverlongPenalty(GroupFilter):
    """R <- R - factor min(1, max(0, L - (max_tokens - buffer_tokens)) / buffer_tokens). DAPO, arXiv:2503.14476, eq. 13.

    L is the number of tokens that the policy wrote, whether or not a filter masks them. The penalty of a multi-turn
    rollout is added to its last turn.

    Args:
        max_tokens: length of the full penalty, usually `data.sampling.max_tokens`.
        buffer_tokens: length over which the penalty rises from 0.
        factor: maximum penalty. DAPO: 16,384 + 4,096 tokens, factor 1.

    Raises:
        ValueError: a setting is out of range.
    """

    def __init__(self, max_tokens: int, buffer_tokens: int, factor: float = 1.0) -> None:
        check_range("OverlongPenalty", "integer", max_tokens=max_tokens)
        check_range("OverlongPenalty", f"integer in [1, {max_tokens}]", buffer_tokens=buffer_tokens)
        check_range("OverlongPenalty", ">= 0", factor=factor)
        self.max_tokens, self.buffer_tokens, self.factor = max_tokens, buffer_tokens, factor

    def __call__(self, group: RolloutGroup) -> RolloutGroup:
        return replace(group, rollouts=tuple(self._penalised(rollout) for rollout in group.rollouts))

    def _penalised(self, rollout: Rollout) -> Rollout:
        excess = rollout.num_policy_tokens - (self.max_tokens - self.buffer_tokens)
        return rollout.add_reward(-self.factor * min(1.0, max(0, excess) / self.buffer_tokens))


class OverlongFilter(GroupFilter):
    """Masks rollouts truncated at the token limit (finish reason `length`). DAPO, arXiv:2503.14476.

    They stay in the group's baseline, as in the paper's code. A fully masked group is kept: it takes its place in the
    step, with weight 0.
    """

    def __call__(self, group: RolloutGroup) -> RolloutGroup:
        return replace(group, rollouts=tuple(map(_masked_if_cut, group.rollouts)))


def _masked_if_cut(rollout: Rollout) -> Rollout:
    if rollout.finish_reason != "length":
        return rollout
    return replace(rollout, loss_mask=(False,) * len(rollout.completion_ids))
