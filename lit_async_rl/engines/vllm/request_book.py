"""Thread-safe record of an engine's running requests, finished samples and first failure."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable

from lit_async_rl.engines.base import Completion
from lit_async_rl.errors import EngineError
from lit_async_rl.utils.spans import Lane


class RequestBook:
    """Counts requests and tokens and queues finished samples; all methods are thread-safe.

    Args:
        name: of the engine, for messages.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.num_tokens = 0
        self._changed = threading.Condition()
        self._running: set[int] = set()
        self._finished: deque[Completion] = deque()
        self._error: BaseException | None = None
        self._closed = False
        self._busy_since = 0.0
        self._busy_s = 0.0
        self.lane: Lane | None = None  # of a timeline
        self.version = 0  # of the weights that were loaded last
        self._drawn_until, self._drawn_tokens, self._too_much_s = 0.0, 0, 0.0

    def begin(self, request_ids: Iterable[int]) -> None:
        """Marks requests as running."""
        with self._changed:
            if not self._running:
                self._busy_since = self._drawn_until = time.monotonic()
            self._running.update(request_ids)

    def add(self, request_id: int, num_tokens: int, completions: list[Completion]) -> None:
        """Counts tokens and queues completions; those of an ended request are counted only."""
        with self._changed:
            self.num_tokens += num_tokens
            self._draw(time.monotonic())
            if completions and request_id in self._running:
                self._finished += completions
                self._changed.notify_all()

    def end(self, request_ids: Iterable[int]) -> None:
        """Marks requests as finished."""
        with self._changed:
            was_busy = bool(self._running)
            self._running.difference_update(request_ids)
            if was_busy and not self._running:
                now = time.monotonic()
                self._busy_s += now - self._busy_since
                self._draw(now, is_empty=True)
            self._changed.notify_all()

    def drop(self, request_ids: set[int]) -> None:
        """Ends requests and drops their completions."""
        with self._changed:
            self.end(request_ids)
            self._finished = deque(c for c in self._finished if c.request_id not in request_ids)

    def take(self, timeout_s: float) -> list[Completion]:
        """Completions finished since the last call; waits for the first. Empty after `close`.

        Raises:
            EngineError: `fail` was called.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._finished or self._error or self._closed, timeout_s)
            if self._closed:
                return []
            self.check()
            finished = list(self._finished)
            self._finished.clear()
        return finished

    @property
    def finished(self) -> list[Completion]:
        """Completions that the next `take` will return."""
        with self._changed:
            return list(self._finished)

    def wait_until_idle(self, timeout_s: float) -> bool:
        """Waits until no request runs; False if the timeout passed first.

        Raises:
            EngineError: `fail` or `close` was called.
        """
        with self._changed:
            idle = self._changed.wait_for(lambda: not self._running or self._error or self._closed, timeout_s)
            self.check()
        return bool(idle)

    def fail(self, error: BaseException) -> None:
        """Records the engine's error and raises it in all waiting threads; only the first is kept."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def close(self) -> None:
        """Unblocks all waiters."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def check(self) -> None:
        """Raises the recorded failure.

        Raises:
            EngineError: `fail` or `close` was called.
        """
        if self._error is not None:
            why = str(self._error) or type(self._error).__name__
            raise EngineError(f"{self.name} broke and was stopped: {why}") from self._error
        if self._closed:
            raise EngineError(f"{self.name} was closed")

    def pause(self, seconds: float) -> None:
        """Subtracts seconds in which running requests were paused from `busy_s`."""
        with self._changed:
            if self._running:
                self._busy_s -= seconds
                now = time.monotonic()
                self._draw(now - seconds)
                self._too_much_s += max(0.0, self._drawn_until - (now - seconds))
                self._drawn_until = now

    def _draw(self, until: float, is_empty: bool = False) -> None:
        """Records the time since the last call as spent generating, of which a pause takes back what was too much."""
        if self.lane is None or not (self._running or is_empty) or until <= self._drawn_until:
            return
        seconds = until - self._drawn_until
        back = min(seconds, self._too_much_s)
        self._too_much_s -= back
        num_tokens, self._drawn_tokens = self.num_tokens - self._drawn_tokens, self.num_tokens
        done = dict(version=self.version, slots=len(self._running), tokens=num_tokens)
        self.lane.add("decode", self._drawn_until, seconds - back, self.version, **done)
        self._drawn_until = until

    @property
    def num_running(self) -> int:
        """Number of running requests."""
        return len(self._running)

    @property
    def busy_s(self) -> float:
        """Seconds in which at least one request was running."""
        with self._changed:
            return self._busy_s + (time.monotonic() - self._busy_since if self._running else 0.0)
