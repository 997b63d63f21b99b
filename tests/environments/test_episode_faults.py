"""Faults of environments and engines in episodes: each is reported as what it is, and only if its episode lives."""

import asyncio
import time
from dataclasses import replace

import pytest
from instant_episodes import CODEC, Instant, playing, poll_for, request

from lit_async_rl.environments.base import Observation
from lit_async_rl.environments.episode_engine import EpisodeEngine
from lit_async_rl.environments.gymnasium import GymnasiumEnvironment
from lit_async_rl.errors import EngineError, EnvironmentFailure, InvariantError, StalledError


@pytest.mark.parametrize("is_stubborn", [False, True])
def test_an_aborted_episode_fails_neither_by_its_timeout_nor_by_an_exception(is_stubborn):
    asked, cancelled = [], []

    async def answer():
        asked.append(1)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(1)
            if is_stubborn:
                raise ZeroDivisionError("while it cleans up") from None
            raise

    engine, began = playing(answer, step_timeout_s=3.0), time.monotonic()
    engine.submit([request(0, num_samples=3)])
    poll_for(engine, 20.0, until=lambda found: len(asked) == 3)
    engine.abort([0])
    poll_for(engine, 20.0, until=lambda found: len(cancelled) == 3)
    assert time.monotonic() - began < 3.0, "a tool works on for an episode that is gone"
    assert poll_for(engine, 0.2) == []
    engine.close()


def test_the_episodes_that_live_go_on_when_others_are_aborted():
    asked, is_open = [], False

    async def answer():
        asked.append(1)
        while not is_open:
            await asyncio.sleep(0.01)
        return Observation(reward=1.0, done=True)

    engine = playing(answer)
    engine.submit([request(0, num_samples=2), request(1, num_samples=2)])
    poll_for(engine, 20.0, until=lambda found: len(asked) == 4)
    engine.abort([0])
    is_open = True
    found = poll_for(engine, 20.0, until=lambda found: len(found) >= 2)
    assert [(c.request_id, c.reward) for c in found] == [(1, 1.0)] * 2
    engine.close()


def failure_of(engine: EpisodeEngine) -> Exception:
    """The error that `poll` raises in the first episodes."""
    engine.submit([request(0)])
    with pytest.raises((EnvironmentFailure, EngineError, StalledError)) as caught:
        poll_for(engine, 20.0)
    engine.close()
    return caught.value


def test_a_timeout_of_the_tool_itself_is_its_exception():
    async def answer():
        raise TimeoutError("the search gave up after 10 ms")

    error = failure_of(playing(answer, step_timeout_s=60.0))
    assert type(error) is EnvironmentFailure
    assert str(error).endswith("raised TimeoutError: the search gave up after 10 ms")
    assert repr(error.__cause__) == "TimeoutError('the search gave up after 10 ms')"


def test_an_environment_that_is_cancelled_is_not_waited_for():
    async def answer():
        raise asyncio.CancelledError

    began = time.monotonic()
    error = failure_of(playing(answer, step_timeout_s=60.0))
    assert type(error) is EnvironmentFailure
    assert str(error).endswith("was cancelled")
    assert time.monotonic() - began < 20.0


class OutcomeError(BaseException):
    """As pytest's, which a test harness in a tool lets through."""


@pytest.mark.parametrize("kind", [StopIteration, StopAsyncIteration, SystemExit, KeyboardInterrupt, OutcomeError])
@pytest.mark.parametrize("is_plain", [False, True], ids=["in its coroutine", "before its coroutine"])
def test_whatever_an_environment_raises_is_a_failed_try_that_names_it(kind, is_plain, caplog):
    tried = []

    async def answer():
        if len(tried) == 1 and not is_plain:
            raise kind
        return Observation(reward=1.0, done=True)

    def counted():
        tried.append(1)
        if len(tried) == 1 and is_plain:
            raise kind
        return answer()

    engine = playing(counted, tries=2, step_timeout_s=60.0)
    engine.submit([request(0)])
    assert [one.reward for one in poll_for(engine, 30.0, until=len)] == [1.0]
    engine.close()
    text = next(one.getMessage() for one in caplog.records if "try 1 of data.engine.tries=2" in one.getMessage())
    assert "environment Tool on prompt" in text
    assert kind.__name__ in text


@pytest.mark.parametrize("kind", [StopIteration, SystemExit])
@pytest.mark.parametrize("call", ["make", "step"])
def test_what_a_gymnasium_environment_raises_in_its_thread_is_named_at_once(kind, call):
    """asyncio would wait for ever for a future whose thread has raised `StopIteration`."""

    class Env:
        def reset(self, seed=None):
            if call == "make":
                raise kind
            return "", {}

        def step(self, text):
            raise kind

    engine = EpisodeEngine(Instant(), GymnasiumEnvironment(lambda prompt: Env()), step_timeout_s=600.0)
    assert f"raised RuntimeError: {kind.__name__}" in str(failure_of(engine.around(Instant(), CODEC)))


@pytest.mark.parametrize("kind", [StalledError, EngineError])
def test_an_error_of_the_engine_is_not_blamed_on_the_environment(kind):
    async def answer():
        return Observation(text="3")

    error = kind("the engine is gone")
    assert failure_of(playing(answer, error)) is error


@pytest.mark.parametrize("wrong", [{"text": None}, {"text": 3, "state": ""}, {"reward": "1"}, {"reward": float("nan")}])
def test_a_response_that_cannot_be_used_is_the_environments(wrong):
    async def answer():
        return Observation(**wrong)

    error = failure_of(playing(answer))
    assert type(error) is EnvironmentFailure
    assert str(error).startswith("environment Tool on prompt '1+2='")


def test_a_request_without_its_prompt_is_refused_when_it_is_made():
    async def answer():
        return Observation(text="3")

    engine = playing(answer)
    with pytest.raises(InvariantError, match="an environment needs the prompt"):
        engine.submit([replace(request(0), prompt=None)])
    assert engine.poll(0.0) == []
    engine.close()
