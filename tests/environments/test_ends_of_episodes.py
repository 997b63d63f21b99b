"""Each episode is closed once, however it ends, and never while it is at work; so is the environment of a run."""

import asyncio
import dataclasses
import threading
import time

import pytest
from flow import fit, make_data, make_module
from instant_episodes import CODEC, Instant, poll_for, request

from lit_async_rl.api.run import run
from lit_async_rl.api.trainer import Trainer
from lit_async_rl.assets import asset
from lit_async_rl.engines.base import SamplingParams
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.environments.base import Environment, Episode, Observation
from lit_async_rl.environments.episode_engine import EpisodeEngine
from lit_async_rl.environments.gymnasium import GymnasiumEnvironment, GymnasiumPrompts
from lit_async_rl.errors import EnvironmentFailure
from lit_async_rl.problem import Prompt
from lit_async_rl.simulation.environment import Delayed
from lit_async_rl.tasks import Addition

MODEL = asset("calculator_policy")
DONE = Observation(reward=1.0, done=True)


class Counted(Episode):
    def __init__(self, owner: "Counting") -> None:
        self.owner, self.num_closed, self.is_at_work = owner, 0, False

    async def step(self, completion):
        self.is_at_work = True
        try:
            return await self.owner.answer()
        finally:
            self.is_at_work = False

    async def close(self):
        assert not self.is_at_work
        await asyncio.sleep(0)
        self.num_closed += 1
        if self.owner.close_error is not None:
            raise self.owner.close_error


class Counting(Environment):
    """Counts its episodes, and how often they and itself are closed."""

    def __init__(self, answer, close_error=None):
        self.answer, self.close_error = answer, close_error
        self.episodes, self.num_closed, self.num_open_then = [], 0, []

    async def start(self, prompt):
        self.episodes.append(Counted(self))
        return self.episodes[-1]

    async def close(self):
        self.num_closed += 1
        self.num_open_then.append(sum(episode.num_closed == 0 for episode in self.episodes))

    @property
    def closes(self) -> list[int]:
        return [episode.num_closed for episode in self.episodes]


class Silent(Instant):
    """Only its first requests are answered: later turns stay under way. All turns end with `reason`."""

    def __init__(self, reason="stop", num_answered=1):
        super().__init__()
        self.reason, self.num_answered = reason, num_answered

    def submit(self, requests):
        if self.num_submits < self.num_answered:
            super().submit(requests)
            self.finished = [dataclasses.replace(c, finish_reason=self.reason) for c in self.finished]


def around(environment, engine=None, **settings) -> EpisodeEngine:
    return EpisodeEngine(Instant(), environment, **settings).around(engine or Instant(), CODEC)


def wait_for(condition, seconds=20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


async def forever():
    await asyncio.sleep(1000)


async def again():
    return Observation(text="3")


async def done():
    return DONE


@pytest.mark.parametrize(
    ("answer", "inner", "settings"),
    [
        (done, Instant(), {}),
        (again, Instant(), {"max_turns": 2}),
        (again, Silent("length"), {}),
    ],
    ids=["done", "max_turns", "max_tokens"],
)
def test_an_episode_that_ends_is_closed_once(answer, inner, settings):
    environment = Counting(answer)
    engine = around(environment, inner, **settings)
    engine.submit([request(0, num_samples=3)])
    assert len(poll_for(engine, 20.0, until=lambda found: len(found) == 3)) == 3
    wait_for(lambda: environment.closes == [1, 1, 1])  # not only at the end of the run
    engine.close()
    assert environment.closes == [1, 1, 1]


@pytest.mark.parametrize("ending", ["abort", "close"])
@pytest.mark.parametrize("answer", [forever, again], ids=["the environment works", "a turn is sampled"])
def test_a_dropped_episode_is_closed_once_and_not_while_it_works(answer, ending):
    environment = Counting(answer)
    engine = around(environment, Silent())
    engine.submit([request(0, num_samples=3)])
    is_at_work = answer is forever
    poll_for(engine, 20.0, until=lambda _: len(environment.episodes) == 3 and bool(engine.outside_work()) == is_at_work)
    if ending == "abort":
        engine.abort([0])
        wait_for(lambda: environment.closes == [1, 1, 1])
    engine.close()
    engine.close()
    assert environment.closes == [1, 1, 1]


def test_an_episode_that_fails_is_closed_and_what_close_raises_ends_nothing(caplog):
    async def answer():
        raise ZeroDivisionError("no such tool")

    environment = Counting(answer, close_error=OSError("the socket is gone"))
    engine = around(environment)
    engine.submit([request(0, num_samples=2)])
    with pytest.raises(EnvironmentFailure, match="no such tool"):
        poll_for(engine, 20.0)
    engine.close()
    assert environment.closes == [1] * len(environment.episodes)
    assert "environment Counting: close raised OSError: the socket is gone" in caplog.text


def test_an_environment_without_any_close_and_a_plain_close_work():
    class Bare:
        async def step(self, completion):
            return DONE

    class Plain(Bare):
        num_closed = 0

        def close(self):
            type(self).num_closed += 1

    class Old(Environment):
        def __init__(self, kind):
            self.kind = kind

        async def start(self, prompt):
            return self.kind()

    for kind in (Bare, Plain):
        engine = around(Old(kind))
        engine.submit([request(0, num_samples=2)])
        assert len(poll_for(engine, 20.0, until=lambda found: len(found) == 2)) == 2
        engine.close()
        engine.end()
    assert Plain.num_closed == 2


def test_an_environment_that_is_its_own_episode_is_closed_at_the_end_only():
    class Both(Environment):
        num_closed = 0

        async def start(self, prompt):
            return self

        async def step(self, completion):
            return DONE

        async def close(self):
            self.num_closed += 1

    environment = Both()
    engine = around(environment)
    engine.submit([request(0, num_samples=2)])
    assert len(poll_for(engine, 20.0, until=lambda found: len(found) == 2)) == 2
    engine.close()
    assert environment.num_closed == 0
    engine.end()
    engine.end()
    assert environment.num_closed == 1


def data_of(environment, **changes):
    engine = EpisodeEngine(EmbeddedEngine(), environment, max_turns=2)
    settings = dict(model=MODEL, reward=None, sampling=SamplingParams(max_tokens=6), engine=engine, max_staleness=2)
    return make_data(**(settings | dict(prompts=Addition(3, size=100)) | changes))


def test_a_run_closes_its_environment_once_with_validations_before_and_after_it():
    environment = Counting(again)
    data = data_of(environment, val_prompts=Addition(3, size=8))
    trainer = Trainer(max_steps=2, accelerator="cpu", devices=1, defaults={}, logger=False, enable_checkpointing=False)
    run(trainer, make_module(model=MODEL), data)
    assert environment.closes == [1] * len(environment.episodes)
    assert len(environment.episodes) > 32
    assert (environment.num_closed, environment.num_open_then) == (1, [0])


def test_a_fit_that_fails_and_one_that_follows_close_the_environment_each():
    async def answer():
        if len(environment.episodes) > 20 and environment.num_closed == 0:
            raise ZeroDivisionError("no such tool")
        return DONE

    environment = Counting(answer)
    data = data_of(environment)
    with pytest.raises(RuntimeError, match="no such tool"):
        fit(make_module(model=MODEL), data, max_steps=8)
    assert environment.num_open_then == [0]
    fit(make_module(model=MODEL), data, max_steps=1)
    assert environment.num_open_then == [0, 0]
    assert environment.closes == [1] * len(environment.episodes)


class Made:
    """A Gymnasium environment that notes what happens to it."""

    def __init__(self, notes: list[str], is_open: threading.Event | None = None) -> None:
        self.notes, self.is_open = notes, is_open
        notes.append("made")

    def reset(self, seed=None):
        self.turns = 0
        if self.is_open is not None:
            self.is_open.wait(20)
        return "12+34=", {}

    def step(self, action):
        self.turns += 1
        return "3", 1.0, self.turns == 2, False, {}

    def close(self):
        self.notes.append("closed")


def test_all_gymnasium_environments_of_a_run_are_closed():
    notes: list[str] = []
    before = set(threading.enumerate())

    def make(prompt=None):
        return Made(notes)

    data = data_of(GymnasiumEnvironment(make), prompts=GymnasiumPrompts(make, size=50), val_prompts=Addition(3, size=4))
    fit(make_module(model=MODEL), data, max_steps=2, num_sanity_val_steps=1, limit_val_batches=1)
    assert notes.count("made") > 16
    wait_for(lambda: notes.count("closed") == notes.count("made"))
    wait_for(lambda: not [t for t in set(threading.enumerate()) - before if t.name.startswith("gymnasium")])


def test_a_gymnasium_environment_that_is_made_for_an_aborted_episode_is_closed():
    notes: list[str] = []
    is_open = threading.Event()
    environment = GymnasiumEnvironment(lambda prompt: Made(notes, is_open))
    engine = around(environment, Silent())
    engine.submit([request(0, num_samples=3)])
    poll_for(engine, 20.0, until=lambda _: notes.count("made") == 3)
    engine.abort([0])
    engine.close()
    engine.end()
    is_open.set()
    wait_for(lambda: notes.count("closed") == 3)


def test_a_gymnasium_environment_whose_reset_fails_is_closed():
    notes: list[str] = []

    class Broken(Made):
        def reset(self, seed=None):
            raise OSError("no display")

    async def start():
        await GymnasiumEnvironment(lambda prompt: Broken(notes)).start(Prompt(text=""))

    with pytest.raises(OSError, match="no display"):
        asyncio.run(start())
    with pytest.raises(OSError, match="no display"):
        GymnasiumPrompts(lambda prompt: Broken(notes))[0]
    assert notes == ["made", "closed"] * 2


def test_an_environment_around_another_one_closes_it_too():
    environment = Counting(done)
    engine = around(Delayed(environment))
    engine.submit([request(0, num_samples=2)])
    assert len(poll_for(engine, 20.0, until=lambda found: len(found) == 2)) == 2
    engine.close()
    engine.end()
    assert environment.closes == [1, 1]
    assert environment.num_closed == 1
