"""Waits with a limit: the clock that they share, the wait itself, a fair lock, and notices about long waits.

A wait ends with what it awaits, with a `StalledError` whose message names the other side and the setting of the limit,
or with an error as soon as the other side is known to have ended:

    wait = Wait(limit_s, f"no answer within data.engine.update_timeout_s={limit_s:g}", check=raise_if_it_ended)
    wait.until(answered.wait)

Waits of another kind say so in their place: the heartbeats of ranks (`distributed/liveness.py`), connections to
processes that are killed in the end (`runtime/process.py`), joins of threads that may be left behind (`close`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import TypeVar

from lit_async_rl.errors import StalledError
from lit_async_rl.runtime.threads import start_thread

T = TypeVar("T")
log = logging.getLogger(__name__)

# -- Clock that excludes time in which the process was stopped, so that nobody counts as hung for it ------------------


CLOCK_INTERVAL_S = 0.25
MAX_GAP_S = 3.0  # ours: longer than a call that keeps the interpreter, or a crowded machine, stops a thread


class AwakeClock:
    """Monotonic clock without the time in which this process did not run (SIGSTOP, Ctrl-Z, suspend).

    A thread reads the time every `CLOCK_INTERVAL_S`, as does every caller. A gap of more than `MAX_GAP_S` between two
    readings counts as a stop and is logged.

    Attributes:
        watchers: called by the thread after each of its readings; they neither wait nor raise.
    """

    def __init__(self) -> None:
        self.watchers: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._seen = time.monotonic()
        self._lost_s = 0.0
        self._is_started = False

    def now(self) -> float:
        """Seconds since an arbitrary origin."""
        with self._lock:
            if not self._is_started:  # by the first reading: nothing needs the clock of a process that only imports it
                self._is_started = True
                self._seen = time.monotonic()
                start_thread(self._tick, name="clock")
            now = time.monotonic()
            gap = now - self._seen
            self._seen = now
            if gap > MAX_GAP_S:
                self._lost_s += gap
                log.warning(
                    "this process did not run for %.1f s (was it stopped?); this time does not count towards timeouts",
                    gap,
                )
            return now - self._lost_s

    def _tick(self) -> None:
        while True:
            time.sleep(CLOCK_INTERVAL_S)
            self.now()
            for look in list(self.watchers):
                look()


clock = AwakeClock()  # of the process; its thread lives as long
os.register_at_fork(after_in_child=clock.__init__)  # type: ignore[misc]  # a child has no thread, and maybe a held lock


def use_awake_clock(loop: asyncio.AbstractEventLoop) -> asyncio.AbstractEventLoop:
    """Makes all timers of an event loop follow `clock`: `sleep`, `wait_for`, client timeouts. Returns the loop."""
    loop.time = clock.now  # type: ignore[method-assign]  # read by the loop itself, too
    return loop


# -- A wait with a limit ----------------------------------------------------------------------------------------------


POLL_INTERVAL_S = 0.5  # delay until a wait without a wake-up notices progress, or the end of the other side


class Wait:
    """A wait for another thread or process, in one stage or several that share the limit. It begins when it is made.

    Args:
        limit_s: longest time without progress.
        message: of the error, or a function that makes it then: the other side, and the setting of the limit.
        progress: a counter; a change of its value restarts the limit.
        check: called every `POLL_INTERVAL_S`; raises when the awaited event can no longer come.
    """

    def __init__(
        self,
        limit_s: float,
        message: str | Callable[[], str],
        progress: Callable[[], object] = lambda: None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.limit_s = limit_s
        self._message = message
        self._progress = progress
        self._check = check
        self._last_progress: object = None
        self.restart()

    def restart(self) -> None:
        """Restarts the time limit."""
        self._began = clock.now()

    @property
    def waited_s(self) -> float:
        """Seconds without progress."""
        if self._last_progress != (progress := self._progress()):
            self._last_progress = progress
            self.restart()
        return clock.now() - self._began

    def raise_if_over(self) -> None:
        """Ends the wait after its limit.

        Raises:
            StalledError: there was no progress for `limit_s`.
        """
        if self.waited_s >= self.limit_s:
            raise StalledError(self._message if isinstance(self._message, str) else self._message())

    def until(self, attempt: Callable[[float], T]) -> T:
        """The first true result of `attempt(seconds)`, which waits for at most so many seconds.

        Raises:
            StalledError: there was no progress for `limit_s`. Errors of `check` and `attempt` pass as they are.
        """
        # In short turns: a process that ended wakes nobody, and one that was stopped must not have used its limit up.
        while not (found := attempt(max(0.0, min(POLL_INTERVAL_S, self._began + self.limit_s - clock.now())))):
            self._check()
            self.raise_if_over()
        return found

    def get(self, queue: SimpleQueue[T]) -> T:
        """The next item of a queue; raises as `until` does."""

        def attempt(seconds: float) -> list[T]:
            try:
                return [queue.get(timeout=seconds)]
            except Empty:
                return []

        return self.until(attempt)[0]


# -- A fair mutex -----------------------------------------------------------------------------------------------------


class FairLock:
    """Fair mutex: a waiting thread acquires before the next turn of a loop, which would starve it with a plain lock.

    Args:
        timeout_s: of `hold`.
        what: awaited object and the setting that bounds the wait, for messages.
    """

    def __init__(self, timeout_s: float = 600.0, what: str = "a lock") -> None:
        self.timeout_s = timeout_s
        self.what = what
        self._lock = threading.Lock()
        self._next = threading.Lock()

    @contextmanager
    def hold(self, timeout_s: float | None = None) -> Iterator[None]:
        """Context that holds the lock; waits for at most one turn of the loop.

        Raises:
            StalledError: the lock was not acquired within `timeout_s`, by default that of the constructor.
        """
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        wait = Wait(limit_s, f"waited {limit_s:g} s for {self.what}")
        # Only the owner of `_next` waits for the lock; the loop can but queue behind it.
        wait.until(lambda seconds: self._next.acquire(timeout=seconds))
        try:
            wait.until(lambda seconds: self._lock.acquire(timeout=seconds))
        finally:
            self._next.release()
        try:
            yield
        finally:
            self._lock.release()


# -- Notices about long waits: one after three seconds, and then ever more rarely -------------------------------------


class Repeating:
    """Calls a function over and over in a daemon thread, until `stop`.

    Args:
        function: its error ends the thread and goes to `threading.excepthook`.
        every_s: seconds from the end of a call to the next.
        name: of the thread.
    """

    def __init__(self, function: Callable[[], object], every_s: float, name: str) -> None:
        self._function = function
        self._every_s = every_s
        self._stopped = threading.Event()
        start_thread(self._run, name=name)

    def _run(self) -> None:
        while not self._stopped.wait(self._every_s):
            self._function()

    def stop(self) -> None:
        """Begins no further call, without waiting for a running one."""
        self._stopped.set()


FIRST_NOTICE_S = 3.0  # after 3 s, 12 s, 48 s, 3 minutes, then every ten minutes
NOTICE_FACTOR = 4.0
MAX_NOTICE_INTERVAL_S = 600.0


@contextmanager
def announced(what: str | Callable[[], str]) -> Iterator[None]:
    """Context that reports a long wait on stderr, in one process per machine.

    Args:
        what: completes "waiting for ..."; a function is called for each notice.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        yield
        return
    is_over = threading.Event()
    began = time.monotonic()
    start_thread(_announce, what, is_over, began, name="notices")
    try:
        yield
    finally:
        is_over.set()


def _announce(what: str | Callable[[], str], is_over: threading.Event, began: float) -> None:
    pause_s = FIRST_NOTICE_S
    while not is_over.wait(max(0.0, began + pause_s - time.monotonic())):
        text = what if isinstance(what, str) else what()
        seconds = time.monotonic() - began
        if not is_over.is_set():
            print(f"waiting for {text} ({duration(seconds)} so far)", file=sys.stderr, flush=True)
        pause_s = seconds + min(MAX_NOTICE_INTERVAL_S, (NOTICE_FACTOR - 1) * seconds)


def duration(seconds: float) -> str:
    """`3 s`, `2:05` (minutes) or `1:02:05`."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
