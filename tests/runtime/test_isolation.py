"""What never returns is ended, and nothing else waits for it."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from processes import wait_for_the_end_of

from lit_async_rl.runtime.isolation import IsolatedCallError, IsolatedFunction


def make_worker():
    """In the child: a function that does what it is told."""

    def work(what, value):
        if what == "hang":
            return 9**9**9  # holds the interpreter's lock all the time
        if what == "raise":
            raise KeyError(value)
        if what == "die":
            os._exit(3)
        if what == "print":
            print("not a reply")
        if what == "loaded":
            return value in sys.modules
        return os.getpid() if what == "pid" else value

    return work


def make_nothing():
    raise ImportError("nothing here")


WORKER = "test_isolation:make_worker"


def test_values_and_errors_come_back():
    function = IsolatedFunction(WORKER, 5.0)
    big = "x" * 1_000_000
    assert function("echo", big) == big
    assert function("print", {"a": [1, None]}) == {"a": [1, None]}
    with pytest.raises(IsolatedCallError, match="KeyError: 'why'"):
        function("raise", "why")
    assert function("pid", 0) == function("pid", 0) != os.getpid()
    assert not function("loaded", "torch"), "seconds and memory of each process"


def test_a_call_that_hangs_ends_in_time_and_the_next_one_works():
    function = IsolatedFunction(WORKER, 0.5)
    before = function("pid", 0)
    beats, done = [], threading.Event()

    def beat():
        while not done.wait(0.02):
            beats.append(time.monotonic())

    clock = threading.Thread(target=beat)
    clock.start()
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"did not return within 0\.5 s"):
        function("hang", 0)
    took = time.monotonic() - began
    done.set()
    clock.join()
    assert 0.3 < took < 20.0
    assert len(beats) > 5  # other threads went on
    assert function("pid", 0) != before


def test_waiting_is_not_counted():
    function = IsolatedFunction(WORKER, 2.0)
    function("echo", 1)
    time.sleep(2.2)
    assert function("echo", 2) == 2


def test_a_child_that_dies_is_an_error():
    function = IsolatedFunction(WORKER, 5.0)
    with pytest.raises(RuntimeError, match="exit code 3"):
        function("die", 0)
    assert function("echo", 1) == 1
    with pytest.raises(RuntimeError, match=r"make_nothing.*(exit code 1|closed its pipe)"):
        IsolatedFunction("test_isolation:make_nothing", 5.0)("echo", 1)


def test_threads_have_their_own_children():
    function, pids = IsolatedFunction(WORKER, 5.0), []
    function("pid", 0)
    threads = [threading.Thread(target=lambda: pids.append(function("pid", 0))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({*pids, function("pid", 0)}) == 3


def test_no_child_outlives_its_parent():
    code = f"""
import threading, time, os
from lit_async_rl.runtime.isolation import IsolatedFunction
f = IsolatedFunction({WORKER!r}, 1.0)
print(f("pid", 0), flush=True)
threading.Thread(target=f, args=("hang", 0), daemon=True).start()
g = IsolatedFunction({WORKER!r}, 1.0)
print(g("pid", 0), flush=True)
time.sleep(0.2)
os._exit(0)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        timeout=100,
        cwd=Path(__file__).parent,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    pids = [int(line) for line in done.stdout.split()]
    assert len(pids) == 2
    wait_for_the_end_of(*pids)


@pytest.mark.slow
def test_a_child_is_gone_with_its_function_and_ctrl_c_is_not_for_it():
    function = IsolatedFunction(WORKER, 5.0)
    pid = function("pid", 0)
    assert os.getsid(pid) == pid, "the terminal sends Ctrl-C to the parent's session only"
    del function
    gc.collect()
    wait_for_the_end_of(pid)


def test_a_child_that_was_killed_between_two_calls_is_an_error_once():
    function = IsolatedFunction(WORKER, 5.0)
    pid = function("pid", 0)
    os.kill(pid, signal.SIGKILL)
    wait_for_the_end_of(pid)
    with pytest.raises(TimeoutError, match="SIGKILL"):
        function("echo", 1)
    assert function("echo", 1) == 1


def test_the_time_limit_must_be_positive():
    with pytest.raises(ValueError, match="timeout_s must be positive, got 0"):
        IsolatedFunction(WORKER, 0.0)
