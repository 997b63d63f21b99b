"""FIFO request queue with priorities and barriers. Not thread-safe: callers hold the engine's lock."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lit_async_rl.models.weights import LowRankSum
from lit_async_rl.types import GenerationRequest


@dataclass(frozen=True)
class Pending:
    """Samples `first_sample ... first_sample + num_samples - 1` of a request."""

    request: GenerationRequest
    first_sample: int
    num_samples: int

    @property
    def stream(self) -> int | None:
        """Seed of the first sample's random stream; None if the engine's generator is used."""
        return None if self.request.seed is None else self.request.seed + self.first_sample


@dataclass(frozen=True)
class Update:
    """Barrier: new weights, applied when all earlier requests are finished.

    Attributes:
        version: of the weights.
        weights: result of `receive_weights`.
        ready: CUDA event behind the copies; None without streams.
    """

    version: int
    weights: dict[str, Tensor | LowRankSum]
    ready: Any = None


@dataclass(frozen=True)
class NewBatch:
    """Barrier: re-seeds the generator when all earlier requests are finished."""

    seed: int


class RequestQueue:
    """FIFO queue; requests of higher priority go first, but never past a barrier.

    Prefilling a prompt costs about as much as decoding one token of all rows, so several slots are filled at a time:
    once an eighth of them is free, or all queued requests fit.
    """

    def __init__(self) -> None:
        self._items: deque[Pending | Update | NewBatch] = deque()

    def __len__(self) -> int:
        return len(self._items)

    @property
    def num_updates(self) -> int:
        """Number of updates not reached yet."""
        return sum(isinstance(item, Update) for item in self._items)

    def push_requests(self, requests: Sequence[GenerationRequest], seed: int | None = None) -> None:
        """Queues all samples of these requests behind all of the same or higher priority.

        With a seed, they form a batch, which starts when all earlier requests are finished, with a generator seeded by
        `seed` and the id of its first request.
        """
        if requests and seed is not None:
            self.push_barrier(NewBatch(random.Random(f"{seed} {requests[0].id}").getrandbits(63)))
        for request in requests:
            place = len(self._items)
            while place and self._gives_way(self._items[place - 1], request):
                place -= 1
            self._items.insert(place, Pending(request, 0, request.num_samples))

    @staticmethod
    def _gives_way(item: Pending | Update | NewBatch, request: GenerationRequest) -> bool:
        return isinstance(item, Pending) and item.request.priority < request.priority

    def push_barrier(self, barrier: Update | NewBatch) -> None:
        """Appends a barrier."""
        self._items.append(barrier)

    def drop(self, request_ids: set[int]) -> None:
        """Removes these requests."""
        kept = (item for item in self._items if not (isinstance(item, Pending) and item.request.id in request_ids))
        self._items = deque(kept)

    def take_barrier(self, num_active: int) -> Update | NewBatch | None:
        """Pops the head of the queue if it is a barrier, and all requests before it are finished."""
        head = self._items[0] if self._items and not num_active else None
        if head is None or isinstance(head, Pending):
            return None
        self._items.popleft()
        return head

    def take_requests(self, num_active: int, num_slots: int) -> list[Pending]:
        """Pops the requests to prefill now, with `num_active` of `num_slots` slots in use.

        A request that does not fit waits for more slots, so that its prompt is prefilled once. It is split if waiting
        would idle a quarter of the slots.
        """
        free = num_slots - num_active
        if num_active and free < num_slots / 8 and not self._all_fit(free):
            return []
        taken: list[Pending] = []
        while free and self._items and isinstance(head := self._items[0], Pending):
            if head.num_samples > free:
                if num_active and free < num_slots / 4:
                    break
                rest = Pending(head.request, head.first_sample + free, head.num_samples - free)
                head = Pending(head.request, head.first_sample, free)
                self._items[0] = rest
            else:
                self._items.popleft()
            taken.append(head)
            free -= head.num_samples
        return taken

    def _all_fit(self, free: int) -> bool:
        for item in self._items:
            if not isinstance(item, Pending) or item.num_samples > free:
                return not isinstance(item, Pending)
            free -= item.num_samples
        return True
