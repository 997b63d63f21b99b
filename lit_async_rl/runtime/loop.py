"""Event loops in threads: calls from other threads, tasks by owner, and a watchdog for code that blocks a loop.

| class | its loop | ends with |
|---|---|---|
| `LoopThread` | one, in one thread | `close` |
| `ReplaceableLoop` | made by the first call, and anew if a call blocks it | `close` |
| `SharedLoop` | one for several users: objects bound to it outlive each of them | the last user: the thread only |

| who | waits for | woken by |
|---|---|---|
| a loop's thread | sockets, timers, calls of other threads | the operating system |
| `call` | the result, at most its limit | the loop's thread, also at `close` |
| `close` | cancelled tasks, and then the thread, each at most `JOIN_S` or `CLEANUP_TIMEOUT_S` | the loop's thread |
| the watchdog, in the thread of `clock` | nothing | |
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import sys
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Iterable, Iterator
from typing import Any, TypeVar

from lit_async_rl.errors import EngineError, StalledError
from lit_async_rl.runtime.threads import ThreadPool, start_thread
from lit_async_rl.runtime.waiting import CLOCK_INTERVAL_S, Wait, clock, use_awake_clock
from lit_async_rl.utils.user_code import running_line

JOIN_S = 10.0
# limits for cancelled tasks and for the thread; together less than the time that a failed engine has to close
CLEANUP_TIMEOUT_S = 6.0
THREAD_JOIN_TIMEOUT_S = 3.0
ANSWER_S = 1.0  # time limit for an empty coroutine; a loop that exceeds it is replaced
MAX_THREADS = min(32, (os.cpu_count() or 1) + 4)  # of `asyncio.to_thread` in a loop, as in asyncio itself
BLOCKED_S = 5.0  # after which the log names who blocks a loop
T = TypeVar("T")
log = logging.getLogger(__name__)


# -- Watchdog ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def watched(loop: asyncio.AbstractEventLoop, runs: str) -> Iterator[None]:
    """Context in the thread of a loop: the log names `runs`, and its line, when a call blocks the loop.

    Args:
        loop: loop of this thread, whose tasks are the user's code.
        runs: kind and name of that code; empty for no watchdog.
    """
    if not runs:
        yield
        return
    watchdog = _Watchdog(loop, runs)
    clock.watchers.append(watchdog.look)
    try:
        yield
    finally:
        clock.watchers.remove(watchdog.look)


class _Watchdog:
    """Counts how often in a row the loop has run no callback between two looks of the clock's thread.

    It counts looks, not seconds, because a busy machine that runs neither thread blocks no loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, runs: str) -> None:
        self._loop = loop
        self._runs = runs
        self._thread_id = threading.get_ident()
        self._has_answered = True
        self._num_silent = 0

    def look(self) -> None:
        """Logs who blocks the loop, once each time; called every `CLOCK_INTERVAL_S`."""
        if self._has_answered:
            self._num_silent = 0
            self._has_answered = False
            with contextlib.suppress(RuntimeError):  # just closed
                self._loop.call_soon_threadsafe(self._answer)
            return
        self._num_silent += 1
        if self._num_silent == round(BLOCKED_S / CLOCK_INTERVAL_S):
            log.warning(
                "%s has blocked its event loop for %g s: meanwhile, nothing else in this loop runs, and time limits "
                "have no effect. Use await, or asyncio.to_thread for calls that cannot be awaited\n%s",
                self._runs,
                BLOCKED_S,
                running_line(sys._current_frames().get(self._thread_id)),
            )

    def _answer(self) -> None:
        self._has_answered = True


# -- One loop in one thread -------------------------------------------------------------------------------------------


def _prepared(loop: asyncio.AbstractEventLoop, name: str) -> asyncio.AbstractEventLoop:
    """Has a loop's timers follow `clock`, and no call of `asyncio.to_thread` keep the process from ending."""
    loop.set_default_executor(ThreadPool(MAX_THREADS, name=f"{name}-call"))
    return use_awake_clock(loop)


def run_once(awaitable: Awaitable[T]) -> T:
    """Result of an awaitable, run in a separate event loop in this thread."""

    async def awake() -> T:
        _prepared(asyncio.get_running_loop(), "once")
        return await awaitable

    return asyncio.run(awake())


def _run(stopped: asyncio.Future[None], runs: str) -> None:
    """Runs the event loop of `stopped` until that is set: the body of a thread.

    `SystemExit` and `KeyboardInterrupt` of a task, which asyncio lets through, end only that task: without the loop, no
    other task and no time limit would ever end. Nor does `loop.stop` end it.
    """
    loop = stopped.get_loop()
    with watched(loop, runs):
        while not stopped.done() and not loop.is_closed():
            try:
                loop.run_until_complete(stopped)
            except (SystemExit, KeyboardInterrupt, RuntimeError) as error:
                name = threading.current_thread().name
                log.warning("the event loop of thread %r keeps running after %s: %s", name, type(error).__name__, error)


class LoopThread:
    """Daemon thread that runs an event loop until `close`.

    Args:
        name: of the thread, also for messages.
        runs: see `watched`.
    """

    def __init__(self, name: str, runs: str = "") -> None:
        self.name = name
        self._runs = runs
        self._loop = _prepared(asyncio.new_event_loop(), name)
        self._has_ended = threading.Event()  # no new task starts
        self._is_closed = False
        self.resume()

    def resume(self) -> None:
        """Starts the thread, at first and after `pause`."""
        self._stopped = self._loop.create_future()
        self._thread = start_thread(_run, self._stopped, self._runs, name=self.name)

    def pause(self, timeout_s: float) -> bool:
        """Ends the thread and keeps the loop with its tasks; False if a call has blocked it for `timeout_s`."""
        self._loop.call_soon_threadsafe(self._stopped.set_result, None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def call(
        self,
        coroutine: Coroutine[Any, Any, T],
        timeout_s: float,
        what: str,
        setting: str = "",
        check: Callable[[], None] = lambda: None,
    ) -> T:
        """Runs `coroutine` in the loop; returns its result or raises its error, and cancels it after `timeout_s`.

        Messages name the call, `what`, and the limit's `setting`. For `check` see `Wait`.

        Raises:
            StalledError: `what` did not finish within `timeout_s`.
            EngineError: `close` was called meanwhile.
        """
        if (future := self.begin(coroutine)) is None:
            raise EngineError(f"{self.name} was closed before {what}")

        def check_all() -> None:
            check()
            self._check_open(what)

        limit = f"{setting}={timeout_s:g}" if setting else f"{timeout_s:g} s"
        wait = Wait(timeout_s, f"{what} did not end within {limit}", check=check_all)
        try:
            wait.until(lambda seconds: concurrent.futures.wait([future], seconds).done)
        except StalledError:
            future.cancel()
            raise
        self._check_open(what)
        return future.result()

    def _check_open(self, what: str) -> None:
        if self._has_ended.is_set():  # which cancels all running tasks
            raise EngineError(f"{self.name} was closed during {what}")

    def answers(self, timeout_s: float) -> bool:
        """Whether the loop runs a coroutine within `timeout_s`: then no task blocks it."""
        future = self.begin(asyncio.sleep(0))
        return future is not None and bool(concurrent.futures.wait([future], timeout_s).done)

    def begin(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T] | None:
        """Starts `coroutine` in the loop; returns its future, or None after `close`."""
        if not self._has_ended.is_set():
            with contextlib.suppress(RuntimeError):  # just closed
                return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        coroutine.close()
        return None

    def soon(self, callback: Callable[..., Any], *args: Any) -> None:
        """Schedules `callback` in the loop's thread; ignored after `close`."""
        if not self._has_ended.is_set():
            with contextlib.suppress(RuntimeError):  # closed meanwhile
                self._loop.call_soon_threadsafe(callback, *args)

    def end_tasks(self, timeout_s: float = JOIN_S, last: Coroutine[Any, Any, Any] | None = None) -> None:
        """Cancels all tasks and then runs `last`; later calls are ignored, the loop runs until `close`."""
        self._has_ended.set()
        future = asyncio.run_coroutine_threadsafe(_end_all(last), self._loop)
        concurrent.futures.wait([future], timeout_s)

    def close(self, last: Coroutine[Any, Any, Any] | None = None, timeout_s: float = JOIN_S) -> None:
        """Cancels all tasks, runs `last`, and joins the thread, each within `timeout_s`. Safe to call twice."""
        if self._is_closed:
            if last is not None:
                last.close()
            return
        self._is_closed = True
        self.end_tasks(timeout_s, last)
        if self.pause(timeout_s):
            self._loop.close()  # its sockets, and its threads for host name look-ups

    def end_left_tasks(self) -> None:
        """Cancels tasks that user code has left in a paused loop that nobody can resume."""
        if self._loop.is_running():  # somebody never left it
            return
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        if tasks and asyncio._get_running_loop() is None:  # inside of another loop they end without cleanup
            self._loop.run_until_complete(asyncio.wait(tasks, timeout=CLEANUP_TIMEOUT_S))


async def _end_all(last: Coroutine[Any, Any, Any] | None) -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    if last is not None:
        await last


# -- A loop whose calls may block it ----------------------------------------------------------------------------------


class ReplaceableLoop:
    """Event loop that starts with its first use, and is replaced once a call blocks it. Thread-safe.

    Args:
        name: of the threads.
        runs: see `watched`.
    """

    def __init__(self, name: str, runs: str) -> None:
        self._name = name
        self.runs = runs
        self._lock = threading.Lock()  # guards the next two: several threads may start or replace the loop
        self._loop: LoopThread | None = None
        self._blocked: list[LoopThread] = []

    @property
    def num_blocked(self) -> int:
        """Replaced loops; each is a thread that cannot be ended."""
        return len(self._blocked)

    def get(self) -> LoopThread:
        """The loop for new calls."""
        with self._lock:
            if self._loop is None:
                self._loop = LoopThread(self._name, self.runs)
            return self._loop

    def replace_if_blocked(self, loop: LoopThread) -> bool:
        """Moves new calls to another loop if this one does not answer; False if it does, or was replaced before."""
        if loop is not self._loop or loop.answers(ANSWER_S):
            return False
        with self._lock:
            if loop is not self._loop:
                return False
            self._loop = None
            self._blocked.append(loop)
            return True

    def call(self, coroutine: Coroutine[Any, Any, T], timeout_s: float, what: str) -> T:
        """See `LoopThread.call`; a loop that is blocked after the time limit is replaced."""
        loop = self.get()
        try:
            return loop.call(coroutine, timeout_s, what)
        except StalledError:
            self.replace_if_blocked(loop)
            raise

    def close(self) -> None:
        """Cancels all tasks and ends the threads, but for those of loops that are still blocked."""
        with self._lock:
            loops = [*self._blocked, *([] if self._loop is None else [self._loop])]
            self._loop = None
        for loop in loops:
            if loop.answers(ANSWER_S):
                loop.close()


# -- A loop for several users, and the tasks of each ------------------------------------------------------------------


class SharedLoop:
    """Event loop for several users, whose thread runs only while it has one. Thread-safe.

    Environments and agents have objects bound to an event loop, such as semaphores and HTTP sessions. All engines
    around one environment (in training, in each validation, after a restart) therefore share a loop.

    Args:
        name: of the thread.
        runs: see `watched`.
    """

    def __init__(self, name: str, runs: str) -> None:
        self._name = name
        self.runs = runs
        self._lock = threading.Lock()  # users of several threads enter and leave: one must not stop the others' loop
        self._num_users = 0
        self._loop: LoopThread | None = None
        self._is_ended = False

    def enter(self) -> LoopThread:
        """Returns the loop, which runs until every `enter` is followed by a `leave`."""
        with self._lock:
            if self._loop is None:
                self._loop = LoopThread(self._name, self.runs)
                weakref.finalize(self, self._loop.end_left_tasks)  # also at the end of the process
            elif not self._num_users:
                self._loop.resume()
            self._num_users += 1
            self._is_ended = False
            return self._loop

    def leave(self) -> None:
        """Ends the thread after the last user; keeps the loop for the next one, unless a call blocks it."""
        with self._lock:
            self._num_users -= 1
            if not self._num_users and self._loop is not None and not self._loop.pause(THREAD_JOIN_TIMEOUT_S):
                self._loop = None

    def end(self, close: Callable[[], Coroutine[Any, Any, None]], timeout_s: float = CLEANUP_TIMEOUT_S) -> None:
        """Runs `close()` in the loop, once after each use; waits at most `timeout_s`."""
        with self._lock:
            if self._is_ended:
                return
        ended = self.enter().begin(close())
        try:
            if ended is not None and concurrent.futures.wait([ended], timeout_s).not_done:
                ended.cancel()
                log.warning("%s: close did not return within %g s", self.runs, timeout_s)
        finally:
            self.leave()
            self._is_ended = True


class LoopTasks:
    """Tasks of one user in a shared loop, by owner. Thread-safe.

    Args:
        shared: the loop, entered by the first task and left by `close`.
    """

    def __init__(self, shared: SharedLoop) -> None:
        self.shared = shared
        self._lock = threading.Lock()  # held to enter the loop and to schedule, so that no task starts after `close`
        self._is_closed = False
        self._loop: LoopThread | None = None
        self._ending: concurrent.futures.Future[None] | None = None
        self._owners: dict[asyncio.Task[Any], Hashable] = {}  # used by the loop's thread only
        self._finals: set[concurrent.futures.Future[Any]] = set()  # of `finish`

    def begin(
        self, owner: Hashable, coroutine: Coroutine[Any, Any, Any], after: Callable[[], None] = lambda: None
    ) -> None:
        """Starts a task, except after `close`. The loop calls `after` at its end, even if it never started."""
        with self._lock:
            if self._is_closed:
                coroutine.close()
                return
            self._loop = self._loop or self.shared.enter()
            self._loop.soon(self._start, owner, coroutine, after)

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
            elif (final := self._loop.begin(coroutine)) is not None:
                self._finals.add(final)
                final.add_done_callback(self._finals.discard)

    def cancel(self, owners: Iterable[Hashable]) -> None:
        """Cancels the tasks of these owners, without waiting for them."""
        with self._lock:
            if self._loop is not None:
                self._loop.soon(self._cancel, set(owners))

    def _cancel(self, owners: set[Hashable]) -> None:
        for task, owner in self._owners.items():
            if owner in owners:
                task.cancel()

    def begin_close(self) -> None:
        """Cancels all tasks, without waiting for them; later tasks are not started."""
        with self._lock:
            self._is_closed = True
            if self._loop is not None and self._ending is None:
                self._ending = self._loop.begin(self._end_all())

    def close(self) -> None:
        """Cancels all tasks; waits for them and those of `finish`, at most `CLEANUP_TIMEOUT_S`; safe to call twice."""
        self.begin_close()
        if self._ending is not None:
            concurrent.futures.wait([self._ending], CLEANUP_TIMEOUT_S)
        with self._lock:
            loop = self._loop
            self._loop = None
        if loop is None:
            return
        if num_left := len(self._finals):
            log.warning(
                "%s: %d episodes did not close their resources within %g s",
                self.shared.runs,
                num_left,
                CLEANUP_TIMEOUT_S,
            )
        self.shared.leave()

    async def _end_all(self) -> None:
        tasks = list(self._owners)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while self._finals:
            await asyncio.wait([asyncio.wrap_future(final) for final in list(self._finals)])
