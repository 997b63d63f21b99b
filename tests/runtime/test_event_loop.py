"""Calls into an event loop of another thread."""

import asyncio
import threading

import pytest

from lit_async_rl.errors import EngineError, StalledError
from lit_async_rl.runtime.guarded_calls import LoopThread


def test_a_call_into_the_loop_ends_in_time():
    thread = LoopThread("a loop")
    with pytest.raises(StalledError, match=r"sleeping did not end within 0\.2 s"):
        thread.call(asyncio.sleep(60), 0.2, "sleeping")
    threading.Timer(0.2, lambda: thread.close(asyncio.sleep(0))).start()
    with pytest.raises(EngineError, match="a loop was closed during sleeping"):
        thread.call(asyncio.sleep(60), 30.0, "sleeping")


def test_a_call_that_ends_before_its_timeout_is_not_cancelled():
    thread = LoopThread("a loop")
    try:
        assert thread.call(asyncio.sleep(0.6, "done"), 0.74, "sleeping") == "done"  # not a multiple of POLL_INTERVAL_S
    finally:
        thread.close(asyncio.sleep(0))
