"""The event loop of an environment or agent, and the tasks that engines run in it.

They have objects bound to an event loop: semaphores, HTTP sessions. All engines around one environment (in training, in
each validation, after a restart) therefore share a loop. Its thread runs only while one of them is open.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
import weakref
from collections.abc import Callable, Coroutine, Hashable, Iterable
from typing import Any

from lit_async_rl.runtime.guarded_calls import run_loop
from lit_async_rl.runtime.waiting import use_awake_clock

# limits for cancelled tasks and for the thread; together less than the time that a failed engine has to close
CLEANUP_TIMEOUT_S = 6.0
THREAD_JOIN_TIMEOUT_S = 3.0
NAME = "environments"  # of the thread
log = logging.getLogger(__name__)


class EnvironmentLoop:
    """Event loop for all engines around one environment. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # engines of several threads enter and leave: one must not stop the others' loop
        self._num_users = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stopped: asyncio.Future[None] | None = None
        self._is_ended = False

    def enter(self) -> asyncio.AbstractEventLoop:
        """Returns the loop, which runs until every `enter` is followed by a `leave`."""
        with self._lock:
            if self._loop is None:
                self._loop = use_awake_clock(asyncio.new_event_loop())
                weakref.finalize(self, _cancel_remaining_tasks, self._loop)  # also at the end of the process
            if self._thread is None:
                self._stopped = self._loop.create_future()
                self._thread = threading.Thread(target=run_loop, args=(self._stopped,), name=NAME, daemon=True)
                self._thread.start()
            self._num_users += 1
            self._is_ended = False
            return self._loop

    def end(self, close: Callable[[], Coroutine[Any, Any, None]], timeout_s: float = CLEANUP_TIMEOUT_S) -> None:
        """Runs `close()` of the environment in the loop, once after each use; waits at most `timeout_s`."""
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
        """Ends the thread after the last user; keeps the loop for the next one, unless a call blocks it."""
        with self._lock:
            self._num_users -= 1
            if self._num_users or self._loop is None or self._thread is None or self._stopped is None:
                return
            self._loop.call_soon_threadsafe(self._stopped.set_result, None)
            self._thread.join(THREAD_JOIN_TIMEOUT_S)
            if self._thread.is_alive():
                self._loop = None
            self._thread = None


def _cancel_remaining_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Cancels tasks that an environment started itself, in a loop that no engine can enter any more."""
    if loop.is_running():  # an engine was never closed
        return
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks and asyncio._get_running_loop() is None:  # inside of another loop they end without cleanup
        loop.run_until_complete(asyncio.wait(tasks, timeout=CLEANUP_TIMEOUT_S))


class EnvironmentTasks:
    """Tasks of one engine in the loop of its environment. Thread-safe.

    Args:
        shared: the loop, entered by the first task and left by `close`.
    """

    def __init__(self, shared: EnvironmentLoop) -> None:
        self.shared = shared
        self._lock = threading.Lock()  # held to enter the loop and to schedule, so that no task starts after `close`
        self._is_closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending: concurrent.futures.Future[None] | None = None
        self._owners: dict[asyncio.Task[Any], Hashable] = {}  # used by the loop's thread only
        self._final_tasks: set[asyncio.Task[Any]] = set()  # of `finish`; used by the loop's thread only
        self._num_final_tasks = 0

    def begin(
        self, owner: Hashable, coroutine: Coroutine[Any, Any, Any], after: Callable[[], None] = lambda: None
    ) -> None:
        """Starts a task; does nothing after `close`. The loop calls `after` at its end, even if it never started."""
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
        """Starts a task that is not cancelled, and that `close` waits for. Needs an earlier `begin`."""
        with self._lock:
            if self._loop is None:  # after `close` the loop may have stopped
                coroutine.close()
                return
            self._num_final_tasks += 1
            self._loop.call_soon_threadsafe(self._finish, coroutine)

    def _finish(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._final_tasks.add(task)
        task.add_done_callback(self._has_finished)

    def _has_finished(self, task: asyncio.Task[Any]) -> None:
        self._final_tasks.discard(task)
        with self._lock:
            self._num_final_tasks -= 1

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
        """Cancels all tasks, without waiting for them; later tasks are not started."""
        with self._lock:
            self._is_closed = True
            if self._loop is not None and self._ending is None:
                self._ending = asyncio.run_coroutine_threadsafe(self._end_all(), self._loop)

    def close(self) -> None:
        """Cancels all tasks, and waits for them and those of `finish`, at most `CLEANUP_TIMEOUT_S`.

        Safe to call twice.
        """
        self.begin_close()
        if self._ending is not None:
            concurrent.futures.wait([self._ending], CLEANUP_TIMEOUT_S)
        with self._lock:
            loop = self._loop
            self._loop = None
        if loop is None:
            return
        if self._num_final_tasks:
            log.warning(
                "%d episodes of an environment were not closed within %g s", self._num_final_tasks, CLEANUP_TIMEOUT_S
            )
        self.shared.leave()

    async def _end_all(self) -> None:
        tasks = list(self._owners)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while self._num_final_tasks:
            await asyncio.sleep(0.01)
