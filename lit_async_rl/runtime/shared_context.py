"""An async context manager that all episodes of a run share: a tool server, or the services of a framework.

Many context managers must be left by the task that entered them, and episodes are tasks that end at any time. So a
separate task enters and leaves it.

| who | waits for | woken by |
|---|---|---|
| `SharedContext.get` | the context manager to be entered, at most `start_timeout_s` | the holding task |
| the holding task | `close` | the event of its use |
| `SharedContext.close` | the context manager to be left, at most `CLOSE_TIMEOUT_S` | the holding task |
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Generic, TypeVar

from lit_async_rl.errors import StalledError

CLOSE_TIMEOUT_S = 5.0  # less than the time that an engine has to close
T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Use(Generic[T]):
    loop: asyncio.AbstractEventLoop
    ready: asyncio.Future[T]
    stop: asyncio.Event
    task: asyncio.Task[None] | None = None
    value: T | None = None


class SharedContext(Generic[T]):
    """Enters a context manager at its first use, and leaves it at the end of a run. Used by one event loop.

    An agent calls `start` in its `astart`, `close` in its `aclose`, and `get` in each episode.

    Args:
        name: for errors and warnings.
        make: makes the context manager, for each use anew.
        start_timeout_s: seconds that it may take to be entered.
    """

    def __init__(self, name: str, make: Callable[[], AbstractAsyncContextManager[T]], start_timeout_s: float) -> None:
        self.name = name
        self._make = make
        self._start_timeout_s = start_timeout_s
        self._use: _Use[T] | None = None
        self._was_entered = False

    async def start(self) -> None:
        """Enters it, unless it was entered since the last `close`; `get` replaces one that has ended since then.

        Raises:
            StalledError: as `get`; likewise all others.
        """
        if not self._was_entered:
            await self.get()

    async def get(self) -> T:
        """Value of the context manager, entered by the first caller.

        Raises:
            StalledError: it took too long to be entered.
            Exception: what it raised; the next caller tries again.
        """
        loop = asyncio.get_running_loop()
        use = self._use
        if use is None or use.loop is not loop or (use.task is not None and use.task.done()):
            use = self._use = _Use(loop=loop, ready=loop.create_future(), stop=asyncio.Event())
            use.task = loop.create_task(self._hold(use))
        # not `wait_for`: a caller that is cancelled must not take it from the others
        await asyncio.wait({use.ready}, timeout=self._start_timeout_s)
        if not use.ready.done():
            await self._end(use)
            raise StalledError(f"{self.name} did not start within {self._start_timeout_s:g} s")
        return use.ready.result()

    async def _hold(self, use: _Use[T]) -> None:
        try:
            async with self._make() as value:
                use.value = value
                self._was_entered = True
                use.ready.set_result(value)
                await use.stop.wait()
        except (Exception, SystemExit) as error:  # some libraries exit where a key or a program is missing
            if use.ready.done():
                log.warning("%s: its end raised %s: %s", self.name, type(error).__name__, error)
            else:
                use.ready.set_exception(error)
        finally:
            use.ready.cancel()  # does nothing to one that is set

    async def close(self) -> None:
        """Leaves the context manager. Safe to call twice; a later `get` enters another."""
        self._was_entered = False
        if self._use is not None:
            await self._end(self._use)

    async def discard(self, value: T) -> None:
        """Leaves the context manager if it still is the one with this value, which no longer works."""
        if self._use is not None and self._use.value is value:
            await self._end(self._use)

    async def _end(self, use: _Use[T]) -> None:
        self._use = None if self._use is use else self._use
        use.stop.set()
        if use.task is None or use.loop is not asyncio.get_running_loop():
            return
        if not use.ready.done():
            use.task.cancel()  # it is still being entered
        done, _ = await asyncio.wait({use.task}, timeout=CLOSE_TIMEOUT_S)
        if not done:
            log.warning("%s did not end within %g s", self.name, CLOSE_TIMEOUT_S)
            use.task.cancel()
