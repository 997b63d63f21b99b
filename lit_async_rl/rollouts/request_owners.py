"""Owners of requests in a producer's engine besides training: an evaluation, the questions of a judge.

Request ids tell them apart: each owner has a range of its own, above those of training.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from lit_async_rl.types import Completion, GenerationRequest


@runtime_checkable
class RequestOwner(Protocol):
    """Receives what becomes of its requests, with the producer's `changed` held."""

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for the engine, which must not sleep then."""
        ...

    def collect(self, completion: Completion) -> None:
        """Takes a completion of one of its requests, which may be withdrawn by now."""
        ...

    def lose(self, request_id: int, number: int | None = None) -> None:
        """Notes that the engine gave up a number of a request's samples; None is all that are left."""
        ...

    def again(self) -> list[GenerationRequest]:
        """Requests to submit again when the engine is replaced."""
        ...


class RequestOwners:
    """The owners in a producer, by the first of their request ids."""

    def __init__(self) -> None:
        self._by_first_id: dict[int, RequestOwner] = {}

    def add(self, first_id: int, owner: RequestOwner) -> None:
        """Registers, or replaces, the owner of ids from `first_id` up to the next owner's."""
        self._by_first_id[first_id] = owner

    def of(self, request_id: int) -> RequestOwner | None:
        """The owner of a request; None for those of training."""
        first_id = max((first for first in self._by_first_id if first <= request_id), default=None)
        return None if first_id is None else self._by_first_id[first_id]

    @property
    def is_waiting(self) -> bool:
        """Whether any of them waits for the engine."""
        return any(owner.is_waiting for owner in self._by_first_id.values())

    def again(self) -> list[GenerationRequest]:
        """Requests of all of them to submit to another engine."""
        return [request for owner in self._by_first_id.values() for request in owner.again()]
