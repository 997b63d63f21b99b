"""An asyncio event loop in its own thread, with thread-safe calls."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from lit_async_rl.errors import EngineError, StalledError

JOIN_S = 10.0
LOOK_S = 0.5  # between two looks at whether the loop was closed

T = TypeVar("T")


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
            is_done = bool(concurrent.futures.wait([future], timeout=min(LOOK_S, left)).done)
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
