"""Admission where sampling never waits: a ring buffer between sampling and training drops its oldest group (`Ring`).

`Admission` bounds staleness by admitting no more than can be trained on in time, and throws nothing away. Here a fixed
number of groups is being sampled at any time, and finished ones wait in a buffer of C. When it is full, the group that
has waited longest is dropped, as is one that has become older than `max_staleness` while it waited. Which prompts are
lost depends on how long they take: slow groups are older when they finish.
"""

from __future__ import annotations

from collections import deque

from lit_async_rl.errors import InvariantError
from lit_async_rl.scheduling.admission import Admission


class RingAdmission(Admission):
    """Admission where sampling never waits.

    Args:
        groups_per_round: P, groups trained on between two publications.
        max_staleness: S; a group that could not be trained on within it is dropped.
        num_sampling: groups being sampled at any time.
        capacity: C, finished groups that wait.
    """

    def __init__(self, groups_per_round: int, max_staleness: int, num_sampling: int, capacity: int) -> None:
        super().__init__(groups_per_round, max_staleness)
        self.num_sampling, self.capacity = num_sampling, capacity
        self._waiting: deque[int] = deque()  # finished, in the order in which they finished
        self._lost: list[int] = []

    @property
    def num_admissible(self) -> int:
        """Groups that may start to be sampled now, to keep as many being sampled as there should be."""
        return max(0, self.num_sampling - (len(self._deadlines) - len(self._waiting)))

    def finish(self, index: int) -> None:
        """Into the ring; the one that waited longest falls out if it is full."""
        self._waiting.append(index)
        if len(self._waiting) > self.capacity:
            self._lose_oldest()

    def choose(self) -> int | None:
        """The one that has waited longest and is not too old."""
        while self._waiting and self._deadlines[self._waiting[0]] < self.round:
            self._lose_oldest()
        return self._waiting[0] if self._waiting and self.num_left_in_round > 0 else None

    def take(self, index: int) -> int:
        """Marks the chosen group as trained on in this round; returns its deadline."""
        if index != self._waiting[0]:
            raise InvariantError(f"group {index} is not the one that has waited longest")
        self._waiting.popleft()
        return super().take(index)

    def lose(self) -> list[int]:
        """What was dropped since the last call."""
        lost, self._lost = self._lost, []
        return lost

    def _lose_oldest(self) -> None:
        index = self._waiting.popleft()
        self.drop(index)
        self._lost.append(index)
