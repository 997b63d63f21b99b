"""Calls with timeouts: made in a worker thread that is abandoned if the call hangs.

| who | waits for | woken by |
|---|---|---|
| the caller (trainer or producer) | the call's result or next question, at most `Limit.seconds` | the worker |
| a worker | its next call; an item it requested from the caller | the caller, also when it times out |
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

import torch

from lit_async_rl.errors import EngineError, StalledError

SLICE_S = 0.5  # a process that was stopped (SIGSTOP) counts one of these, not the whole time
LOOK_S = 1.0  # longest wait for a value that can be had late

T = TypeVar("T")
_idle: list[_Worker] = []  # workers are kept: starting a thread costs more than most calls
os.register_at_fork(after_in_child=_idle.clear)


@dataclass(frozen=True)
class Limit:
    """Time limit of a call.

    Args:
        seconds: maximum time without progress; each item consumed by the call is progress.
        message: of the error.
        progress: optional counter; a change of its value is also progress.
    """

    seconds: float
    message: str
    progress: Callable[[], object] = lambda: None


class _Worker:
    """Daemon thread that executes calls in order; discarded after one that hangs."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Callable[[], Any], SimpleQueue[Any]]] = SimpleQueue()
        threading.Thread(target=self._run, name="guarded-call", daemon=True).start()

    def begin(self, function: Callable[[], Any], replies: SimpleQueue[Any]) -> None:
        self._calls.put((function, replies))

    def _run(self) -> None:
        while True:
            self._make(*self._calls.get())

    def _make(self, function: Callable[[], Any], replies: SimpleQueue[Any]) -> None:
        reply: _Reply
        try:
            reply = _Reply(function(), None)
        except BaseException as error:
            reply = _Reply(None, error)
        _idle.append(self)
        replies.put(reply)


@dataclass
class _Reply:
    value: Any
    error: BaseException | None


class _Fed(Iterator[T]):
    """Iterator consumed in the worker; items are produced in the caller's thread on request.

    Gathering a shard is a collective, which must run in the trainer's thread, and a shard is valid only until the next
    one.
    """

    def __init__(self, replies: SimpleQueue[Any]) -> None:
        self.items: SimpleQueue[list[Any]] = SimpleQueue()
        self._ready: deque[Any] = deque()
        self._replies = replies
        self._is_over = False

    def __next__(self) -> T:
        if self._is_over:
            raise StopIteration
        if not self._ready:
            self._replies.put(self)
            self._ready.extend(self.items.get())
        item = self._ready.popleft()
        if isinstance(item, BaseException):
            self._is_over = True
            raise item
        return item  # type: ignore[no-any-return]


def call(function: Callable[[], T], limit: Limit) -> T:
    """The result of `function()`, or its error.

    Raises:
        StalledError: it did not return in time; its thread is abandoned.
    """
    replies = _begin(function, SimpleQueue())
    reply: _Reply = _wait(replies, limit)
    return _result(reply)


def feed(
    function: Callable[[Iterator[Any]], T],
    items: Iterable[Any],
    limit: Limit,
    lasts: Callable[[Any], bool] = lambda item: False,
) -> T:
    """The result of `function(items)`, where `items` is iterated in this thread.

    Args:
        function: called in a worker.
        items: what it reads.
        limit: of the time without progress.
        lasts: whether an item stays valid when the next is produced. It is handed over with the next: two threads that
            take turns wait for each other, the longer the busier the machine is.

    Raises:
        StalledError: no progress in time; its thread is abandoned and gets an error as the next item.
    """
    replies: SimpleQueue[Any] = SimpleQueue()
    fed = _Fed[Any](replies)
    source = iter(items)
    _begin(lambda: function(fed), replies)
    try:
        while (reply := _wait(replies, limit)) is fed:
            batch = [_next(source)]
            while not isinstance(batch[-1], Exception) and lasts(batch[-1]):
                batch.append(_next(source))
            fed.items.put(batch)
    finally:
        fed.items.put([EngineError("weights were requested by a call that had timed out")])
    return _result(reply)


def _begin(function: Callable[[], Any], replies: SimpleQueue[Any]) -> SimpleQueue[Any]:
    """Sets grad mode and current device, which are thread-local."""
    grad = torch.is_grad_enabled()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def run() -> Any:
        if device is not None:
            torch.cuda.set_device(device)
        with torch.set_grad_enabled(grad):
            return function()

    try:
        worker = _idle.pop()
    except IndexError:
        worker = _Worker()
    worker.begin(run, replies)
    return replies


def _next(source: Iterator[Any]) -> Any:
    try:
        return next(source)
    except Exception as error:  # `StopIteration`, too; raised where the items are read
        return error


def _wait(replies: SimpleQueue[Any], limit: Limit) -> Any:
    waited = 0.0
    progress = None
    while True:
        began = time.monotonic()
        slice_s = min(SLICE_S, limit.seconds - waited)
        try:
            return replies.get(timeout=max(0.0, slice_s))
        except Empty:
            waited += min(time.monotonic() - began, 2 * SLICE_S)
        if progress != (progress := limit.progress()):
            waited = 0.0
        if waited >= limit.seconds:
            raise StalledError(limit.message)


def _result(reply: _Reply) -> Any:
    if reply.error is None:
        return reply.value
    try:
        raise reply.error
    finally:
        reply.error = None  # no cycle of frames, error and reply: what it holds is freed with the error


class LastKnown(Generic[T]):
    """Value of a function that may hang, polled repeatedly: falls back to its last value.

    Args:
        function: returns the value.
        value: initial value.
    """

    def __init__(self, function: Callable[[], T], value: T) -> None:
        self._function = function
        self._value = value
        self._pending: SimpleQueue[Any] | None = None
        self._asking = threading.Lock()

    def get(self) -> T:
        """The value, or the last one if it takes longer than `LOOK_S`. Raises what the function raises."""
        if not self._asking.acquire(blocking=False):  # another thread does
            return self._value
        try:
            return self._ask()
        finally:
            self._asking.release()

    def _ask(self) -> T:
        is_late = self._pending is not None
        replies = self._pending = self._pending or _begin(self._function, SimpleQueue())
        try:
            reply: _Reply = replies.get(timeout=0.0 if is_late else LOOK_S)
        except Empty:
            return self._value
        self._pending = None
        self._value = _result(reply)
        return self._value


# -- A fair mutex, and a bounded counter with waiting -----------------------------------------------------------------


class FairLock:
    """Fair mutex: a waiting thread acquires before the decode loop's next turn.

    With a plain lock, a loop that releases and re-acquires it starves the waiting threads.

    Args:
        timeout_s: timeout of `hold`.
        what: what is waited for and the setting that bounds it, for messages.
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
            self._closed = True
            self._error = self._error or error
            self._changed.notify_all()

    @contextmanager
    def closed_by_errors(self) -> Iterator[None]:
        """Context in which an exception closes the counter with it."""
        try:
            yield
        except BaseException as error:
            self.close(error)
            raise


# -- Clock that excludes time in which the process was stopped, so that a stopped process does not count as hung ------


BEAT_S = 0.25
STILL_S = 3.0  # ours: longer than an interpreter busy with one call, or a crowded machine, keeps a thread from running
log = logging.getLogger(__name__)


class AwakeClock:
    """Monotonic clock without the time in which this process did not run (SIGSTOP, Ctrl-Z, suspend).

    A thread reads the time every `BEAT_S`, as does every caller. A gap of more than `STILL_S` between two readings
    counts as a stop and is logged.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen = time.monotonic()
        self._lost_s = 0.0
        self._closed = threading.Event()
        threading.Thread(target=self._beat, name="clock", daemon=True).start()

    def now(self) -> float:
        """Seconds since an arbitrary origin."""
        with self._lock:
            now = time.monotonic()
            gap = now - self._seen
            self._seen = now
            if gap > STILL_S and not self._closed.is_set():
                self._lost_s += gap
                log.warning("this process stood still for %.1f s (was it stopped?); no timeout counts them", gap)
            return now - self._lost_s

    def close(self) -> None:
        """Ends the thread; the clock then counts all time."""
        self._closed.set()

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_S):
            self.now()


# -- Notices about long waits: one after three seconds, and then ever more rarely -------------------------------------


FIRST_S = 3.0  # after 3 s, 12 s, 48 s, 3 minutes, then every ten minutes
FACTOR = 4.0
LONGEST_S = 600.0


@contextmanager
def announced(what: str | Callable[[], str]) -> Iterator[None]:
    """Context of a wait that is said on stderr while it takes long, by one process of each machine.

    Args:
        what: completes "waiting for ..."; a function is called for each notice.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        yield
        return
    is_over = threading.Event()
    began = time.monotonic()
    thread = threading.Thread(target=_announce, args=(what, is_over, began), name="patience", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()


def _announce(what: str | Callable[[], str], is_over: threading.Event, began: float) -> None:
    pause_s = FIRST_S
    while not is_over.wait(max(0.0, began + pause_s - time.monotonic())):
        text = what if isinstance(what, str) else what()
        seconds = time.monotonic() - began
        if not is_over.is_set():
            print(f"waiting for {text} ({duration(seconds)} so far)", file=sys.stderr, flush=True)
        pause_s = seconds + min(LONGEST_S, (FACTOR - 1) * seconds)


def duration(seconds: float) -> str:
    """`3 s`, `2:05` (minutes) or `1:02:05`."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


# -- An asyncio event loop in its own thread, with thread-safe calls --------------------------------------------------


JOIN_S = 10.0
EVENT_LOOP_LOOK_S = 0.5  # between two looks at whether the loop was closed


class LoopThread:
    """Daemon thread that runs an event loop until `close`.

    Args:
        name: of the thread, also in messages.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()
        self._closed = threading.Event()

    def call(self, coroutine: Coroutine[Any, Any, T], timeout_s: float, what: str, setting: str = "") -> T:
        """Runs `coroutine` in the loop; returns its result or raises its error.

        Raises:
            StalledError: `what` did not finish within `timeout_s`; names the `setting` behind the limit, if given.
            EngineError: `close` was called meanwhile.
        """
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            is_done = bool(concurrent.futures.wait([future], timeout=min(EVENT_LOOP_LOOK_S, left)).done)
            if self._closed.is_set():  # which cancels whatever is running
                raise EngineError(f"{self.name} was closed during {what}")
            if is_done:
                return future.result()
        future.cancel()
        raise StalledError(f"{what} did not end within {timeout_s:g} s" + (f" (set by {setting})" if setting else ""))

    def answers(self, timeout_s: float) -> bool:
        """Whether the loop runs a coroutine within `timeout_s`: none that it runs blocks it."""
        future = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop)
        return bool(concurrent.futures.wait([future], timeout_s).done)

    def begin(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Runs `coroutine` in the loop without waiting for it. Ignored after `close`."""
        if self._closed.is_set():
            coroutine.close()
        else:
            asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def soon(self, callback: Callable[..., Any], *args: Any) -> None:
        """Schedules `callback` in the loop's thread; ignored after `close`."""
        if not self._closed.is_set():
            self._loop.call_soon_threadsafe(callback, *args)

    def close(self, last: Coroutine[Any, Any, Any] | None = None) -> None:
        """Cancels all tasks, runs `last`, and joins the thread. Safe to call twice."""
        if self._closed.is_set():
            if last is not None:
                last.close()
            return
        self._closed.set()
        future = asyncio.run_coroutine_threadsafe(_end_all(last), self._loop)
        concurrent.futures.wait([future], JOIN_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(JOIN_S)


async def _end_all(last: Coroutine[Any, Any, Any] | None) -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    if last is not None:
        await last
