"""What becomes of a group when it has its rewards: kept, changed, or dropped for another prompt.

`data.intake.filters` is a list that each group goes through in order. A dropped group gives its slot back at once, and
the next prompt is submitted in the same moment, so that the engine does not wait; the new group counts as admitted now,
so the staleness bound holds for it as for any other.
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
    """Looks at one finished group at a time, in the order in which they finish.

    Attributes:
        drops: whether it may say None, which depends on timing, so that `schedule: fixed_lag` refuses it.
        fate: what monitors call the groups that it dropped.
    """

    drops: ClassVar[bool] = False
    fate: ClassVar[str] = "dropped"

    @abstractmethod
    def __call__(self, group: RolloutGroup) -> RolloutGroup | None:
        """The group, as it is or changed; None drops it."""


class DynamicSampling(GroupFilter):
    """Drops groups whose rewards are all equal: they have no advantage. DAPO, arXiv:2503.14476, equation 11.

    The paper samples until a batch is full of such groups; here every slot of the stream is refilled by itself. It
    judges by accuracy, not by the shaped reward: put it in front of `OverlongPenalty`. What it keeps is later in its
    turn than what it dropped, and not a sample of all prompts: `LengthBiasMonitor` says what was lost.

    Args:
        tolerance: rewards that differ by no more than this are equal.
        max_in_a_row: so many groups without signal are dropped one after the other; those behind them are kept until
            one has a signal, so that a run whose task is solved (or hopeless) ends, instead of sampling for ever.

    Raises:
        ValueError: a setting is out of range.
    """

    drops: ClassVar[bool] = True
    fate: ClassVar[str] = "no_signal"

    def __init__(self, tolerance: float = 0.0, max_in_a_row: int = 1000) -> None:
        check_range("DynamicSampling", ">= 0", tolerance=tolerance)
        check_range("DynamicSampling", ">= 1", max_in_a_row=max_in_a_row)
        self.tolerance, self.max_in_a_row = tolerance, max_in_a_row
        self._in_a_row = 0
        self._has_warned = False

    def __call__(self, group: RolloutGroup) -> RolloutGroup | None:
        """None where rewards are equal."""
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

    L counts trained tokens. A rollout of several turns is penalised in its last one.

    Args:
        max_tokens: length from which the whole penalty is due, usually `data.sampling.max_tokens`.
        buffer_tokens: tokens before that in which it rises from 0.
        factor: the largest penalty. DAPO: 16,384 + 4,096 tokens, factor 1.

    Raises:
        ValueError: a setting is out of range.
    """

    def __init__(self, max_tokens: int, buffer_tokens: int, factor: float = 1.0) -> None:
        check_range("OverlongPenalty", f"in [1, {max_tokens}]", buffer_tokens=buffer_tokens)
        check_range("OverlongPenalty", ">= 0", factor=factor)
        self.max_tokens, self.buffer_tokens, self.factor = max_tokens, buffer_tokens, factor

    def __call__(self, group: RolloutGroup) -> RolloutGroup:
        """The group with lower rewards."""
        return replace(group, rollouts=tuple(self._penalised(rollout) for rollout in group.rollouts))

    def _penalised(self, rollout: Rollout) -> Rollout:
        excess = rollout.num_trained_tokens - (self.max_tokens - self.buffer_tokens)
        return rollout.add_reward(-self.factor * min(1.0, max(0, excess) / self.buffer_tokens))


class OverlongFilter(GroupFilter):
    """Rollouts that were cut off at the limit (finish reason `length`) do not train. DAPO, arXiv:2503.14476.

    They stay in the group's baseline, as in the paper's own code. A group in which nothing is left is kept: it takes
    its place in the step, with weight 0.
    """

    def __call__(self, group: RolloutGroup) -> RolloutGroup:
        """The group with those rollouts masked."""
        return replace(group, rollouts=tuple(map(_masked_if_cut, group.rollouts)))


def _masked_if_cut(rollout: Rollout) -> Rollout:
    if rollout.finish_reason != "length":
        return rollout
    return replace(rollout, loss_mask=(False,) * len(rollout.completion_ids))
