"""Admission control: the staleness bound by counting slots.

A *round* is the time between two weight publications; P groups are trained on in each. Before it is sampled, group
number i (from 0) takes one of (S + 1) P slots, and P slots are returned at the end of each round. So in round v the
admitted groups are those with i < (S + 1 + v) P. In FIFO order group i trains in round floor(i / P) <= v + S, so no
token of it, sampled by version v or newer, is older than S versions. No group is discarded.

In FIFO order one slow group would block all that finished behind it. `Bounded` therefore takes any finished group as
long as every admitted one can still be trained on before its deadline v + S (earliest deadline first is feasible
whenever FIFO is). `FixedLag` keeps the order, which makes runs reproducible.

With R redundant groups (ROLL Flash, arXiv:2510.11345) there are R more slots, and at most R groups of a round may miss
their deadline: they are dropped, so the R slowest groups delay nothing.

The cost per group grows with the logarithm of the number of groups and is negligible in a run.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from lit_async_rl.errors import InvariantError, StalenessError
from lit_async_rl.types import RolloutGroup
from lit_async_rl.utils.checks import check_range


def check_bound(groups: Iterable[RolloutGroup], version: int) -> None:
    """Checks every token of groups with a bound before they are collated; `StepGuard` checks again after.

    Raises:
        StalenessError: a token is older than the `max_staleness` of its group.
    """
    for group in groups:
        oldest = min((v for rollout in group.rollouts for v in rollout.versions), default=version)
        if group.max_staleness is not None and version - oldest > group.max_staleness:
            raise StalenessError(
                f"a token of version {oldest} of group {group.index} reached version {version}, beyond its "
                f"max_staleness={group.max_staleness}"
            )


class Admission:
    """Counts slots; not thread-safe (the producer holds a lock) and without clocks.

    Args:
        groups_per_round: P, groups trained on between two publications.
        max_staleness: S, in versions; 0 is synchronous.
        in_order: take groups strictly in the order of admission (`FixedLag`) instead of any that is safe to take.
        async_ratio: alpha of ROLL Flash (arXiv:2510.11345): at most (1 + alpha) P groups are sampled or queued at a
            time, 0 <= alpha <= S. A token is then at most ceil(alpha) versions old. None is S.
        redundant_groups: R.

    Attributes:
        may_be_late: whether an admitted group may miss its deadline, and is dropped then (`Drop`, `Retry`, `Ring`).
    """

    may_be_late: ClassVar[bool] = False

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
                f"Admission.async_ratio={async_ratio} with in_order=True: the lag is max_staleness, exactly"
            )
        if redundant_groups and in_order:
            raise ValueError(f"Admission.redundant_groups={redundant_groups} with in_order=True, which loses no group")
        self.async_ratio, self.redundant_groups = async_ratio, redundant_groups
        self.groups_per_round = groups_per_round
        self.max_staleness = max_staleness
        self.bounds: dict[int, int] = {}  # of the groups under way: each keeps the one it was admitted under
        self.in_order = in_order
        self.round = 0
        self.num_taken = self.num_lost = 0  # in this round
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
            raise InvariantError(f"a group was admitted in round {self.round} without a free slot")
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
        """Whether all other groups (but R) can still meet their deadlines if `index` is taken now."""
        own = self._deadlines[index]
        room, due = self.num_left_in_round - 1 + self.redundant_groups, 0
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
            raise StalenessError(f"group {index} was due in round {deadline}, now is {self.round}")
        self.num_taken += 1
        return deadline

    def drop(self, index: int) -> int:
        """Drops an admitted group; its slot is returned at once. Returns its deadline."""
        deadline = self._deadlines.pop(index)
        self._due[deadline] -= 1
        if not self._due[deadline]:
            del self._due[deadline]
        return deadline

    def lose(self) -> list[int]:
        """Once the round is full: drops at most R groups that were due in it; the round returns their slots."""
        if self.num_left_in_round > 0 or not self._due[self.round]:
            return []
        lost = [index for index, deadline in self._deadlines.items() if deadline <= self.round]
        for index in lost:
            self.drop(index)
        self.num_lost += len(lost)
        if self.num_lost > self.redundant_groups:
            raise InvariantError(f"{self.num_lost} groups lost in round {self.round}, redundant_groups is fewer")
        return lost

    def advance(self) -> None:
        """Ends the round: the weights trained on its groups are published (or the update was skipped)."""
        if self.num_left_in_round:
            raise InvariantError(f"{self.num_left_in_round} groups of round {self.round} were never taken")
        self.bounds = {index: self.bounds[index] for index in self._deadlines}
        self.round += 1
        self.num_taken = self.num_lost = 0

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self, num_given_back: int = 0) -> dict[str, Any]:
        """State as plain containers; `num_given_back` groups of this round were taken but not trained on."""
        return {
            "round": self.round,
            "num_taken": self.num_taken - num_given_back,
            "num_lost": self.num_lost,
            "next_index": self.next_index,
            "groups_per_round": self.groups_per_round,
            "max_staleness": self.max_staleness,
            "bounds": dict(self.bounds),
        }

    def restore(self, state: Mapping[str, Any], deadlines: Mapping[int, int]) -> set[int]:
        """Restores a `state_dict` with these groups admitted (index: deadline), as far as the bound allows.

        With unchanged settings it allows all of them. Where a group's bound is above `max_staleness` its deadline moves
        forward; with fewer groups per round the last ones would miss theirs.

        Returns:
            The groups admitted; the others must be sampled again.

        Raises:
            ValueError: the number of groups per round was changed in the middle of a round.
        """
        if state["num_taken"] and state["groups_per_round"] != self.groups_per_round:
            raise ValueError(
                f"data.groups_per_step * data.weight_sync_steps is {self.groups_per_round}, and was "
                f"{state['groups_per_round']} when the checkpoint was saved; between two publications it must stay"
            )
        self.round, self.next_index = state["round"], state["next_index"]
        self.num_taken, self.num_lost = state["num_taken"], state["num_lost"]
        largest = state.get("largest_bound", state["max_staleness"])  # older checkpoints have one for all
        bounds = {index: state.get("bounds", {}).get(index, largest) for index in deadlines}
        sooner = {index: max(0, bound - self.max_staleness) for index, bound in bounds.items()}
        kept: dict[int, int] = {}
        for deadline, index in sorted((deadline - sooner[index], index) for index, deadline in deadlines.items()):
            ahead = self.num_taken + max(0, len(kept) - self.redundant_groups)
            trains_in = self.round + (0 if self.may_be_late else ahead // self.groups_per_round)
            if deadline >= trains_in:
                kept[index] = deadline
        for index in sorted(kept):
            self._hold(index, kept[index], bounds[index] - sooner[index])
        return set(kept)
