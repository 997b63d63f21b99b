"""Base of the actors of all pools."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import traceback
from collections.abc import Awaitable
from typing import Any

from lit_async_rl.ray.logs import where_it_is
from lit_async_rl.utils.checks import find_other_kind

MAX_ERROR_CHARS = 4000
ERROR = {"type": str, "message": str, "at": str, "is_final": bool, "ends_run": bool, "is_ours": bool}
# parts of files' names in the frames of an error that are not the user's own code
NOT_OF_INTEREST = tuple(f"{os.sep}{part}{os.sep}" for part in ("lit_async_rl", "asyncio", "concurrent", "ray"))


class PoolWorker:
    """Base class; all methods that Ray calls are coroutines of one event loop.

    The constructor does nothing: Ray makes the object anew after a crash, and `start` is called again.
    """

    def __init__(self) -> None:
        faulthandler.enable()
        self._was_started = False

    async def start(self, *given: Any) -> dict[str, Any]:
        """Prepares this process; returns its place, or `error`."""
        if self._was_started:  # the trainer has lost this process, and may not know what still runs in it
            os._exit(1)
        self._was_started = True
        try:
            await self.prepare(*given)
        except Exception as error:
            traceback.print_exc()  # into the log of this process
            return {"error": f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS]}
        import ray

        return where_it_is(ray)

    async def prepare(self, *given: Any) -> None:
        """Makes what this process works with, from the arguments of each start."""

    async def wait(self) -> dict[str, Any]:
        """Never answers, but fails when this process is gone."""
        await asyncio.Event().wait()
        return {}

    async def ping(self) -> dict[str, Any]:
        """Answers, unless something blocks the event loop."""
        return {}


async def closed(close: Awaitable[Any]) -> dict[str, Any]:
    """Answer of an actor that closes something of the user's; its `warning` describes what that has raised."""
    try:
        await close
    except Exception as error:
        return {"error": described(error), "warning": f"raised {type(error).__name__}: {error}"}
    return {}


def described(error: BaseException) -> dict[str, Any]:
    """An error as plain data: its type and message, where it was raised, and whether another try may help."""
    if not isinstance(error, asyncio.CancelledError):  # which is nobody's fault
        traceback.print_exception(error)  # into the log of this process
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not any(part in frame.filename for part in NOT_OF_INTEREST)]
    at = f"{own[-1].filename}:{own[-1].lineno} in {own[-1].name}" if own else ""
    return {
        "type": type(error).__name__,
        "message": str(error)[:MAX_ERROR_CHARS],
        "at": at[:MAX_ERROR_CHARS],
        "is_final": bool(getattr(error, "is_final", False)),
        "ends_run": bool(getattr(error, "ends_run", False)),
        "is_ours": type(error).__module__.startswith("lit_async_rl."),
    }


def find_fault(error: Any) -> str:
    """Fault in the `error` of an answer, in words; empty if valid."""
    if not isinstance(error, dict):
        return f"an error that is {type(error).__name__}"
    wrong = find_other_kind(error, ERROR)
    return f"an error whose {wrong}" if wrong else ""
