"""Admission with a ring buffer between sampling and training, which drops its oldest group when full (`Ring`).

`Admission` bounds staleness by admitting only what can be trained on in time, and discards nothing. Here a fixed number
of groups is sampled at any time, and finished ones enter a buffer of C. When it is full, its oldest group is dropped,
as is one that exceeds `max_staleness` in the buffer. Which prompts are lost depends on their latency: slow groups are
older when they finish.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from lit_async_rl.errors import InvariantError
from lit_async_rl.scheduling.admission import Admission


class RingAdmission(Admission):
    """Admission that never pauses sampling.

    Args:
        groups_per_round: P, groups trained on between two publications.
        max_staleness: S; a group that cannot be trained on within it is dropped.
        num_sampling: groups sampled at any time.
        capacity: C, finished groups in the buffer.
    """

    may_be_late = True

    def __init__(self, groups_per_round: int, max_staleness: int, num_sampling: int, capacity: int) -> None:
        super().__init__(groups_per_round, max_staleness)
        self.num_sampling, self.capacity = num_sampling, capacity
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
        """Takes the chosen group in this round; returns its deadline."""
        if index != self._waiting[0]:
            raise InvariantError(f"group {index} is not the one that has waited longest")
        self._waiting.popleft()
        return super().take(index)

    def lose(self) -> list[int]:
        """Groups dropped since the last call."""
        lost, self._lost = self._lost, []
        return lost

    def restore(self, state: Mapping[str, Any], deadlines: Mapping[int, int]) -> set[int]:
        """As `Admission`; the groups of the interrupted step come back into the buffer, however full it is."""
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
