"""Data policies of a run: selection of prompts, group filters, and totals by fate."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from lit_async_rl.prompts.curriculum import Curriculum, PassRates
from lit_async_rl.prompts.stream import PromptStream
from lit_async_rl.rewards.success import Success, SuccessWatch
from lit_async_rl.types import Rollout, RolloutGroup
from lit_async_rl.utils.checks import check_range

# -- Post-scoring group filters: keep, modify, or drop ----------------------------------------------------------------
# `data.filters` is a list applied to each group in order. A dropped group returns its slot at once, and the next
# prompt is submitted in the same call, so the engine does not idle; the new group is admitted at that time, so the
# staleness bound holds for it as for any other.


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
    `OverlongPenalty`, so that it sees accuracy and not the shaped reward. The remaining groups are no uniform sample of
    the prompts and finish later on average, see `LengthBiasMonitor`.

    Args:
        tolerance: rewards that differ by at most this are equal.
        max_in_a_row: maximum number of consecutive drops; then groups are kept until one has unequal rewards, so that a
            run whose task is solved or hopeless ends.

    Raises:
        ValueError: a setting is out of range.
    """

    drops: ClassVar[bool] = True
    fate: ClassVar[str] = "no_signal"

    def __init__(self, tolerance: float = 0.0, max_in_a_row: int = 1000) -> None:
        check_range("DynamicSampling", ">= 0", tolerance=tolerance)
        check_range("DynamicSampling", "integer >= 1", max_in_a_row=max_in_a_row)
        self.tolerance = tolerance
        self.max_in_a_row = max_in_a_row
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
            log.warning(
                "DynamicSampling: %d groups in a row (max_in_a_row) were dropped for equal rewards; from now on, "
                "groups with equal rewards are kept, until a group's rewards differ",
                self.max_in_a_row,
            )
        return group


class OverlongPenalty(GroupFilter):
    """R <- R - factor min(1, max(0, L - (max_tokens - buffer_tokens)) / buffer_tokens). DAPO, arXiv:2503.14476, eq. 13.

    L counts the tokens that the policy wrote, masked or not. A multi-turn rollout has its penalty in the last turn.

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
        self.max_tokens = max_tokens
        self.buffer_tokens = buffer_tokens
        self.factor = factor

    def __call__(self, group: RolloutGroup) -> RolloutGroup:
        return replace(group, rollouts=tuple(self._penalised(rollout) for rollout in group.rollouts))

    def _penalised(self, rollout: Rollout) -> Rollout:
        excess = rollout.num_policy_tokens - (self.max_tokens - self.buffer_tokens)
        penalty = self.factor * min(1.0, max(0, excess) / self.buffer_tokens)
        return rollout.add_reward(-penalty, part="overlong")


class OverlongFilter(GroupFilter):
    """Masks rollouts truncated at the token limit (finish reason `length`). DAPO, arXiv:2503.14476.

    They stay in the group's baseline, as in the paper's code. A fully masked group stays in the step, with weight 0.
    """

    def __call__(self, group: RolloutGroup) -> RolloutGroup:
        return replace(group, rollouts=tuple(map(_masked_if_cut, group.rollouts)))


def _masked_if_cut(rollout: Rollout) -> Rollout:
    if rollout.finish_reason != "length":
        return rollout
    branches = tuple(replace(row, loss_mask=(False,) * len(row.token_ids)) for row in rollout.branches)
    return replace(rollout, loss_mask=(False,) * len(rollout.token_ids), branches=branches)


WATCHED_GROUPS = 64  # after so many a curriculum checks that its threshold of success fits the rewards
FAILED = "failed rewards"  # causes of dropped tokens that are no filter and no admission policy
RESTARTED = "engine restarts"
ROLLED_BACK = "rollbacks"
TRAINED = "trained"
EXPIRED = "expired"
UNBEGUN = "unbegun"  # too old before it had a token
DISCARDED = "discarded"  # sampled by a version that a rollback has discarded


@dataclass(frozen=True, kw_only=True)
class FateTotals:
    """Totals over the groups with one fate (`trained`, `expired`, `unbegun`, `discarded`, or the label of a filter).

    Attributes:
        num_groups: their number.
        length: sum over groups of the mean tokens per rollout; for aborted groups, of the tokens so far.
        seconds: sum of seconds from admission to the last token, or the group's end.
        num_measured: groups with a measured pass rate of the prompt; `pass_rate`: sum of these rates.
    """

    num_groups: int = 0
    length: float = 0.0
    seconds: float = 0.0
    num_measured: int = 0
    pass_rate: float = 0.0

    def __sub__(self, other: FateTotals) -> FateTotals:
        changes = {name: value - vars(other)[name] for name, value in vars(self).items()}
        return FateTotals(**changes)


class Intake:
    """Selects prompts and finished groups, and counts what became of each group.

    All methods are called with the producer's lock held.

    Args:
        filters: applied in turn to a group that has its rewards; each may change or drop it.
        curriculum: which prompts are skipped; None skips none.
        success_reward: `data.scoring.success_reward`.

    Attributes:
        dropped_tokens: sampled tokens not trained on, by what dropped or masked them: the class of a filter or the
            admission policy, `FAILED`, `RESTARTED`, or `ROLLED_BACK`. `trained_tokens`: those trained on.
        num_sampled: groups that got their rewards, of which filters dropped `num_dropped`.
        sampled_reward: sum over all of them of a group's mean reward, before filters changed it.
        arrived: these means by version of admission, until `take_rewards`; None unless a callback asked for them.
    """

    def __init__(
        self,
        filters: list[GroupFilter] | None = None,
        curriculum: Curriculum | None = None,
        success_reward: float | None = None,
    ) -> None:
        self.filters = tuple(filters or ())
        self.curriculum = curriculum
        self.success_reward = success_reward
        self.success = Success.by(success_reward, None)
        self.reset()

    def use_grader(self, grader: Any) -> None:
        """Chooses the default of `success_reward` for the run's reward."""
        self.success = Success.by(self.success_reward, grader)

    def reset(self) -> None:
        """Clears all measurements."""
        self.pass_rates = PassRates()
        self._fates: dict[str, FateTotals] = {}
        self._num_lost: Counter[int] = Counter()  # position -> how often it was lost in a row
        self.num_sampled = 0
        self.num_dropped = 0
        self.sampled_reward = 0.0
        self.arrived: dict[int, list[float]] | None = None
        self.dropped_tokens: Counter[str] = Counter()
        self.trained_tokens = 0
        self._watch = SuccessWatch("data.scoring.success_reward", "pass rates of prompts", self.success_reward is None)
        self._successes: dict[int, float] = {}  # group -> its pass rate, until it was trained on

    def next_position(self, stream: PromptStream) -> int:
        """Position of the next prompt to sample."""
        return stream.advance() if self.curriculum is None else self.curriculum.advance(stream, self.pass_rates)

    def filter_group(self, group: RolloutGroup, number: int) -> RolloutGroup | None:
        """Filters a scored group of prompt `number`; None if it is dropped."""
        pass_rate = self._pass_rate(group)
        self.num_sampled += 1
        if self.curriculum is not None and self.num_sampled <= WATCHED_GROUPS:
            self._watch.add(self.success.value(rollout.score) for rollout in group.rollouts)
            if self.num_sampled == WATCHED_GROUPS:
                self._watch.warn_once(self.success.threshold)
        reward = sum(rollout.reward for rollout in group.rollouts) / len(group.rollouts)
        self.sampled_reward += reward
        if self.arrived is not None:
            self.arrived.setdefault(group.admitted_version, []).append(reward)
        kept: RolloutGroup | None = group
        for group_filter in self.filters:
            kept = group_filter(group)
            num_left = 0 if kept is None else _num_trained(kept)
            self.drop_tokens(type(group_filter).__name__, _num_trained(group) - num_left)
            if kept is None:
                self.num_dropped += 1
                self._count(group_filter.fate, number, _length(group), seconds=group.generation_s)
                self.pass_rates.measure(number, pass_rate)
                return None
            group = kept
        self._successes[group.index] = pass_rate
        return kept

    def trained(self, group: RolloutGroup, number: int, position: int) -> None:
        """Counts a group as trained on."""
        self.trained_tokens += _num_trained(group)
        self._count(TRAINED, number, _length(group), seconds=group.generation_s)
        known = self._successes.pop(group.index, None)  # not there after a resume from an older checkpoint
        self.pass_rates.measure(number, self._pass_rate(group) if known is None else known)
        self._num_lost.pop(position, None)

    def lose(self, index: int, number: int, position: int, length: float, seconds: float, max_tries: int = 1) -> bool:
        """Counts a group that exceeded the bound; returns whether to sample its prompt again."""
        self._successes.pop(index, None)
        self._count(EXPIRED if length else UNBEGUN, number, length, seconds=seconds)
        self._num_lost[position] += 1
        again = self._num_lost[position] < max_tries
        if not again:
            del self._num_lost[position]
        return again

    def discard(self, index: int, number: int, length: float, seconds: float) -> None:
        """Counts a group of a discarded version; its prompt is sampled again."""
        self._successes.pop(index, None)
        self._count(DISCARDED, number, length, seconds=seconds)

    def forget_rewards(self, last_valid: int) -> None:
        """Forgets the rewards of later versions."""
        if self.arrived is not None:
            self.arrived = {version: rewards for version, rewards in self.arrived.items() if version <= last_valid}

    def take_rewards(self, before: int) -> list[float]:
        """Mean reward of each version older than `before`, oldest first; forgets them."""
        arrived = self.arrived or {}
        versions = sorted(version for version in arrived if version < before)
        rewards = [arrived.pop(version) for version in versions]
        return [math.fsum(values) / len(values) for values in rewards]  # exact: groups arrive in any order

    def drop_tokens(self, cause: str, number: int) -> None:
        """Counts sampled tokens that are not trained on."""
        if number > 0:
            self.dropped_tokens[cause] += number

    @property
    def successes(self) -> dict[int, float]:
        """Pass rates, before filters, of groups not trained on yet."""
        return dict(self._successes)

    def restore(self, pass_rates: Mapping[str, Any], successes: Mapping[int, float]) -> None:
        """Restores the pass rates of a checkpoint: those of prompts, and `successes`."""
        self.pass_rates.load_state_dict(pass_rates)
        self._successes = dict(successes)

    @property
    def fates(self) -> Mapping[str, FateTotals]:
        """Totals so far, by fate."""
        return dict(self._fates)

    def _pass_rate(self, group: RolloutGroup) -> float:
        return self.success.number(rollout.score for rollout in group.rollouts) / len(group.rollouts)

    def _count(self, fate: str, number: int, length: float, seconds: float) -> None:
        before = self._fates.get(fate, FateTotals())
        rate = self.pass_rates.of(number)
        self._fates[fate] = replace(
            before,
            num_groups=before.num_groups + 1,
            length=before.length + length,
            seconds=before.seconds + seconds,
            num_measured=before.num_measured + (rate is not None),
            pass_rate=before.pass_rate + (rate or 0.0),
        )


def _num_trained(group: RolloutGroup) -> int:
    return sum(rollout.num_trained_tokens for rollout in group.rollouts)


def _length(group: RolloutGroup) -> float:
    return group.num_tokens / len(group.rollouts)
