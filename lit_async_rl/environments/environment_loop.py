"""The event loop of an environment, and the tasks that engines run in it.

Environments hold what is bound to an event loop: semaphores, HTTP sessions. All engines around one environment (in
training, in each validation, after a restart) therefore share a loop. Its thread runs only while one of them is open.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
import weakref
from collections.abc import Callable, Coroutine, Hashable, Iterable
from typing import Any

END_S = 6.0  # for cancelled tasks to clean up; with `STOP_S` less than the time a failed engine has to close
STOP_S = 3.0
log = logging.getLogger(__name__)


class EnvironmentLoop:
    """Event loop for all engines around one environment. Thread-safe."""

    def __init__(self) -> None:
        self._lock, self._num_users = threading.Lock(), 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._is_ended = False

    def enter(self) -> asyncio.AbstractEventLoop:
        """The loop, running until each `enter` has been followed by a `leave`."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                weakref.finalize(self, _end_rest, self._loop)  # at the end of the process at the latest
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop.run_forever, name="environments", daemon=True)
                self._thread.start()
            self._num_users += 1
            self._is_ended = False
            return self._loop

    def end(self, close: Callable[[], Coroutine[Any, Any, None]], timeout_s: float = END_S) -> None:
        """Runs `close()` of the environment in the loop; the second of two calls without an `enter` between does not.

        Waits at most `timeout_s`.
        """
        with self._lock:
            if self._is_ended:
                return
        loop = self.enter()
        try:
            ended = asyncio.run_coroutine_threadsafe(close(), loop)
            if concurrent.futures.wait([ended], timeout_s).not_done:
                ended.cancel()
                log.warning("an environment's close did not return within %g s", timeout_s)
        finally:
            self.leave()
            self._is_ended = True

    def leave(self) -> None:
        """Ends the thread after the last user; the loop is kept for the next one, unless something blocks it."""
        with self._lock:
            self._num_users -= 1
            if self._num_users or self._loop is None or self._thread is None:
                return
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(STOP_S)
            if self._thread.is_alive():
                self._loop = None
            self._thread = None


def _end_rest(loop: asyncio.AbstractEventLoop) -> None:
    """Cancels what an environment itself still runs in a loop that no engine can enter any more."""
    if loop.is_running():  # an engine was never closed
        return
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks and asyncio._get_running_loop() is None:  # else they end without cleaning up
        loop.run_until_complete(asyncio.wait(tasks, timeout=END_S))


class EnvironmentTasks:
    """Tasks of one engine in the loop of its environment. Thread-safe.

    Args:
        shared: the loop, entered by the first task and left by `close`.
    """

    def __init__(self, shared: EnvironmentLoop) -> None:
        self.shared = shared
        self._lock, self._is_closed = threading.Lock(), False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending: concurrent.futures.Future[None] | None = None
        self._owners: dict[asyncio.Task[Any], Hashable] = {}  # only for the loop's thread
        self._last: set[asyncio.Task[Any]] = set()  # of `finish`; only for the loop's thread
        self._num_last = 0

    def begin(
        self, owner: Hashable, coroutine: Coroutine[Any, Any, Any], after: Callable[[], None] = lambda: None
    ) -> None:
        """Starts a task; ignored after `close`. The loop calls `after` when it has ended, also if it never began."""
        with self._lock:
            if self._is_closed:
                coroutine.close()
                return
            self._loop = self._loop or self.shared.enter()
            self._loop.call_soon_threadsafe(self._start, owner, coroutine, after)

    def _start(self, owner: Hashable, coroutine: Coroutine[Any, Any, Any], after: Callable[[], None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._owners[task] = owner
        task.add_done_callback(self._owners.pop)
        task.add_done_callback(lambda _: after())

    def finish(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Starts a task that `cancel` and `close` leave alone: `close` waits for it. Needs an earlier `begin`."""
        with self._lock:
            if self._loop is None:  # closed, and left
                coroutine.close()
                return
            self._num_last += 1
            self._loop.call_soon_threadsafe(self._finish, coroutine)

    def _finish(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._last.add(task)
        task.add_done_callback(self._has_finished)

    def _has_finished(self, task: asyncio.Task[Any]) -> None:
        self._last.discard(task)
        with self._lock:
            self._num_last -= 1

    def cancel(self, owners: Iterable[Hashable]) -> None:
        """Cancels the tasks of these owners, without waiting for them."""
        with self._lock:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._cancel, set(owners))

    def _cancel(self, owners: set[Hashable]) -> None:
        for task, owner in self._owners.items():
            if owner in owners:
                task.cancel()

    def begin_close(self) -> None:
        """Cancels all tasks, without waiting for them; none can be begun any more."""
        with self._lock:
            self._is_closed = True
            if self._loop is not None and self._ending is None:
                self._ending = asyncio.run_coroutine_threadsafe(self._end_all(), self._loop)

    def close(self) -> None:
        """Cancels all tasks and waits until they and those of `finish` have ended, at most `END_S`.

        Safe to call twice.
        """
        self.begin_close()
        if self._ending is not None:
            concurrent.futures.wait([self._ending], END_S)
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is None:
            return
        if self._num_last:
            log.warning("%d episodes of an environment were not closed within %g s", self._num_last, END_S)
        self.shared.leave()

    async def _end_all(self) -> None:
        tasks = list(self._owners)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while self._num_last:
            await asyncio.sleep(0.01)
