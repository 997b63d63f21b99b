"""Who listens to an engine keeps what goes wrong, and hears nothing more from one that was replaced."""

import threading
import time

import pytest
from hostile_engines import wait_until

from lit_async_rl.engines.base import Completion, GenerationRequest, SamplingParams
from lit_async_rl.errors import EnvironmentFailure, ProducerError, RewardError
from lit_async_rl.rollouts.engine_listener import EngineCalls, EngineListener
from lit_async_rl.simulation.engine import SimulatedEngine
from lit_async_rl.simulation.latency import Constant

pytestmark = pytest.mark.timeout(60)


def request(number):
    return GenerationRequest(id=number, prompt_ids=(1, 2), num_samples=1, sampling=SamplingParams(max_tokens=4))


class Held(SimulatedEngine):
    """Its `poll` returns or raises when it is told to, as often as it was asked to."""

    def __init__(self):
        super().__init__(Constant(0.0))
        self.go, self.polls, self.result = threading.Event(), 0, None

    def poll(self, timeout_s):
        self.polls += 1
        assert self.go.wait(20)
        if isinstance(self.result, Exception):
            raise self.result
        return super().poll(timeout_s)


class Broken(SimulatedEngine):
    """Whatever it is asked."""

    def __init__(self, error):
        super().__init__(Constant(0.0))
        self.error, self.calls = error, []

    def submit(self, requests):
        self.calls.append("submit")
        raise self.error

    def abort(self, request_ids):
        self.calls.append("abort")
        raise self.error

    def partial_completions(self):
        self.calls.append("partial_completions")
        raise self.error

    def poll(self, timeout_s):
        self.calls.append("poll")
        raise self.error


def make_listener(engine, found=None):
    found = [] if found is None else found
    return EngineListener(engine, threading.Condition(threading.RLock()), found.append, lambda: None)


def until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("result", [None, RuntimeError("late")])
def test_nothing_comes_any_more_from_an_engine_that_was_replaced(result):
    found: list[Completion] = []
    old, new = Held(), SimulatedEngine(Constant(0.0))
    old.result = result
    listener = make_listener(old, found)
    listener.start()
    listener.submit([request(1)])
    until(lambda: old.polls == 1)
    listener.break_engine(TimeoutError("hangs"), old)
    listener.replace(new, [request(2)])
    old.go.set()
    until(lambda: found)
    time.sleep(0.1)
    assert [completion.request_id for completion in found] == [2]
    assert old.polls == 1, "its thread has ended"
    assert listener.is_working
    assert listener.stop(5.0)


def test_an_old_thread_has_no_turn_and_an_error_of_a_turn_is_kept_when_the_engine_is_replaced():
    turns: list[threading.Thread] = []
    begun, go = threading.Event(), threading.Event()

    def turn():
        turns.append(threading.current_thread())
        if len(turns) == 1:
            begun.set()
            assert go.wait(20)
            raise RewardError("timed out in its last try")

    first, second = Held(), Held()
    first.go.set()
    listener = EngineListener(first, threading.Condition(threading.RLock()), lambda completion: None, turn)
    listener.start()
    assert begun.wait(20)
    listener.break_engine(TimeoutError("hangs"), first)
    listener.replace(second, [])
    go.set()
    until(lambda: not turns[0].is_alive())
    with pytest.raises(ProducerError, match="timed out in its last try"):
        listener.check_thread()
    listener.break_engine(TimeoutError("hangs"), second)
    old = listener._thread
    listener.replace(SimulatedEngine(Constant(0.0)), [])
    second.go.set()
    until(lambda: not old.is_alive() and len(turns) > 1)
    assert old not in turns
    assert listener.stop(5.0)


def test_totals_are_those_of_all_engines():
    found: list[Completion] = []
    engines = [SimulatedEngine(Constant(0.01)) for _ in range(3)]
    listener = make_listener(engines[0], found)
    listener.start()
    listener.submit([request(0)])
    for number, engine in enumerate(engines[1:], start=1):
        until(lambda number=number: len(found) == number)
        listener.break_engine(TimeoutError("hangs"), listener.engine)
        listener.replace(engine, [request(number)])
    until(lambda: len(found) == 3)
    assert listener.num_tokens == sum(engine.num_tokens for engine in engines) == 3
    assert listener.busy_s == pytest.approx(sum(engine.busy_s for engine in engines))
    assert listener.stop(5.0)


@pytest.mark.parametrize("call", ["submit", "abort", "partial_completions"])
def test_an_engine_that_breaks_is_asked_for_nothing_more(call):
    engine = Broken(KeyError("first"))
    listener = make_listener(engine)
    calls = {
        "submit": lambda: listener.submit([request(1)]),
        "abort": lambda: listener.abort([1]),
        "partial_completions": listener.partial_completions,
    }
    assert not calls[call]()
    for other in calls.values():
        assert not other()
    listener.break_engine(KeyError("second"), engine)
    listener.start()
    time.sleep(0.05)
    assert engine.calls == [call]
    assert listener.engine_error is engine.error
    listener.check_thread()
    with pytest.raises(ProducerError, match="first"):
        listener.check_engine()
    assert listener.stop(5.0)


def test_a_request_that_no_engine_could_serve_is_the_callers_mistake():
    listener = make_listener(Broken(ValueError("too long")))
    with pytest.raises(ValueError, match="too long"):
        listener.submit([request(1)])
    assert listener.engine_error is None


def test_who_waits_hears_at_once_that_the_engine_broke():
    listener = make_listener(Broken(KeyError("broken")))
    with listener.changed:
        listener.start()
        began = time.monotonic()
        assert listener.changed.wait_for(lambda: listener.engine_error is not None, 20)
    assert time.monotonic() - began < 5
    assert listener.stop(5.0)


def test_an_environment_that_is_cancelled_with_a_broken_engine_does_not_end_the_run():
    """The engine breaks in the trainer's thread while this one polls; closing it cancels what its environment does."""
    is_polled, is_closed = threading.Event(), threading.Event()

    class Cancelled(SimulatedEngine):
        def poll(self, timeout_s):
            is_polled.set()
            assert is_closed.wait(20)
            raise EnvironmentFailure("environment Search on prompt '1+1=', turn '2' was cancelled")

    old, found = Cancelled(Constant(0.0)), []
    listener = make_listener(old, found)
    listener.start()
    assert is_polled.wait(20)
    broken = listener._thread
    listener.break_engine(KeyError("broken"), old)
    is_closed.set()
    new = SimulatedEngine(Constant(0.0))
    listener.replace(new, [])
    broken.join(20)
    assert not broken.is_alive()
    assert listener.error is None
    assert listener.is_working
    assert listener.stop(20.0)


def test_an_environment_that_fails_under_a_working_engine_does():
    class Failing(SimulatedEngine):
        def poll(self, timeout_s):
            raise EnvironmentFailure("environment Search on prompt '1+1=', turn '2' raised KeyError: 0")

    listener = make_listener(Failing(Constant(0.0)))
    listener.start()
    until(lambda: listener.error is not None)
    with pytest.raises(ProducerError, match="raised KeyError: 0"):
        listener.check_thread()


class LateStart(SimulatedEngine):
    """Starts when it is told to, and has nothing to close before."""

    def __init__(self):
        super().__init__(Constant(0.0))
        self.began, self.go, self.has_process = threading.Event(), threading.Event(), None

    def setup(self, model):
        self.began.set()
        assert self.go.wait(20)
        self.has_process = True

    def close(self):
        self.has_process = self.has_process and False


def test_an_engine_that_starts_when_nobody_waits_for_it_any_more_is_closed():
    engine = LateStart()

    def check():
        if engine.began.is_set():
            raise InterruptedError

    calls = EngineCalls(engine, 60.0, check=check)
    with pytest.raises(InterruptedError):
        calls.setup("model")
    calls.close(20.0)
    assert engine.has_process is None
    engine.go.set()
    wait_until(lambda: engine.has_process is False)
