"""Admission that keeps the engine busy and drops groups that exceed the bound (`Drop`, `Retry`).

Groups are started whether or not they can be trained on in time, and those too old at the start of a round are dropped.
Slow groups are dropped more often; `LengthBiasMonitor` measures by how much.
"""

from __future__ import annotations

import heapq
import math

from lit_async_rl.scheduling.admission import Admission


class ExpiringAdmission(Admission):
    """Admits up to floor((1 + ahead) P) groups at a time and drops those that exceed the bound.

    A group admitted in round v may train in rounds v ... v + S, as with `Admission`, so no token is older than S
    versions; here it may also miss them. A round always ends: it needs P groups, and those admitted in a round are in
    time for it.

    Args:
        groups_per_round: P, groups trained on between two publications.
        max_staleness: S, in versions.
        ahead: rounds of groups that are sampled or queued beyond the current one.
        max_tries: a prompt is sampled again until its group was dropped that many times in a row.
    """

    may_be_late = True

    def __init__(self, groups_per_round: int, max_staleness: int, ahead: float, max_tries: int = 1) -> None:
        super().__init__(groups_per_round, max_staleness)
        self.ahead, self.max_tries = ahead, max_tries
        self._swept = 0  # round in which groups were dropped last

    @property
    def num_admissible(self) -> int:
        """Number of groups whose sampling may start now; a taken group returns its slot at once."""
        return max(0, math.floor((1 + self.ahead) * self.groups_per_round + 1e-9) - len(self._deadlines))

    def choose(self) -> int | None:
        """The oldest finished group."""
        while self._finished and self._finished[0] not in self._deadlines:
            heapq.heappop(self._finished)
        return self._finished[0] if self._finished and self.num_left_in_round > 0 else None

    def lose(self) -> list[int]:
        """Drops the groups whose last round is over."""
        if self._swept == self.round:
            return []  # called for every group, and looks at all of them: once a round is enough
        self._swept = self.round
        lost = [index for index, deadline in self._deadlines.items() if deadline < self.round]
        for index in lost:
            self.drop(index)
        return lost
