"""Data policies of a run: order and selection of prompts, group filters, and totals by fate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lit_async_rl.prompts.curriculum import Curriculum, PassRates
from lit_async_rl.prompts.stream import PromptStream
from lit_async_rl.rewards.success import SuccessWatch, success_threshold
from lit_async_rl.rollouts.filters import GroupFilter
from lit_async_rl.types import RolloutGroup
from lit_async_rl.utils.checks import check_range

WATCHED_GROUPS = 64  # then a curriculum says whether its pass rates can be right
TRAINED, EXPIRED = "trained", "expired"
UNBEGUN = "unbegun"  # too old before it had a token


@dataclass(frozen=True, kw_only=True)
class FateTotals:
    """Totals over the groups with one fate (`trained`, `expired`, `unbegun`, or the label of a filter).

    Attributes:
        num_groups: number of groups.
        length: sum over groups of the mean tokens per rollout; for aborted groups, of the tokens so far.
        seconds: sum of the seconds from admission to the last token, or to the end of the group.
        num_measured: groups whose prompt had a measured pass rate; `pass_rate`: sum of these rates.
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
    """Selection of prompts and groups of a run, and their delivery to steps.

    All methods are called with the producer's lock held.

    Args:
        filters: applied in turn to a group that has its rewards; each may change or drop it.
        curriculum: which prompts are skipped; None skips none.
        seed: order of the prompts.
        success_reward: a rollout with at least this reward is a success, before filters change rewards; None is full
            marks of a reward that declares itself a grader, and 0.5 for any other.
        stream_groups: train on a micro-batch as soon as its groups have finished, not when the whole step has.
        replicate_prompts: request each completion by itself, so that those of a prompt need not be sampled in one
            place or at one time (ROLL Flash, arXiv:2510.11345).

    Attributes:
        num_sampled: groups that got their rewards, of which filters dropped `num_dropped`.
        sampled_reward: sum over all of them of a group's mean reward, before filters changed it.
    """

    def __init__(
        self,
        filters: list[GroupFilter] | None = None,
        curriculum: Curriculum | None = None,
        seed: int = 0,
        success_reward: float | None = None,
        stream_groups: bool = False,
        replicate_prompts: bool = False,
    ) -> None:
        check_range("data.intake", "integer", seed=seed)
        self.filters, self.curriculum, self.seed = tuple(filters or ()), curriculum, seed
        self.stream_groups, self.replicate_prompts = stream_groups, replicate_prompts
        check_range("data.intake", "finite", success_reward=success_reward)
        self.success_reward = success_reward
        self.threshold = success_threshold(success_reward, None)
        self.reset()

    def use_grader(self, grader: Any) -> None:
        """Chooses the default of `success_reward` for the run's reward."""
        self.threshold = success_threshold(self.success_reward, grader)

    def reset(self) -> None:
        """Clears all measurements."""
        self.pass_rates = PassRates()
        self._fates: dict[str, FateTotals] = {}
        self._num_lost: Counter[int] = Counter()  # position -> how often it was lost in a row
        self.num_sampled, self.num_dropped, self.sampled_reward = 0, 0, 0.0
        self._watch = SuccessWatch("data.intake.success_reward", "pass rates of prompts", self.success_reward is None)
        self._successes: dict[int, float] = {}  # group -> its pass rate, until it was trained on

    def next_position(self, stream: PromptStream) -> int:
        """Position of the next prompt to sample."""
        return stream.advance() if self.curriculum is None else self.curriculum.advance(stream, self.pass_rates)

    def judge(self, group: RolloutGroup, number: int) -> RolloutGroup | None:
        """Filters a scored group of prompt `number`; None if it is dropped."""
        pass_rate = self._pass_rate(group)
        self.num_sampled += 1
        if self.curriculum is not None and self.num_sampled <= WATCHED_GROUPS:
            self._watch.add(rollout.reward for rollout in group.rollouts)
            if self.num_sampled == WATCHED_GROUPS:
                self._watch.speak(self.threshold)
        self.sampled_reward += sum(rollout.reward for rollout in group.rollouts) / len(group.rollouts)
        kept: RolloutGroup | None = group
        for one in self.filters:
            kept = one(group)
            if kept is None:
                self.num_dropped += 1
                self._count(one.fate, number, _length(group), group.generation_s)
                self.pass_rates.measure(number, pass_rate)
                return None
            group = kept
        self._successes[group.index] = pass_rate
        return kept

    def trained(self, group: RolloutGroup, number: int, position: int) -> None:
        """Counts a group as trained on."""
        self._count(TRAINED, number, _length(group), group.generation_s)
        known = self._successes.pop(group.index, None)  # not there after a resume from an older checkpoint
        self.pass_rates.measure(number, self._pass_rate(group) if known is None else known)
        self._num_lost.pop(position, None)

    def lose(self, index: int, number: int, position: int, length: float, seconds: float, max_tries: int = 1) -> bool:
        """Counts a group that exceeded the bound; returns whether its prompt is to be sampled again."""
        self._successes.pop(index, None)
        self._count(EXPIRED if length else UNBEGUN, number, length, seconds)
        self._num_lost[position] += 1
        again = self._num_lost[position] < max_tries
        if not again:
            del self._num_lost[position]
        return again

    @property
    def successes(self) -> dict[int, float]:
        """Pass rates of groups that were not trained on yet, before filters changed their rewards."""
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
        return sum(rollout.reward >= self.threshold for rollout in group.rollouts) / len(group.rollouts)

    def _count(self, fate: str, number: int, length: float, seconds: float) -> None:
        before, rate = self._fates.get(fate, FateTotals()), self.pass_rates.of(number)
        self._fates[fate] = replace(
            before,
            num_groups=before.num_groups + 1,
            length=before.length + length,
            seconds=before.seconds + seconds,
            num_measured=before.num_measured + (rate is not None),
            pass_rate=before.pass_rate + (rate or 0.0),
        )


def _length(group: RolloutGroup) -> float:
    return group.num_tokens / len(group.rollouts)
