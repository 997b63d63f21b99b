"""Concurrent calls of an `async` reward: hundreds at a time in one event loop, without a thread for each.

| who | waits for | woken by |
|---|---|---|
| event loop | the awaitables of the calls | the operating system |
| filing thread | a finished or abandoned call | the event loop, `abandon`, `close` |
| caller of `put` and `abandon` | nothing | |

A separate thread files outcomes, because that takes the producer's lock, which may be held while an engine accepts
requests: a loop that waited for it would let the connections of all other calls time out.
"""

from __future__ import annotations

import concurrent.futures
import heapq
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from lit_async_rl.runtime.loop import LoopThread, ReplaceableLoop
from lit_async_rl.runtime.threads import start_thread

THREAD_NAME = "async-reward"  # of event loops
J = TypeVar("J")
R = TypeVar("R")


@dataclass(eq=False)
class CallUnderWay(Generic[J, R]):
    """One call of the reward.

    Attributes:
        job: job being scored.
        loop: runs it.
        lane: lowest number free among concurrent calls.
        future: of its coroutine, for cancelling.
        has_started: whether the loop has started it.
        began: `time.monotonic` when its work began, see `AsyncCalls`; 0 before.
        seconds: duration; 0 until it has ended.
        outcome: its return value, once there is one.
    """

    job: J
    loop: LoopThread
    lane: int
    future: concurrent.futures.Future[Any] | None = None
    has_started: bool = False
    began: float = 0.0
    seconds: float = 0.0
    outcome: list[R] = field(default_factory=list)


class AsyncCalls(Generic[J, R]):
    """Queue of jobs, with at most `limit` concurrent calls.

    Args:
        limit: concurrent calls.
        call: scores a job; never raises. It calls its second argument when the work begins, long after the call if the
            reward has its own queue, and perhaps again whenever a part of the work is done.
        is_wanted: whether a job is still needed; asked just before it is called.
        on_begin: called when the work on a job begins, in the thread that says so.
        on_progress: likewise, when the work gets on.
        on_end: called in the filing thread when a call has ended.
        runs: kind and name of the reward, for messages.
    """

    def __init__(
        self,
        limit: int,
        *,
        call: Callable[[J, Callable[[], None]], Awaitable[R]],
        is_wanted: Callable[[J], bool],
        on_begin: Callable[[CallUnderWay[J, R]], None],
        on_progress: Callable[[CallUnderWay[J, R]], None],
        on_end: Callable[[CallUnderWay[J, R]], None],
        runs: str,
    ) -> None:
        self._limit = limit
        self._call = call
        self._is_wanted = is_wanted
        self._on_begin = on_begin
        self._on_progress = on_progress
        self._on_end = on_end
        self._loop = ReplaceableLoop(THREAD_NAME, runs)
        self._lock = threading.Lock()  # guards the next three; held for a moment only
        self._waiting: deque[J] = deque()
        self._under_way: dict[CallUnderWay[J, R], None] = {}  # in order of their start
        self._free_lanes = list(range(limit))
        self._cpu: dict[LoopThread, float] = {}
        self._to_file: SimpleQueue[tuple[CallUnderWay[J, R], bool] | None] = SimpleQueue()  # and whether it has ended
        self._is_closed = False
        self._filer = start_thread(self._file, name="reward-filing")

    @property
    def cpu_s(self) -> float:
        """Processor seconds of the event loops, up to the last finished call."""
        return sum(list(self._cpu.values()), start=0.0)

    @property
    def num_blocked(self) -> int:
        """Event loops blocked by a call, whose threads cannot be ended."""
        return self._loop.num_blocked

    def put(self, job: J) -> None:
        """Queues a job."""
        with self._lock:
            self._waiting.append(job)
            self._begin_more()

    def abandon(self, call: CallUnderWay[J, R]) -> None:
        """Cancels a call that takes too long. If its loop is blocked, later jobs run in another loop."""
        self._to_file.put((call, False))

    def _begin_more(self) -> None:
        """Starts jobs up to the limit. The lock is held."""
        while self._waiting and len(self._under_way) < self._limit and not self._is_closed:
            lane = heapq.heappop(self._free_lanes)
            call: CallUnderWay[J, R] = CallUnderWay(self._waiting.popleft(), self._loop.get(), lane)
            self._under_way[call] = None
            call.future = call.loop.begin(self._run(call))

    async def _run(self, call: CallUnderWay[J, R]) -> None:
        with self._lock:
            call.has_started = call in self._under_way  # else it was moved to another loop
        if not call.has_started:
            return

        def begin() -> None:
            if call.began:
                self._on_progress(call)
                return
            call.began = time.monotonic()
            self._on_begin(call)

        try:
            if self._is_wanted(call.job):
                outcome = await self._call(call.job, begin)
                if not call.began:
                    begin()  # for an outcome without any work
                call.seconds = time.monotonic() - call.began
                call.outcome.append(outcome)
                self._to_file.put((call, True))
        finally:
            self._cpu[call.loop] = time.thread_time()
            self._free(call)

    def _free(self, call: CallUnderWay[J, R]) -> None:
        with self._lock:
            if call in self._under_way:
                self._remove(call)
                self._begin_more()

    def _remove(self, call: CallUnderWay[J, R]) -> None:
        """Frees the place and the lane of a call. The lock is held."""
        del self._under_way[call]
        heapq.heappush(self._free_lanes, call.lane)

    def _file(self) -> None:
        while (entry := self._to_file.get()) is not None:
            call, has_ended = entry
            if has_ended:
                self._on_end(call)
            else:
                self._cancel(call)

    def _cancel(self, call: CallUnderWay[J, R]) -> None:
        if self._loop.replace_if_blocked(call.loop):
            with self._lock:
                stuck = [other for other in self._under_way if other.loop is call.loop and not other.has_started]
                for other in stuck:
                    self._remove(other)
                self._waiting.extendleft(other.job for other in reversed(stuck))
        if call.future is not None:
            call.future.cancel()
        self._free(call)

    def close(self, timeout_s: float) -> None:
        """Cancels the calls, and stops loop and thread; outcomes not yet filed are dropped."""
        with self._lock:
            self._is_closed = True
            self._waiting.clear()
        self._loop.close()
        self._to_file.put(None)
        if threading.current_thread() is not self._filer:
            self._filer.join(timeout_s)
