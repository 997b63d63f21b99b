"""A ring buffer between sampling and training that drops the oldest, so that sampling never waits.

As in PipelineRL (arXiv:2509.19128). `Admission` bounds staleness by what it lets begin, and throws nothing away. Here a
fixed number of groups is being sampled all the time; those that finish wait in a ring of C. Where it is full, the one
that has waited longest is dropped, and so is one that has become older than `max_staleness` while it waited. Which
prompts are lost depends on how long they take: slow ones are older when they finish.

What differs from PipelineRL's code: its lag is counted in samples, ours in versions; it drops single samples, we drop
groups. Its other mode, a largest lag in samples that holds sampling up, is `Admission` with
`async_ratio` = lag / (samples of a step).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from lit_async_rl.errors import InvariantError
from lit_async_rl.scheduling.admission import Admission
from lit_async_rl.scheduling.expiry import AtBound, ExpiringAdmission


@dataclass(frozen=True, kw_only=True)
class RingBuffer:
    """Sizes of the ring.

    Args:
        num_sampling: groups being sampled at any time.
        capacity: C, finished groups that wait.

    Raises:
        ValueError: a number is not positive.
    """

    num_sampling: int
    capacity: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"data.ring.{name} must be >= 1, got {value}")


class RingAdmission(Admission):
    """Admission where sampling never waits.

    Args:
        groups_per_round: P, groups trained on between two publications.
        max_staleness: S; a group that could not be trained on within it is dropped.
        ring: sizes.
    """

    def __init__(self, groups_per_round: int, max_staleness: int, ring: RingBuffer) -> None:
        super().__init__(groups_per_round, max_staleness)
        self.ring = ring
        self._waiting: deque[int] = deque()  # finished, in the order in which they finished
        self._lost: list[int] = []

    @property
    def num_admissible(self) -> int:
        """Groups that may start to be sampled now, to keep as many being sampled as there should be."""
        return max(0, self.ring.num_sampling - (len(self._deadlines) - len(self._waiting)))

    def finish(self, index: int) -> None:
        """Into the ring; the one that waited longest falls out if it is full."""
        self._waiting.append(index)
        if len(self._waiting) > self.ring.capacity:
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


def make_admission(
    groups_per_round: int,
    max_staleness: int,
    schedule: str,
    ring: RingBuffer | None,
    at_bound: AtBound | None = None,
    **others: Any,
) -> Admission:
    """The rule that these settings of `RolloutDataModule` stand for.

    Raises:
        ValueError: some of them contradict each other.
    """
    if ring is None and at_bound is None:
        return Admission(groups_per_round, max_staleness, in_order=schedule == "fixed_lag", **others)
    given = [f"data.{name}={value}" for name, value in others.items() if value]
    if schedule != "free":
        given.append(f"data.schedule={schedule}")
    if ring is not None and at_bound is not None:
        given.append(f"data.admission={type(at_bound).__name__}")
    if given and ring is not None:
        raise ValueError(f"data.ring with {' and '.join(given)}: with a ring buffer sampling waits for nothing")
    if given:
        at = f"data.admission={type(at_bound).__name__}"
        raise ValueError(
            f"{at} with {' and '.join(given)}: it says by itself how many groups are sampled, and which lost"
        )
    if ring is not None:
        return RingAdmission(groups_per_round, max_staleness, ring)
    if at_bound is None:
        raise InvariantError("neither a ring nor a rule for the bound")
    return ExpiringAdmission(groups_per_round, max_staleness, at_bound.ahead)
