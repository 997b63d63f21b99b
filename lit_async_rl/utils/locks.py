"""A fair mutex, and a bounded counter with waiting."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from lit_async_rl.errors import StalledError


class FairLock:
    """Fair mutex: a waiting thread acquires before the decode loop's next turn.

    With a plain lock, a loop that releases and re-acquires it starves the waiting threads.

    Args:
        timeout_s: timeout of `hold`.
        what: what is waited for and the setting that bounds it, for messages.
    """

    def __init__(self, timeout_s: float = 600.0, what: str = "a lock") -> None:
        self.timeout_s, self.what = timeout_s, what
        self._lock, self._next = threading.Lock(), threading.Lock()

    @contextmanager
    def hold(self, timeout_s: float | None = None) -> Iterator[None]:
        """Context that holds the lock; waits for at most one turn of the loop.

        Raises:
            StalledError: the lock was not acquired within `timeout_s`, by default that of the constructor.
        """
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        self._acquire(self._next, deadline, limit_s)  # whose owner waits, while the loop can only queue behind it
        try:
            self._acquire(self._lock, deadline, limit_s)
        finally:
            self._next.release()
        try:
            yield
        finally:
            self._lock.release()

    def _acquire(self, lock: threading.Lock, deadline: float, limit_s: float) -> None:
        if not lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise StalledError(f"waited {limit_s:g} s for {self.what}")


class Room:
    """Bounded counter of pending items; adders wait while it is full. An error or `close` unblocks all waiters.

    Args:
        size: maximum count.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._num_inside = 0
        self._error: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()

    def wait(self, timeout_s: float) -> bool:
        """Waits until there is room; False on timeout.

        Raises:
            RuntimeError: `close` was called with an error, which is the cause.
        """
        with self._changed:
            in_time = self._changed.wait_for(lambda: self._num_inside < self.size or self._closed, timeout_s)
            if self._error is not None:
                raise RuntimeError(f"the embedded engine broke: {self._error}") from self._error
            return in_time

    def add(self, number: int) -> None:
        """Counts an item as added (1) or used (-1)."""
        with self._changed:
            self._num_inside += number
            self._changed.notify_all()

    def close(self, error: BaseException | None = None) -> None:
        """Unblocks all waiters, now and later."""
        with self._changed:
            self._closed, self._error = True, self._error or error
            self._changed.notify_all()

    @contextmanager
    def closed_by_errors(self) -> Iterator[None]:
        """Context in which an exception closes the counter with it."""
        try:
            yield
        except BaseException as error:
            self.close(error)
            raise
