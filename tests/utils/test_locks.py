"""Nobody is kept waiting by a busy loop, by something full for ever, or by something that broke."""

import itertools
import threading
import time

import pytest

from lit_async_rl.engines.embedded.queue import Room
from lit_async_rl.errors import StalledError
from lit_async_rl.utils.waiting import FairLock


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


def test_room_is_waited_for_until_there_is_some_or_the_time_is_up():
    room = Room(2)
    room.add(1)
    assert room.wait(0.0)
    room.add(1)
    assert not room.wait(0.05)
    assert woken_by(lambda: room.add(-1), lambda: room.wait(10.0))


def test_nobody_waits_for_what_is_closed_or_broken():
    room = Room(1)
    room.add(1)
    assert woken_by(room.close, lambda: room.wait(10.0))
    with pytest.raises(MemoryError), room.closed_by_errors():
        raise MemoryError("none left")
    room.close()
    with pytest.raises(RuntimeError, match="none left") as error:
        room.wait(10.0)
    assert isinstance(error.value.__cause__, MemoryError)


def woken_by(event, wait):
    """What `wait` returns, in time."""
    began = time.monotonic()
    threading.Timer(0.05, event).start()
    result = wait()
    assert time.monotonic() - began < 5
    return result
