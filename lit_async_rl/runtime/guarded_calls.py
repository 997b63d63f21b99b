"""Calls with timeouts, in a worker thread that is abandoned if the call hangs.

| who | waits for | woken by |
|---|---|---|
| the caller (trainer or producer) | the call's result or next question, at most its `Wait` | the worker |
| a worker | its next call; an item it requested from the caller | the caller, also when it times out |
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

import torch

from lit_async_rl.errors import EngineError
from lit_async_rl.runtime.threads import start_thread
from lit_async_rl.runtime.waiting import Wait

MAX_ANSWER_S = 1.0  # longest wait for a value that may arrive late

T = TypeVar("T")
_idle: list[_Worker] = []  # workers are kept: starting a thread costs more than most calls
os.register_at_fork(after_in_child=_idle.clear)


class _Worker:
    """Daemon thread that executes calls in order; discarded after one that hangs."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Callable[[], Any], SimpleQueue[Any]]] = SimpleQueue()
        start_thread(self._run, name="guarded-call")

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


def call(function: Callable[[], T], wait: Wait) -> T:
    """The result of `function()`, or its error; `wait` has just begun.

    Raises:
        StalledError: it did not return in time; its thread is abandoned.
    """
    replies = _begin(function, SimpleQueue())
    return _result(wait.get(replies))


def feed(
    function: Callable[[Iterator[Any]], T],
    items: Iterable[Any],
    wait: Wait,
    lasts: Callable[[Any], bool] = lambda item: False,
) -> T:
    """The result of `function(items)`, where `items` is iterated in this thread.

    Args:
        function: called in a worker.
        items: items for the call.
        wait: for the next request of an item, or the result; making an item does not count.
        lasts: whether an item stays valid when the next is produced. It is handed over with the next, because threads
            that take turns wait for each other, the longer the busier the machine is.

    Raises:
        StalledError: no progress in time; its thread is abandoned and gets an error as the next item.
    """
    replies: SimpleQueue[Any] = SimpleQueue()
    fed = _Fed[Any](replies)
    source = iter(items)
    _begin(lambda: function(fed), replies)
    try:
        while (reply := wait.get(replies)) is fed:
            batch = [_next(source)]
            while not isinstance(batch[-1], Exception) and lasts(batch[-1]):
                batch.append(_next(source))
            fed.items.put(batch)
            wait.restart()
    finally:
        fed.items.put([EngineError("weights were requested by a call that had timed out")])
    return _result(reply)


def _begin(function: Callable[[], Any], replies: SimpleQueue[Any]) -> SimpleQueue[Any]:
    """Calls a function in a worker, with this thread's grad mode and current device, which are thread-local."""
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


def _result(reply: _Reply) -> Any:
    if reply.error is None:
        return reply.value
    try:
        raise reply.error
    finally:
        reply.error = None  # no cycle of frames, error and reply: its objects are freed with the error


class LastKnown(Generic[T]):
    """Value of a function that may hang; while it does, its last value, at first `value`."""

    def __init__(self, function: Callable[[], T], value: T) -> None:
        self._function = function
        self._value = value
        self._pending: SimpleQueue[Any] | None = None
        self._asking = threading.Lock()

    def get(self) -> T:
        """The value, or the last one after `MAX_ANSWER_S`. Raises errors of the function."""
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
            reply: _Reply = replies.get(timeout=0.0 if is_late else MAX_ANSWER_S)  # no `Wait`: a late one is no error
        except Empty:
            return self._value
        self._pending = None
        self._value = _result(reply)
        return self._value


# -- Calls of user code in threads, for coroutines --------------------------------------------------------------------


async def in_thread(threads: concurrent.futures.Executor | None, function: Callable[[], T]) -> T:
    """Result of user code, called in a thread of an executor; None is the event loop's."""
    return await asyncio.get_running_loop().run_in_executor(threads, without_exit, function)


def without_exit(function: Callable[[], T]) -> T:
    """Result of a call whose future is awaited.

    Raises:
        RuntimeError: in place of `StopIteration`, on which asyncio would wait forever, and of an exit of the process,
            which the future would pass to the event loop.
    """
    try:
        return function()
    except (SystemExit, KeyboardInterrupt, StopIteration) as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error
