"""Nobody is kept waiting by a busy loop, or by who gave up."""

import itertools
import threading
import time

import pytest

from lit_async_rl.errors import StalledError
from lit_async_rl.runtime.waiting import FairLock


def test_who_waits_comes_before_the_loop_that_has_just_released_it():
    """With a plain lock the loop wins: it asks again before the other thread has woken up."""
    lock, asked, stop, order = FairLock(), threading.Event(), threading.Event(), []

    def loop():
        while not stop.is_set():
            with lock.hold():
                order.append("loop")
                if asked.wait(0.001):
                    time.sleep(0.03)  # the other one waits for the lock by now
                    asked.clear()
                    order.append("released to")

    thread = threading.Thread(target=loop)
    thread.start()
    for _ in range(20):
        time.sleep(0.003)
        asked.set()
        with lock.hold():
            order.append("other")
    stop.set()
    thread.join(10)
    followers = [then for now, then in itertools.pairwise(order) if now == "released to"]
    assert len(followers) >= 15
    assert followers.count("other") >= len(followers) - 2, "a machine can be too busy for a thread to begin to wait"
    assert order.count("loop") > len(followers), "nor is the loop kept out"


def test_who_gave_up_waiting_or_failed_keeps_nobody_out():
    lock = FairLock(what="the other")
    with pytest.raises(KeyError), lock.hold():
        raise KeyError

    def waits():
        with pytest.raises(StalledError, match=r"waited 0\.05 s for the other"), lock.hold(0.05):
            raise AssertionError

    with lock.hold(0.1):
        began = time.monotonic()
        threads = [threading.Thread(target=waits, daemon=True) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert time.monotonic() - began < 5
    with lock.hold(0.1):
        pass
