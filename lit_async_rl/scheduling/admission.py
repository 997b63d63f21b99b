"""Admission control: the staleness bound by counting slots.

A *round* is the time between two weight publications; P groups are trained on in each. Before sampling, group i (from
0) takes one of (S + 1) P slots, and P slots return at the end of each round. So in round v the admitted groups are
those with i < (S + 1 + v) P. In FIFO order group i trains in round floor(i / P) <= v + S, so none of its tokens,
sampled by version v or newer, is older than S versions. No group is discarded.

In FIFO order one slow group would block all behind it. `Bounded` therefore takes any finished group as long as every
admitted one can still meet its deadline v + S (earliest deadline first is feasible whenever FIFO is). `FixedLag` keeps
the order, which makes runs reproducible.

With R redundant groups (ROLL Flash, arXiv:2510.11345) there are R more slots, and at most R groups of a round may miss
their deadline and are dropped, so the R slowest delay nothing.

The cost per group is logarithmic in the number of groups.
"""

from __future__ import annotations

import heapq
import math
import os
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from lit_async_rl.errors import InvariantError, StalenessError
from lit_async_rl.types import RolloutGroup
from lit_async_rl.utils.checks import check_range


def check_bound(groups: Iterable[RolloutGroup], version: int) -> None:
    """Checks every token of groups with a bound before collation; `StepGuard` checks again after.

    Raises:
        StalenessError: a token is older than the `max_staleness` of its group.
    """
    for group in groups:
        oldest = min((v for rollout in group.rollouts for v in rollout.all_versions), default=version)
        if group.max_staleness is not None and version - oldest > group.max_staleness:
            raise StalenessError(
                f"group {group.index} has a token that policy version {oldest} sampled, but policy version {version} "
                f"would be trained on it: the token's staleness exceeds max_staleness={group.max_staleness}"
            )


class Admission:
    """Counts slots. Without locks, threads and clocks: `Producer.changed` guards it.

    Args:
        groups_per_round: P, groups trained on between two publications.
        max_staleness: S, in versions; 0 is synchronous.
        in_order: take groups strictly in the order of admission (`FixedLag`), not any that is safe.
        async_ratio: alpha of ROLL Flash (arXiv:2510.11345): at most (1 + alpha) P groups are sampled or queued at a
            time, 0 <= alpha <= S. A token is then at most ceil(alpha) versions old. None is S.
        redundant_groups: R.

    Attributes:
        may_be_late: whether admitted groups may miss their deadline, and are dropped then (`Drop`, `Retry`, `Ring`).
        drops_as: why groups are dropped, in reports.
    """

    may_be_late: ClassVar[bool] = False
    drops_as: ClassVar[str] = "redundant_groups"

    def __init__(
        self,
        groups_per_round: int,
        max_staleness: int,
        in_order: bool = False,
        async_ratio: float | None = None,
        redundant_groups: int = 0,
    ) -> None:
        check_range("Admission", "integer >= 0", max_staleness=max_staleness, redundant_groups=redundant_groups)
        check_range("Admission", "integer >= 1", groups_per_round=groups_per_round)
        check_range("Admission", f"in [0, {max_staleness}]", async_ratio=async_ratio)
        if async_ratio is not None and in_order:
            raise ValueError(
                f"Admission.async_ratio={async_ratio} has no effect with in_order=True, because in_order already sets "
                "how far sampling runs ahead of training"
            )
        if redundant_groups and in_order:
            raise ValueError(
                f"Admission.redundant_groups={redundant_groups} has no effect with in_order=True, which drops no group"
            )
        self.async_ratio = async_ratio
        self.redundant_groups = redundant_groups
        self.groups_per_round = groups_per_round
        self.max_staleness = max_staleness
        self.bounds: dict[int, int] = {}  # of the groups under way: each keeps the one it was admitted under
        self.in_order = in_order
        self.round = 0
        self.num_taken = 0  # in this round; likewise `num_lost`
        self.num_lost = 0
        self.max_tries = 1  # how often a prompt is sampled before its group is trained on
        self.next_index = 0
        self._deadlines: dict[int, int] = {}  # group index -> last round it may train in, for groups not yet taken
        self._due: Counter[int] = Counter()  # deadline -> groups not yet taken
        self._order: deque[int] = deque()  # of admission; taken groups leave it when they come to the front
        self._finished: list[int] = []  # heap, the same way

    @property
    def num_admissible(self) -> int:
        """Number of groups whose sampling may start now."""
        ahead = self.groups_per_round * self._reach
        slots = self.groups_per_round + math.floor(ahead + 1e-9)  # 0.29 * 100 is 28.999...
        return max(0, slots + self.redundant_groups - self.num_taken - self.num_lost - len(self._deadlines))

    @property
    def _reach(self) -> int | float:
        """Versions by which sampling may run ahead: min(S, alpha)."""
        return self.max_staleness if self.async_ratio is None else min(self.async_ratio, self.max_staleness)

    @property
    def num_left_in_round(self) -> int:
        """Groups to take before the next publication."""
        return self.groups_per_round - self.num_taken

    def admit(self) -> int:
        """Takes a slot and returns the new group's index."""
        if self.num_admissible <= 0:
            raise InvariantError(
                f"a group was admitted for sampling in weight-sync round {self.round}, although the limit on admitted "
                "groups had been reached"
            )
        index = self.next_index
        self.next_index += 1
        bound = math.ceil(self._reach)
        self._hold(index, self.round + bound, bound)
        return index

    def _hold(self, index: int, deadline: int, bound: int) -> None:
        self.bounds[index] = bound
        self._deadlines[index] = deadline
        self._due[deadline] += 1
        if self.in_order:
            self._order.append(index)

    def finish(self, index: int) -> None:
        """Marks an admitted group as ready to train."""
        heapq.heappush(self._finished, index)

    @property
    def deadlines(self) -> dict[int, int]:
        """Last round in which each admitted group may be taken."""
        return dict(self._deadlines)

    def choose(self) -> int | None:
        """The finished group to train on next; None if only unfinished ones may be taken."""
        while self._finished and self._finished[0] not in self._deadlines:
            heapq.heappop(self._finished)
        if self.num_left_in_round <= 0 or not self._finished:
            return None
        oldest = self._finished[0]
        if self.in_order:
            while self._order[0] not in self._deadlines:
                self._order.popleft()
            return oldest if oldest == self._order[0] else None
        return oldest if self._is_safe(oldest) else None

    def _is_safe(self, index: int) -> bool:
        """Whether all others, except R that may be lost, can still meet their deadlines if `index` is taken now.

        Until each round, no more groups may be due than rounds have places. Only rounds before its own deadline can
        lack one: from then on it needed a place anyway.
        """
        own = self._deadlines[index]
        room = self.num_left_in_round - 1 + self.redundant_groups
        due = 0
        for deadline in range(self.round, own):
            due += self._due[deadline]
            if due > room:
                return False
            room += self.groups_per_round
        return True

    def take(self, index: int) -> int:
        """Takes a chosen group in this round; returns its deadline."""
        deadline = self.drop(index)
        if deadline < self.round:
            raise StalenessError(
                f"group {index} is too old: its last round for training was weight-sync round {deadline}, but the "
                f"current round is {self.round}"
            )
        self.num_taken += 1
        return deadline

    def drop(self, index: int) -> int:
        """Drops an admitted group, which frees its slot at once; returns its deadline."""
        deadline = self._deadlines.pop(index)
        self._due[deadline] -= 1
        if not self._due[deadline]:
            del self._due[deadline]
        return deadline

    def lose(self) -> list[int]:
        """Drops and returns the groups, at most R, that miss their deadline; the round frees their slots."""
        if self.num_left_in_round > 0 or not self._due[self.round]:
            return []  # until the round is full, any of them may still be taken
        lost = [index for index, deadline in self._deadlines.items() if deadline <= self.round]
        for index in lost:
            self.drop(index)
        self.num_lost += len(lost)
        if self.num_lost > self.redundant_groups:
            raise InvariantError(
                f"in weight-sync round {self.round}, {self.num_lost} groups were too late to be trained on, but "
                f"Admission.redundant_groups allows only {self.redundant_groups}"
            )
        return lost

    def advance(self) -> None:
        """Ends the round: the weights trained on its groups are published (or the update was skipped)."""
        if self.num_left_in_round:
            raise InvariantError(
                f"weight-sync round {self.round} ended, although {self.num_left_in_round} more groups should "
                "have been taken for training in this round"
            )
        self.bounds = {index: self.bounds[index] for index in self._deadlines}
        self.round += 1
        self.num_taken = 0
        self.num_lost = 0

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self, num_given_back: int = 0) -> dict[str, Any]:
        """State as plain containers; `num_given_back` groups of this round were not trained on."""
        return {
            "round": self.round,
            "num_taken": self.num_taken - num_given_back,
            "num_lost": self.num_lost,
            "next_index": self.next_index,
            "groups_per_round": self.groups_per_round,
            "max_staleness": self.max_staleness,
            "bounds": dict(self.bounds),
        }

    def check_round(self, state: Mapping[str, Any]) -> None:
        """Refuses a `state_dict` from the middle of a round of another length.

        Raises:
            ValueError: the number of groups per round was changed in the middle of a round.
        """
        if state["num_taken"] and state["groups_per_round"] != self.groups_per_round:
            raise ValueError(
                f"data.groups_per_step * data.weight_sync_steps is {self.groups_per_round}, but must be "
                f"{state['groups_per_round']} to resume this checkpoint, because the checkpoint was saved between two "
                "weight updates"
            )

    def restore(self, state: Mapping[str, Any], deadlines: Mapping[int, int]) -> set[int]:
        """Restores a `state_dict` with these groups admitted (index: deadline), as far as the bound allows.

        Unchanged settings allow all of them, also those due to be dropped. The deadline of a group with a bound above
        `max_staleness` moves forward; with fewer groups per round the last ones would miss theirs.

        Returns:
            The groups admitted; the others must be sampled again.

        Raises:
            ValueError: see `check_round`.
        """
        self.check_round(state)
        self.round = state["round"]
        self.next_index = state["next_index"]
        self.num_taken = state["num_taken"]
        self.num_lost = state["num_lost"]
        largest = state.get("largest_bound", state["max_staleness"])  # older checkpoints have one for all
        bounds = {index: state.get("bounds", {}).get(index, largest) for index in deadlines}
        sooner = {index: max(0, bound - self.max_staleness) for index, bound in bounds.items()}
        kept: dict[int, int] = {}
        for deadline, index in sorted((deadline - sooner[index], index) for index, deadline in deadlines.items()):
            ahead = self.num_taken + max(0, len(kept) - self.redundant_groups)
            trains_in = self.round + (0 if self.may_be_late else ahead // self.groups_per_round)
            if deadline >= trains_in or (self.may_be_late and not sooner[index]):
                kept[index] = deadline
        for index in sorted(kept):
            self._hold(index, kept[index], bounds[index] - sooner[index])
        return set(kept)


# -- Admission with a ring buffer between sampling and training, which drops its oldest group when full (`Ring`) ------
# `Admission` bounds staleness by admitting only what can be trained on in time, and discards nothing. Here a fixed
# number of groups is sampled at any time, and finished ones enter a buffer of C. When it is full, its oldest group is
# dropped, as is one that exceeds `max_staleness` in the buffer. Which prompts are lost depends on their latency: slow
# groups are older when they finish.


class RingAdmission(Admission):
    """Admission that never pauses sampling.

    Args:
        groups_per_round: P, groups trained on between two publications.
        max_staleness: S; a group that cannot be trained on within it is dropped.
        num_sampling: groups sampled at any time.
        capacity: C, finished groups in the buffer.
    """

    may_be_late = True
    drops_as = "the ring buffer"

    def __init__(self, groups_per_round: int, max_staleness: int, num_sampling: int, capacity: int) -> None:
        super().__init__(groups_per_round, max_staleness)
        self.num_sampling = num_sampling
        self.capacity = capacity
        self._waiting: deque[int] = deque()  # finished, in the order in which they finished
        self._lost: list[int] = []
        self._surplus = 0  # finished groups above the capacity: after a resume, until the interrupted round is over

    @property
    def num_admissible(self) -> int:
        """Number of groups whose sampling may start now."""
        return max(0, self.num_sampling - (len(self._deadlines) - len(self._waiting)))

    def finish(self, index: int) -> None:
        """Puts a group into the buffer; drops the oldest one if it is full."""
        self._waiting.append(index)
        while len(self._waiting) > self.capacity + self._surplus:
            self._lose_oldest()

    def choose(self) -> int | None:
        """The oldest group in the buffer within the bound."""
        while self._waiting and self._deadlines[self._waiting[0]] < self.round:
            self._lose_oldest()
        return self._waiting[0] if self._waiting and self.num_left_in_round > 0 else None

    def take(self, index: int) -> int:
        """Takes the chosen group; returns its deadline."""
        if index != self._waiting[0]:
            raise InvariantError(
                f"group {index} was taken from the buffer of finished groups before an older group: take the oldest "
                "group first"
            )
        self._waiting.popleft()
        return super().take(index)

    def drop(self, index: int) -> int:
        """Drops a group, also from the buffer; returns its deadline."""
        if index in self._waiting:
            self._waiting.remove(index)
        return super().drop(index)

    def lose(self) -> list[int]:
        """Groups dropped since the last call."""
        lost = self._lost
        self._lost = []
        return lost

    def restore(self, state: Mapping[str, Any], deadlines: Mapping[int, int]) -> set[int]:
        """As `Admission`; groups of the interrupted step return to the buffer, however full it is."""
        kept = super().restore(state, deadlines)
        self._surplus = max(0, len(kept) - self.capacity)
        return kept

    def advance(self) -> None:
        super().advance()
        self._surplus = 0

    def _lose_oldest(self) -> None:
        index = self._waiting.popleft()
        self.drop(index)
        self._lost.append(index)


# -- Admission that keeps the engine busy and drops groups that exceed the bound (`Drop`, `Retry`) --------------------
# Groups are started whether or not they can be trained on in time, and those too old at the start of a round are
# dropped. Slow groups are dropped more often; `LengthBiasMonitor` measures by how much.


class ExpiringAdmission(Admission):
    """Admits up to floor((1 + ahead) P) groups at a time and drops those that exceed the bound.

    As with `Admission`, a group admitted in round v may train in rounds v ... v + S, so no token is older than S
    versions; here it may also miss them. A round always ends: it needs P groups, and those admitted in it are in time.

    Args:
        groups_per_round: P, groups trained on between two publications.
        max_staleness: S, in versions.
        ahead: rounds of groups sampled or queued beyond the current one.
        max_tries: drops in a row after which a prompt is not sampled again.
    """

    may_be_late = True
    drops_as = "max_staleness"

    def __init__(self, groups_per_round: int, max_staleness: int, ahead: float, max_tries: int = 1) -> None:
        super().__init__(groups_per_round, max_staleness)
        self.ahead = ahead
        self.max_tries = max_tries
        self._swept = 0  # round in which groups were dropped last

    @property
    def num_admissible(self) -> int:
        """Number of groups whose sampling may start now; a taken group returns its slot at once."""
        return max(0, math.floor((1 + self.ahead) * self.groups_per_round + 1e-9) - len(self._deadlines))

    def _is_safe(self, index: int) -> bool:
        """True: the oldest finished group is taken, whatever the others miss."""
        return True

    def lose(self) -> list[int]:
        """Drops the groups whose last round is over."""
        if self._swept == self.round:
            return []  # called for every group, and looks at all of them: once a round is enough
        self._swept = self.round
        lost = [index for index, deadline in self._deadlines.items() if deadline < self.round]
        for index in lost:
            self.drop(index)
        return lost


# -- Admission policies, the setting `data.admission`: how far sampling may run ahead of training, and at which price
# | policy | engine at the staleness bound | groups thrown away | repeatable to the bit |
# |---|---|---|---|
# | `Bounded` (default) | waits | none, or the slowest of a round | no |
# | `FixedLag` | waits | none | yes |
# | `Drop`, `Retry` | never waits | those that are too old | no |
# | `Ring` | never waits | the oldest in the buffer | no |
# | `FromTape` | there is none | none | yes |
#
# All that sample keep the bound: no token older than `data.max_staleness` versions is trained on. Groups that
# `data.replay` mixes in have its own bound, and those of a tape that of the recorded run.


@dataclass(frozen=True)
class AdmissionPolicy(ABC):
    """Factory of a run's `Admission`.

    Attributes:
        in_order: whether groups train strictly in the order of admission, so that runs are repeatable; needs an engine
            without in-flight weight updates, and filters that drop no group.
    """

    in_order: ClassVar[bool] = False

    @abstractmethod
    def make(self, groups_per_round: int, max_staleness: int) -> Admission:
        """Admission for this many groups between publications and this bound in versions."""


@dataclass(frozen=True)
class Bounded(AdmissionPolicy):
    """Admits a group only if it can be trained on within the bound; trains on any finished group in time.

    Args:
        async_ratio: at most (1 + `async_ratio`) rounds of groups are sampled or queued (ROLL Flash, arXiv:2510.11345);
            at most `max_staleness`, which is also the meaning of None.
        redundant_groups: samples this many more groups in a round than are trained on, and aborts the slowest (ROLL
            Flash).

    Raises:
        ValueError: a setting is out of range.
    """

    async_ratio: float | None = None
    redundant_groups: int = 0

    def __post_init__(self) -> None:
        check_range("data.admission", ">= 0", async_ratio=self.async_ratio)
        check_range("data.admission", "integer >= 0", redundant_groups=self.redundant_groups)

    def make(self, groups_per_round: int, max_staleness: int) -> Admission:
        return Admission(
            groups_per_round,
            max_staleness,
            async_ratio=self.async_ratio,
            redundant_groups=self.redundant_groups,
        )


@dataclass(frozen=True)
class FixedLag(AdmissionPolicy):
    """Trains step n on rollouts of version n - `max_staleness`: runs are bitwise reproducible."""

    in_order: ClassVar[bool] = True

    def make(self, groups_per_round: int, max_staleness: int) -> Admission:
        return Admission(groups_per_round, max_staleness, in_order=True)


@dataclass(frozen=True)
class Drop(AdmissionPolicy):
    """Keeps the engine busy; drops groups that are too old at the start of a round. Their prompts are skipped.

    With `max_staleness: 0` a step takes the first groups to finish, except those started at older weights: the
    aggregation of Rennala SGD and Rennala NIGT, arXiv:2509.24305. Long completions are dropped more often;
    `LengthBiasMonitor` measures by how much.

    Args:
        ahead: rounds of groups sampled or queued beyond the one that trains; above `max_staleness` some are always
            dropped.

    Raises:
        ValueError: a setting is out of range.
    """

    ahead: float = 1.0

    def __post_init__(self) -> None:
        check_range("data.admission", ">= 0", ahead=self.ahead)

    def make(self, groups_per_round: int, max_staleness: int) -> Admission:
        return ExpiringAdmission(groups_per_round, max_staleness, self.ahead)


@dataclass(frozen=True)
class Retry(Drop):
    """Like `Drop`, but samples the prompt again, with the newest weights and before new prompts.

    No prompt is lost, but its long completions are underrepresented.

    Args:
        max_tries: drops in a row after which a prompt is given up.
    """

    max_tries: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("data.admission", "integer >= 1", max_tries=self.max_tries)

    def make(self, groups_per_round: int, max_staleness: int) -> Admission:
        return ExpiringAdmission(groups_per_round, max_staleness, ahead=self.ahead, max_tries=self.max_tries)


@dataclass(frozen=True)
class Ring(AdmissionPolicy):
    """Sampling never pauses; a ring buffer between sampling and training drops its oldest group when full.

    As in PipelineRL (arXiv:2509.19128), whose code counts lag in samples and drops single ones; here lag is in versions
    and whole groups are dropped. PipelineRL's other mode, a maximum lag that pauses sampling, is `Bounded` with
    `async_ratio` = lag / samples of a step.

    Args:
        num_sampling: groups sampled at any time.
        capacity: finished groups in the buffer.

    Raises:
        ValueError: a setting is out of range.
    """

    num_sampling: int
    capacity: int

    def __post_init__(self) -> None:
        check_range("data.admission", "integer >= 1", num_sampling=self.num_sampling, capacity=self.capacity)

    def make(self, groups_per_round: int, max_staleness: int) -> Admission:
        return RingAdmission(groups_per_round, max_staleness, num_sampling=self.num_sampling, capacity=self.capacity)


@dataclass(frozen=True)
class FromTape(AdmissionPolicy):
    """Trains on a recorded tape, in its order and without an engine; the bound is that of the recorded run.

    Args:
        folder: written by the `RolloutTape` callback.
    """

    folder: str
    in_order: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", os.path.expanduser(self.folder))

    def make(self, groups_per_round: int, max_staleness: int) -> Admission:
        return Admission(groups_per_round, max_staleness)
