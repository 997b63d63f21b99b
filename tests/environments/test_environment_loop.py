"""An environment object and its event loop: one for all engines around it, running while one of them is open."""

import asyncio
import gc
import threading
import time

import pytest
from flow import fit, make_data, make_module
from instant_episodes import CODEC, Instant, playing, poll_for, request

from lit_async_rl.assets import asset
from lit_async_rl.engines.base import SamplingParams
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.environments.base import Environment, Observation
from lit_async_rl.environments.episode_engine import EpisodeEngine
from lit_async_rl.environments.gymnasium import GymnasiumEnvironment
from lit_async_rl.problem import Prompt
from lit_async_rl.tasks import Addition


class OneAtATime(Environment):
    """Has a tool that serves one episode at a time; a semaphore for which some wait belongs to one event loop."""

    def __init__(self):
        self.tool, self.loops = asyncio.Semaphore(1), set()

    async def start(self, prompt):
        return self

    async def step(self, completion):
        self.loops.add(asyncio.get_running_loop())
        async with self.tool:
            await asyncio.sleep(0.002)
        return Observation(reward=1.0, done=True)


others: set[threading.Thread] = set()  # of engines that other tests have not closed


@pytest.fixture(autouse=True)
def _without_those_of_other_tests():
    others.update(threads())


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "environments" and thread not in others]


def play(engine, number=0):
    engine.submit([request(number, num_samples=3)])
    assert len(poll_for(engine, 20.0, until=lambda found: len(found) == 3)) == 3


def test_engines_around_one_environment_share_its_loop_and_the_last_one_ends_the_thread():
    environment = OneAtATime()
    first = EpisodeEngine(Instant(), environment).around(Instant(), CODEC)
    second = first.around(Instant(), CODEC)
    play(first)
    play(second)
    assert len(threads()) == 1
    second.close()
    second.close()
    play(first, 1)
    first.close()
    assert threads() == []
    third = first.fresh().around(Instant(), CODEC)  # after a restart, or in a second fit
    play(third)
    assert len(environment.loops) == 1
    both = [threading.Thread(target=third.close) for _ in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join(20)
    assert threads() == []


def test_closing_one_engine_leaves_the_episodes_of_the_others_alone():
    asked, cancelled, is_open = [], [], False

    async def answer():
        asked.append(1)
        try:
            while not is_open:
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            cancelled.append(1)
            raise
        return Observation(reward=1.0, done=True)

    kept = playing(answer)
    closed = kept.around(Instant(), CODEC)
    closed.submit([request(0, num_samples=2)])
    poll_for(closed, 20.0, until=lambda found: len(asked) == 2)
    kept.submit([request(0, num_samples=2)])
    poll_for(kept, 20.0, until=lambda found: len(asked) == 4)
    closed.close()
    assert len(cancelled) == 2
    is_open = True
    assert len(poll_for(kept, 20.0, until=lambda found: len(found) == 2)) == 2
    kept.close()
    assert threads() == []


@pytest.mark.slow
def test_background_tasks_of_an_environment_outlive_engines_and_are_ended_with_the_last():
    kept, ended = [], []

    async def watch():
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(1)

    async def answer():
        if not kept:
            kept.append(asyncio.create_task(watch()))
            await asyncio.sleep(0)
        return Observation(done=True)

    engine = playing(answer)
    play(engine)
    engine.close()
    engine = engine.around(Instant(), CODEC)
    play(engine)
    engine.close()
    assert not ended
    del engine
    gc.collect()
    assert ended
    assert kept[0].cancelled()


def test_validations_and_training_use_an_environment_in_one_loop():
    environment = OneAtATime()
    engine = EpisodeEngine(EmbeddedEngine(), environment)
    settings = dict(model=asset("calculator_policy"), reward=None, sampling=SamplingParams(max_tokens=12))
    data = make_data(prompts=Addition(3, size=100), val_prompts=Addition(3, size=8), engine=engine, **settings)
    module = make_module(model=asset("calculator_policy"))
    fit(module, data, max_steps=2, num_sanity_val_steps=1, limit_val_batches=2, val_check_interval=1)
    assert len(environment.loops) == 1
    deadline = time.monotonic() + 20
    while threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threads() == []


@pytest.mark.timeout(30)
def test_many_slow_environments_of_gymnasium_wait_at_a_time():
    """An event loop's own threads are a few more than the cores: the others' answers came too late."""
    together = threading.Barrier(40, timeout=10.0)

    class Slow:
        def reset(self, seed=None):
            return "", {}

        def step(self, action):
            together.wait()
            return "", 1.0, True, False, {}

    async def play():
        environment = GymnasiumEnvironment(lambda prompt: Slow())
        episodes = [await environment.start(Prompt(text="go")) for _ in range(40)]
        return await asyncio.gather(*(episode.step("") for episode in episodes))

    assert sum(answer.reward for answer in asyncio.run(play())) == 40
    with pytest.raises(ValueError, match=r"GymnasiumEnvironment\.max_threads must be >= 1, got 0"):
        GymnasiumEnvironment(Slow, max_threads=0)
