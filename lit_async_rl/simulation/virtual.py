"""Discrete-event simulation of an `Admission`: ten thousand concurrent rollouts in a second, without threads.

Events are the ends of samples and of training. Tests the guarantees of an `Admission` under random latencies, and
estimates its cost before a run.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from dataclasses import dataclass, field

from lit_async_rl.errors import InvariantError
from lit_async_rl.scheduling.admission import Admission
from lit_async_rl.scheduling.bottleneck import Intervals
from lit_async_rl.simulation.latency import Latency


@dataclass
class VirtualTrace:
    """Trace of a run.

    Attributes:
        trained: (index, round of admission, round of training) of each trained group.
        max_rollouts: largest number of samples queued or being sampled.
        max_groups: largest number of groups admitted and not trained on in an earlier round.
        num_admitted: groups admitted by the start of each round.
        num_lost: groups dropped.
        wall_s: virtual seconds of the run.
        wait_s: seconds in which the trainer waited for a group.
        slots_busy_s: seconds of generation, summed over all slots.
    """

    trained: list[tuple[int, int, int]] = field(default_factory=list)
    max_rollouts: int = 0
    max_groups: int = 0
    num_admitted: list[int] = field(default_factory=list)
    num_lost: int = 0
    wall_s: float = 0.0
    wait_s: float = 0.0
    slots_busy_s: float = 0.0

    @property
    def max_staleness(self) -> int:
        """Maximum age of a group when it was trained on, in rounds."""
        return max(now - admitted for _, admitted, now in self.trained)


class VirtualRun:
    """Slots, a queue and a trainer under one admission policy.

    Args:
        admission: admission policy; `run` changes its state.
        latency: seconds that a sample occupies a slot.
        num_slots: samples generated concurrently.
        train_s: seconds of training on the groups of a round.
        group_size: samples per group.
        streams: train on each group as it is taken, not on all at the end.
        seed: of the latencies.
    """

    def __init__(
        self,
        admission: Admission,
        latency: Latency,
        num_slots: int,
        train_s: float,
        group_size: int = 1,
        streams: bool = False,
        seed: int = 0,
    ) -> None:
        self.admission = admission
        self.latency = latency
        self.train_s = train_s
        self.streams = streams
        self.group_size = group_size
        self.trace = VirtualTrace()
        self._rng = random.Random(seed)
        self._now = 0.0
        self.num_slots = num_slots
        self._num_free = num_slots
        self._queue: deque[tuple[int, float]] = deque()  # (group, seconds)
        self._running: list[tuple[float, int]] = []  # heap of (end, group)
        self._missing: dict[int, int] = {}  # number of unfinished samples of each group
        self._admitted_in: dict[int, int] = {}

    def run(self, num_rounds: int) -> VirtualTrace:
        """Trains on this many rounds of groups.

        Raises:
            InvariantError: the policy deadlocks.
        """
        self._admit()
        for _ in range(num_rounds):
            self.trace.num_admitted.append(self.admission.next_index)
            self._run_round()
        self.trace.wall_s = self._now
        return self.trace

    def totals(self, num_rounds: int) -> Intervals:
        """Totals after this many further rounds, since the beginning; the engine's are means over its slots."""
        trace = self.run(num_rounds)
        busy_s = trace.slots_busy_s / self.num_slots
        return Intervals(wall_s=trace.wall_s, wait_s=trace.wait_s, sync_s=0.0, engine_busy_s=busy_s)

    def _run_round(self) -> None:
        admission = self.admission
        while admission.num_left_in_round:
            index = admission.choose()
            self._drop_lost()
            if index is None:
                if not self._running:
                    raise InvariantError("deadlock: no group can be trained on, and no group is being sampled")
                began = self._now
                self._sample_until(self._running[0][0])
                self.trace.wait_s += self._now - began
                continue
            admission.take(index)
            self.trace.trained.append((index, self._admitted_in[index], admission.round))
            self._drop_lost()
            if self.streams:
                self._sample_until(self._now + self.train_s / admission.groups_per_round)
        if not self.streams:
            self._sample_until(self._now + self.train_s)
        admission.advance()
        self._admit()

    def _admit(self) -> None:
        for _ in range(self.admission.num_admissible):
            index = self.admission.admit()
            self._admitted_in[index] = self.admission.round
            self._missing[index] = self.group_size
            self._queue.extend((index, self.latency.draw(self._rng)) for _ in range(self.group_size))
        self._fill_slots()
        taken = self.admission.round * self.admission.groups_per_round
        under_way = self.admission.next_index - taken - self.trace.num_lost
        self.trace.max_groups = max(self.trace.max_groups, under_way)
        self.trace.max_rollouts = max(self.trace.max_rollouts, len(self._queue) + len(self._running))

    def _fill_slots(self) -> None:
        while self._num_free and self._queue:
            index, seconds = self._queue.popleft()
            if index in self._missing:
                heapq.heappush(self._running, (self._now + seconds, index))
                self._num_free -= 1

    def _sample_until(self, then: float) -> None:
        """Advances the virtual time."""
        while self._running and self._running[0][0] <= then:
            end, index = heapq.heappop(self._running)
            self._advance(end)
            self._num_free += 1
            self._missing[index] -= 1
            if not self._missing[index]:
                del self._missing[index]
                self.admission.finish(index)
                self._drop_lost()
                self._admit()
            self._fill_slots()
        self._advance(then)

    def _advance(self, then: float) -> None:
        self.trace.slots_busy_s += (then - self._now) * (self.num_slots - self._num_free)
        self._now = then

    def _drop_lost(self) -> None:
        """Aborts dropped groups and frees their slots."""
        lost = set(self.admission.lose())
        self.trace.num_lost += len(lost)
        aborted = {index for index in lost if self._missing.pop(index, None) is not None}
        if aborted:
            self._num_free += sum(index in aborted for _, index in self._running)
            self._running = [sample for sample in self._running if sample[1] not in aborted]
            heapq.heapify(self._running)
            self._fill_slots()
