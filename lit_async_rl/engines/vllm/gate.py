"""Requests between their submission and vLLM: they pass, or wait until new weights are loaded or vLLM is awake."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from typing import Literal

from lit_async_rl.engines.base import GenerationRequest

Reason = Literal["update", "sleep"]


class Gate:
    """Passes requests on unless it is shut; thread-safe.

    Args:
        start: starts requests under the weights of a version; called with the gate's lock held.
    """

    def __init__(self, start: Callable[[Sequence[GenerationRequest], int], None]) -> None:
        self._start, self._lock = start, threading.Lock()
        self._held: list[GenerationRequest] = []
        self._reasons: set[Reason] = set()
        self._version = 0

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Starts requests, or holds them."""
        with self._lock:
            if self._reasons:
                self._held += requests
            else:
                self._start(requests, self._version)

    def forget(self, request_ids: Collection[int]) -> None:
        """Drops those of these requests that are held."""
        with self._lock:
            self._held = [request for request in self._held if request.id not in request_ids]

    def shut(self, reason: Reason) -> None:
        """Holds requests from now on, until it is opened for the same reason."""
        with self._lock:
            self._reasons.add(reason)

    def open(self, *reasons: Reason, version: int | None = None) -> None:
        """Withdraws reasons, and starts what was held if none is left; `version` is that of weights newly loaded."""
        with self._lock:
            self._reasons.difference_update(reasons)
            self._version = self._version if version is None else version
            if not self._reasons:
                held, self._held = self._held, []
                self._start(held, self._version)
