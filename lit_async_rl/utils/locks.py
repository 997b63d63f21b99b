"""A lock that a busy loop cannot keep from others, and a counter that others wait for."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from lit_async_rl.errors import StalledError


class FairLock:
    """A lock that a busy loop takes again and again, and others in between: whoever waits comes next.

    A plain lock would not do: the loop that has just released it takes it again before a waiting thread wakes up.

    Args:
        timeout_s: longest wait of anybody.
        what: names in an error what is waited for, and the setting that bounds it.
    """

    def __init__(self, timeout_s: float = 600.0, what: str = "a lock") -> None:
        self.timeout_s, self.what = timeout_s, what
        self._lock, self._next = threading.Lock(), threading.Lock()

    @contextmanager
    def hold(self, timeout_s: float | None = None) -> Iterator[None]:
        """Holds the lock; waits for at most one turn of a loop.

        Raises:
            StalledError: that turn did not end within `timeout_s`, or that of the constructor.
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
    """Counts what waits to be used, and lets nobody add to it while it is full. An error or `close` lets everybody go.

    Args:
        size: most that may wait.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._num_inside = 0
        self._error: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()

    def wait(self, timeout_s: float) -> bool:
        """Returns when there is room; False if there was none in time.

        Raises:
            RuntimeError: `close` was called with an error, which is the cause.
        """
        with self._changed:
            in_time = self._changed.wait_for(lambda: self._num_inside < self.size or self._closed, timeout_s)
            if self._error is not None:
                raise RuntimeError(f"the embedded engine broke: {self._error}") from self._error
            return in_time

    def add(self, number: int) -> None:
        """Something was added (1) or used (-1)."""
        with self._changed:
            self._num_inside += number
            self._changed.notify_all()

    def close(self, error: BaseException | None = None) -> None:
        """From now on nobody waits."""
        with self._changed:
            self._closed, self._error = True, self._error or error
            self._changed.notify_all()

    @contextmanager
    def closed_by_errors(self) -> Iterator[None]:
        """An error raised inside lets everybody go, with the error."""
        try:
            yield
        except BaseException as error:
            self.close(error)
            raise
