"""What happens at the staleness bound: wait, drop or retry.

`data.admission: null` waits: a prompt is admitted only if it can be trained on in time (`Admission`). The engine
may idle, nothing is thrown away, and no prompt is lost. `Drop` and `Retry` keep the engine full instead: groups are
begun whether or not they can be trained on in time, and those that are too old when a round begins are thrown away.
What takes long is then lost more often; `LengthBiasMonitor` says by how much.
"""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from lit_async_rl.scheduling.admission import Admission


class ExpiringAdmission(Admission):
    """Admits up to floor((1 + ahead) P) groups at a time, and says which ones have become too old.

    A group that was admitted in round v may train in rounds v ... v + S, as with `Admission`, so that no token is older
    than S versions; unlike there it may miss them. There is always progress: a round ends only when P groups were
    trained on, and what is admitted in a round is in time for it.

    Args:
        groups_per_round: P, groups trained on between two publications.
        max_staleness: S, in versions.
        ahead: how many rounds' worth of groups are sampled or waiting, besides one.
    """

    def __init__(self, groups_per_round: int, max_staleness: int, ahead: float) -> None:
        super().__init__(groups_per_round, max_staleness)
        self.ahead = ahead
        self._swept = 0  # round in which groups were dropped last

    @property
    def num_admissible(self) -> int:
        """Groups that may start to be sampled now: those taken give their slots back at once."""
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


@dataclass(frozen=True)
class AtBound(ABC):
    """Samples ahead of the bound, and gives up what comes too late.

    Args:
        ahead: groups sampled or waiting, in rounds besides the one that trains; more than `max_staleness` means that
            some must be lost.

    Raises:
        ValueError: `ahead` is negative.
    """

    ahead: float = 1.0

    def __post_init__(self) -> None:
        if not self.ahead >= 0:
            raise ValueError(f"data.admission.ahead must be >= 0, got {self.ahead}")

    @abstractmethod
    def samples_again(self, num_lost: int) -> bool:
        """Whether a prompt that was lost so often gets another try."""


@dataclass(frozen=True)
class Drop(AtBound):
    """The prompt of a group that is too old is lost until its next epoch (as PipelineRL's ring buffer does).

    With `max_staleness: 0` a step takes the first P groups to finish, and those begun at older weights do not count:
    the aggregation of Rennala SGD and Rennala NIGT, arXiv:2509.24305.
    """

    def samples_again(self, num_lost: int) -> bool:
        """Never."""
        return False


@dataclass(frozen=True)
class Retry(AtBound):
    """The prompt is sampled again, with the newest weights, before new prompts.

    No prompt is lost, but its long completions are: what comes through is what was quick.

    Args:
        max_tries: a prompt that was lost so often in a row is given up.

    Raises:
        ValueError: a setting is out of range.
    """

    max_tries: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_tries < 1:
            raise ValueError(f"data.admission.max_tries must be >= 1, got {self.max_tries}")

    def samples_again(self, num_lost: int) -> bool:
        """Until it was lost `max_tries` times."""
        return num_lost < self.max_tries
