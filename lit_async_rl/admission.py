"""The staleness bound, as counting: which groups may be sampled now, and which may be trained on now.

A *round* is the time between two weight publications; P groups are trained on in each. The rule: before it is sampled,
group number i (from 0) takes one of (S + 1) P slots, and P slots come back at the end of each round. So in round v the
admitted groups are those with i < (S + 1 + v) P. In first-in-first-out order group i trains in round
floor(i / P) <= v + S, so no token of it, sampled by version v or newer, is older than S versions. Nothing is thrown
away.

First-in-first-out would let one slow group hold up all that finished behind it. The `free` schedule therefore takes any
finished group as long as every admitted one can still be trained on before its deadline v + S (earliest deadline first
is feasible whenever first-in-first-out is). `fixed_lag` keeps the order, which makes runs reproducible.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class Admission:
    """Counts slots; no threads, no clocks (the producer holds a lock around it).

    Args:
        groups_per_round: P, groups trained on between two publications.
        max_staleness: S, in versions; 0 is synchronous.
        in_order: take groups strictly in the order of admission (`fixed_lag`) instead of any that is safe to take.
    """

    def __init__(self, groups_per_round: int, max_staleness: int, in_order: bool = False) -> None:
        if max_staleness < 0:
            raise ValueError(f"max_staleness must be >= 0 versions (0 is synchronous), got {max_staleness}")
        if groups_per_round < 1:
            raise ValueError(f"groups_per_step must be >= 1, got {groups_per_round}")
        self.groups_per_round = groups_per_round
        self.max_staleness = max_staleness
        self.largest_bound = max_staleness  # so far: groups keep the bound they were admitted under
        self.in_order = in_order
        self.round = 0
        self.num_admitted = 0
        self.num_taken = 0
        self._deadlines: dict[int, int] = {}  # group index -> last round it may train in, for groups not yet taken
        self._due: Counter[int] = Counter()  # deadline -> groups not yet taken

    @property
    def num_admissible(self) -> int:
        """Groups that may start to be sampled now."""
        return max(0, (self.max_staleness + 1 + self.round) * self.groups_per_round - self.num_admitted)

    @property
    def num_left_in_round(self) -> int:
        """Groups still to be taken before the next publication."""
        return (self.round + 1) * self.groups_per_round - self.num_taken

    def admit(self) -> int:
        """Takes a slot and returns the new group's index."""
        assert self.num_admissible > 0
        index = self.num_admitted
        self.num_admitted += 1
        self.largest_bound = max(self.largest_bound, self.max_staleness)
        deadline = self.round + self.max_staleness
        self._deadlines[index] = deadline
        self._due[deadline] += 1
        return index

    def choose(self, finished: Iterable[int]) -> int | None:
        """The finished group to train on next; None while only unfinished ones may be."""
        if self.num_left_in_round <= 0:
            return None
        oldest = min(finished, default=None)
        if oldest is None:
            return None
        if self.in_order:
            return oldest if oldest == self.num_taken else None
        return oldest if self._is_safe(oldest) else None

    def _is_safe(self, index: int) -> bool:
        """Whether all other groups can still meet their deadlines when `index` is taken now."""
        own = self._deadlines[index]
        room, due = self.num_left_in_round - 1, 0
        for deadline in range(self.round, own):
            due += self._due[deadline]
            if due > room:
                return False
            room += self.groups_per_round
        return True

    def take(self, index: int) -> None:
        """Marks a chosen group as trained on in this round."""
        deadline = self._deadlines.pop(index)
        assert deadline >= self.round, f"group {index} was due in round {deadline}, now is {self.round}"
        self._due[deadline] -= 1
        if not self._due[deadline]:
            del self._due[deadline]
        self.num_taken += 1

    def advance(self) -> None:
        """Ends the round: the weights trained on these groups are live (or the update was skipped)."""
        assert self.num_left_in_round == 0, f"{self.num_left_in_round} groups of round {self.round} were never taken"
        self.round += 1
