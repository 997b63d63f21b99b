"""A pool gives its callers results, errors and cancellations; a process ends whatever its threads do."""

import asyncio
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import CancelledError, wait
from pathlib import Path

import pytest

from lit_async_rl.runtime.loop import LoopThread
from lit_async_rl.runtime.threads import ThreadPool

ROOT = Path(__file__).parents[2]


@pytest.fixture
def pool():
    made = ThreadPool(2, name="some")
    yield made
    made.shutdown()


def test_a_pool_has_as_many_threads_as_it_needs(pool):
    assert [pool.submit(divmod, 7, number).result(10) for number in (2, 3)] == [(3, 1), (2, 1)]
    names = {pool.submit(lambda: threading.current_thread().name).result(10) for _ in range(5)}
    assert names <= {"some_0", "some_1"}
    meeting = threading.Barrier(2, timeout=10)
    assert sorted(one.result(10) for one in [pool.submit(meeting.wait) for _ in range(2)]) == [0, 1]


def test_calls_beyond_the_limit_wait_in_order(pool):
    gate = threading.Event()
    for _ in range(2):
        pool.submit(gate.wait, 10)
    done = []
    later = [pool.submit(done.append, number) for number in range(5)]
    assert not wait(later, 0.1).done
    gate.set()
    assert not wait(later, 10).not_done
    assert sorted(done) == list(range(5))


def test_errors_belong_to_the_caller(pool):
    with pytest.raises(ZeroDivisionError):
        pool.submit(divmod, 1, 0).result(10)
    with pytest.raises(SystemExit):
        pool.submit(sys.exit, 3).result(10)
    assert pool.submit(abs, -1).result(10) == 1


def test_the_end_waits_for_nothing_and_cancels_what_has_not_begun():
    pool = ThreadPool(1, name="some")
    gate = threading.Event()
    running = pool.submit(gate.wait, 10)
    waiting = pool.submit(abs, -1)
    pool.shutdown(cancel_futures=True)
    with pytest.raises(CancelledError):
        waiting.result(10)
    with pytest.raises(RuntimeError, match="the threads 'some' have ended"):
        pool.submit(abs, -1)
    gate.set()
    assert running.result(10) is True


def test_an_idle_pool_ends_its_threads():
    pool = ThreadPool(3, name="idle")
    meeting = threading.Barrier(3, timeout=10)
    wait([pool.submit(meeting.wait) for _ in range(3)], 10)
    pool.shutdown()
    deadline = time.monotonic() + 10
    while left := [one for one in threading.enumerate() if one.name.startswith("idle_")]:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)


def test_a_loop_makes_calls_of_asyncio_to_thread_in_such_threads():
    loop = LoopThread("some-loop")
    try:
        name = loop.call(asyncio.to_thread(lambda: threading.current_thread().name), 10.0, "a call")
        assert name == "some-loop-call_0"
    finally:
        loop.close()


BLOCKED = """
import asyncio, concurrent.futures, sys, time
import lit_async_rl as rl
from lit_async_rl.environments.gymnasium import GymnasiumEnvironment, GymnasiumPrompts

class Stuck:
    def reset(self, seed=None):
        return "1+1=", {}
    def step(self, action):
        time.sleep(1e6)

async def stuck(prompt, completion):
    return await asyncio.to_thread(time.sleep, 1e6)

def make(prompt=None):
    return Stuck()

environment = rl.EpisodeEngine(rl.EmbeddedEngine(), GymnasiumEnvironment(make), step_timeout_s=1.0)
settings = {
    "environment": dict(prompts=GymnasiumPrompts(make, size=50), engine=environment),
    "reward": dict(prompts=rl.Addition(3, size=50), reward=stuck, scoring=rl.Scoring(timeout_s=1.0)),
}[sys.argv[1]]
rl.fit(rl.asset("calculator_policy"), max_steps=1, groups_per_step=2, group_size=4, accelerator="cpu", **settings)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "setting"), [("environment", "step_timeout_s=1"), ("reward", "data.scoring.timeout_s=1")]
)
def test_a_run_ends_though_a_call_of_the_user_never_returns(tmp_path, kind, setting):
    """Python would wait for a thread of an executor, daemon or not: the error was said, and the process stayed."""
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{BLOCKED}", kind]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=150)
    assert done.returncode == 1
    assert setting in done.stderr.strip().splitlines()[-1]


FINISHED = """
import pathlib, sys, time
from lit_async_rl.runtime.threads import OrderedTasks
tasks = OrderedTasks(name="some")
file = pathlib.Path(sys.argv[1])
tasks.submit(time.sleep, 0.3)
tasks.submit(file.write_text, "whole")
"""


def test_ordered_tasks_are_done_before_the_process_ends(tmp_path):
    subprocess.run([sys.executable, "-c", FINISHED, str(tmp_path / "file")], cwd=ROOT, check=True, timeout=100)
    assert (tmp_path / "file").read_text() == "whole"


def test_nothing_of_a_call_outlives_it_in_a_thread_that_waits_for_the_next(pool):
    class Large:
        pass

    given = Large()
    gone = weakref.ref(given)
    assert pool.submit(lambda _: 3, given).result(10) == 3
    del given
    deadline = time.monotonic() + 10
    while gone() is not None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
