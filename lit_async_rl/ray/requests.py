"""Requests as assignments of replicas: who samples which, which wait, and what has come.

Apart from `fleet.py`, because none of it depends on the life of a replica: no clock, and no call with an answer.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set

from lit_async_rl.engines.embedded.own_process import pack_requests
from lit_async_rl.ray.entries import Assignment, Part, ReplicaEntry, Sample
from lit_async_rl.ray.placement import Placement
from lit_async_rl.types import Completion

FIRST_MOVED_ID = 2**62  # of requests that others continue; those of callers are smaller
log = logging.getLogger(__name__)


class Requests:
    """Places requests on replicas, and files their completions. The fleet's lock is held in all methods.

    Args:
        session_margin: of `Placement`.
        tell: calls a method of a replica without an answer, `tell(entry, name, *args)`.

    Attributes:
        placement: of the replicas that requests go to.
        waiting: requests without a replica, by id.
        finished: completions for the caller.
    """

    def __init__(self, session_margin: float, tell: Callable[..., None]) -> None:
        self.placement = Placement(session_margin)
        self.waiting: dict[int, Part] = {}
        self.finished: deque[Completion] = deque()
        self._tell = tell
        self._num_assignments = 0
        self._moved_ids = itertools.count(FIRST_MOVED_ID)

    def assign(self, parts: Iterable[Part], entries: Sequence[ReplicaEntry], version: int) -> None:
        """Sends requests for these samples to replicas, in one call to each; they wait while no replica is in.

        No replica begins with them before it has the weights of `version`.
        """
        by_replica = dict[int, list[Assignment]]()
        for part in parts:
            request = part.request
            if not self.num_replicas:
                self.waiting[request.id] = part
                continue
            self._num_assignments += 1
            new = Assignment(self._num_assignments, part, oldest=version)
            number = self.placement.place(request.session, new.num_tokens)
            by_replica.setdefault(number, []).append(new)
        for number, assignments in by_replica.items():
            entry = next(entry for entry in entries if entry.number == number)
            entry.hold(assignments)
            packed = pack_requests([one.as_sent for one in assignments])
            self._tell(entry, "submit", packed, [one.number for one in assignments], version)

    @property
    def num_replicas(self) -> int:
        """Replicas that requests go to."""
        return len(self.placement)

    def go_to(self, entry: ReplicaEntry) -> bool:
        """Whether requests go to a replica."""
        return entry.number in self.placement.load

    def let_in(self, entry: ReplicaEntry) -> None:
        """Lets requests go to a replica."""
        self.placement.add(entry.number, sum(one.num_tokens for one in entry.held.values()))

    def take_waiting(self) -> list[Part]:
        """Pops the requests without a replica."""
        waiting = list(self.waiting.values())
        self.waiting = {}
        return waiting

    def take_finished(self) -> list[Completion]:
        """Pops the completions for the caller."""
        found = list(self.finished)
        self.finished.clear()
        return found

    def abort(self, gone: Set[int], entries: Iterable[ReplicaEntry]) -> None:
        """Forgets requests, by the ids of their submission."""
        self.waiting = {n: part for n, part in self.waiting.items() if part.submitted_id not in gone}
        self.finished = deque(c for c in self.finished if c.request_id not in gone)
        for entry in entries:
            entry.unverified = [s for s in entry.unverified if s.completion.request_id not in gone]
            if mine := sorted(n for n, one in entry.held.items() if one.part.submitted_id in gone):
                for request_id in mine:
                    self.placement.finish(entry.number, entry.held.pop(request_id).num_tokens)
                self._tell(entry, "abort", mine)

    def begun(self, entries: Iterable[ReplicaEntry]) -> list[Completion]:
        """Partial completions of moved requests, as they were when they were cancelled on the earlier replica."""
        parts = [*self.waiting.values(), *(one.part for entry in entries for one in entry.held.values())]
        return [part.begun for part in parts if part.begun is not None]

    # -- what others continue -----------------------------------------------------------------------------------------

    def movable(self, entry: ReplicaEntry, entries: Iterable[ReplicaEntry], num_slots: int) -> list[Assignment]:
        """Assignments of a replica that the others, with `num_slots` each, have room for; each request moves once."""
        others = [one for one in entries if self.go_to(one) and not one.is_silent]
        busy = [sum(assignment.num_missing for assignment in one.held.values()) for one in others]
        room = sum(max(0, num_slots - number) for number in busy)
        chosen = []
        for one in entry.held.values():
            if room > 0 and one.part.origin is None:
                chosen.append(one)
                room -= one.num_missing
        return chosen

    def take_away(
        self, entry: ReplicaEntry, chosen: Sequence[Assignment], begun: Mapping[int, Mapping[int, Completion]]
    ) -> list[Part]:
        """Cancels assignments of a replica, but for those that have come since; returns them as parts for others.

        `begun` has partial completions by assignment and position.
        """
        chosen = [one for one in chosen if entry.held.get(one.request.id) is one]
        for one in chosen:
            del entry.held[one.request.id]
            self.placement.finish(entry.number, one.num_tokens)  # if it has caught up meanwhile
        # also those that wait there for weights
        self._tell(entry, "abort", [one.request.id for one in chosen])
        log.info("%s: other replicas continue %d of its requests", entry.where, len(chosen))
        return [part for one in chosen for part in one.move(begun.get(one.number, {}), self._moved_ids)]

    # -- what has come ------------------------------------------------------------------------------------------------

    def file(self, entry: ReplicaEntry, samples: Sequence[Sample]) -> None:
        """Keeps a replica's samples until the weights of all their tokens are verified; then they are finished."""
        for sample in samples:
            self.placement.finish(entry.number, sample.num_tokens)
        pending = [*entry.unverified, *samples]
        proved = [sample for sample in pending if sample.completion.versions[-1] <= entry.verified]
        entry.unverified = [sample for sample in pending if sample.completion.versions[-1] > entry.verified]
        self.finished += [sample.completion for sample in proved]
        entry.num_good += len(proved)
        if proved:
            entry.num_failures = 0
