"""Threads, none of which keeps the process from ending. Standard library only: workers of vLLM and Ray import it.

At its end Python waits for every thread of a `ThreadPoolExecutor`, those of `asyncio.to_thread` included, daemon or
not: an environment or reward that never returns would keep a finished or failed run from giving back the terminal.
Threads made here are left behind instead.

| | for | ends with |
|---|---|---|
| `start_thread`, `new_thread` | a function that runs once, or owns something until it is told to end | its function |
| `ThreadPool` | calls that may block, and whose callers have time limits | `shutdown`, or a call that returns late |
| `OrderedTasks` | tasks that must be done, in their order, before the process ends | `shutdown` |
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


def new_thread(function: Callable[..., object], *args: Any, name: str) -> threading.Thread:
    """Daemon thread that will call `function(*args)` once started; an error goes to `threading.excepthook`."""
    return threading.Thread(target=function, args=args, name=name, daemon=True)


def start_thread(function: Callable[..., object], *args: Any, name: str) -> threading.Thread:
    """Makes and starts a daemon thread that calls `function(*args)`."""
    thread = new_thread(function, *args, name=name)
    thread.start()
    return thread


class ThreadPool(ThreadPoolExecutor):
    """Executor that leaves its threads behind: neither `shutdown` nor the end of the process waits for a call.

    It may be an event loop's default executor, which must be a `ThreadPoolExecutor`; only the type of that class is
    used.

    Args:
        max_threads: concurrent calls; further ones wait.
        name: of the threads, followed by a number.
    """

    def __init__(self, max_threads: int, name: str) -> None:
        super().__init__(max_threads)
        self._max_threads = max_threads
        self._name = name
        self._changing = threading.Lock()  # guards the next two
        self._num_threads = 0
        self._has_ended = False
        self._num_free = threading.Semaphore(0)  # threads that wait for a call
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Calls `fn(*args, **kwargs)` in a thread.

        Raises:
            RuntimeError: after `shutdown`.
        """
        future = Future[T]()
        with self._changing:
            if self._has_ended:
                raise RuntimeError(f"the threads {self._name!r} have ended")
            self._calls.put((future, partial(fn, *args, **kwargs)))
            if not self._num_free.acquire(blocking=False) and self._num_threads < self._max_threads:
                start_thread(self._work, name=f"{self._name}_{self._num_threads}")
                self._num_threads += 1
        return future

    def _work(self) -> None:
        while (entry := self._calls.get()) is not None:
            _make(*entry)
            del entry  # nothing of a call outlives it here
            self._num_free.release()
        self._calls.put(None)  # for the next thread

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Ends the threads, each after its call, without waiting for them. Safe to call twice.

        Args:
            wait: ignored.
            cancel_futures: cancels calls that have not begun.
        """
        with self._changing:
            self._has_ended = True
            while cancel_futures and (entry := _next(self._calls)) is not None:
                entry[0].cancel()
            self._calls.put(None)


def _make(future: Future[Any], call: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as error:
        future.set_exception(error)
        del future  # no cycle of frame, error and future
    else:
        future.set_result(result)


def _next(calls: queue.SimpleQueue[Any]) -> Any:
    try:
        return calls.get_nowait()
    except queue.Empty:
        return None


class OrderedTasks(ThreadPoolExecutor):
    """One thread that does tasks in their order; the process ends when it has done them."""

    def __init__(self, name: str) -> None:
        super().__init__(max_workers=1, thread_name_prefix=name)
