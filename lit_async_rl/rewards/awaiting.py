"""Execution of `async` reward functions for the worker threads that score completions."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable
from typing import TypeVar

from lit_async_rl.errors import StalledError
from lit_async_rl.utils.event_loop import LoopThread

ANSWER_S = 1.0  # in which a loop that works runs a coroutine that does nothing

T = TypeVar("T")


class Awaiter:
    """Runs awaitables in one event loop, so that all workers can share a client (such as an HTTP session).

    The loop is started on first use, and replaced if a reward blocks it (`time.sleep` in an `async def`).

    Args:
        timeout_s: longest that one result may take.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._loop: LoopThread | None = None

    def wait(self, awaitable: Awaitable[T]) -> T:
        """Returns the result of an awaitable, or raises its exception.

        Raises:
            StalledError: it timed out and was cancelled.
        """
        with self._lock:
            loop = self._loop = self._loop or LoopThread("async-reward")
        try:
            return loop.call(_result(awaitable), self._timeout_s, "it")
        except StalledError:
            if not loop.answers(ANSWER_S):
                with self._lock:
                    self._loop = None if self._loop is loop else self._loop
            raise

    @staticmethod
    def once(awaitable: Awaitable[T]) -> T:
        """Result of an awaitable, run in a separate event loop."""
        return asyncio.run(_result(awaitable))

    def close(self) -> None:
        """Cancels running awaitables, and stops the loop."""
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is not None and loop.answers(ANSWER_S):
            loop.close(asyncio.sleep(0))


async def _result(awaitable: Awaitable[T]) -> T:
    return await awaitable
