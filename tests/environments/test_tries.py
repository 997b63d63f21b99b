"""An environment that fails is tried again; a wait is measured against the limit of the side that works."""

import asyncio
import dataclasses
import itertools
import threading
import time

import pytest
import torch
from failing_engines import Watch, said
from flow import MODEL as SORT
from flow import fit, make_data, make_module
from instant_episodes import CODEC, Instant, Tool, playing, poll_for, request
from lightning.pytorch.callbacks import ModelCheckpoint
from transformers import AutoModelForCausalLM

from lit_async_rl.assets import asset
from lit_async_rl.engines.base import GenerationRequest, SamplingParams
from lit_async_rl.engines.completion_check import run_requests
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.environments.base import Environment, Episode, Observation
from lit_async_rl.environments.episode_engine import EpisodeEngine
from lit_async_rl.errors import EnvironmentFailure, ProducerError, StalledError
from lit_async_rl.problem import Prompt
from lit_async_rl.rewards.functions import IsolatedReward
from lit_async_rl.rewards.scorer import Scorer, score_all
from lit_async_rl.runtime.retries import MAX_CONSECUTIVE_FAILURES, TryPolicy, Work
from lit_async_rl.tasks import Addition, Calculator

MODEL = asset("calculator_policy")
DONE = Observation(reward=1.0, done=True)
SHORT = dict(sampling=SamplingParams(max_tokens=8), group_size=2)


def test_an_episode_that_fails_is_played_anew_and_nothing_of_the_failed_one_is_left():
    """The environment fails in the second turn of its first episode; two turns of the next are all that comes."""
    episodes = []

    class Shaky(Environment):
        async def start(self, prompt):
            episodes.append(Talk(is_first=not episodes))
            return episodes[-1]

    class Talk(Episode):
        def __init__(self, is_first):
            self.is_first, self.num_turns, self.num_closed = is_first, 0, 0

        async def step(self, completion):
            self.num_turns += 1
            if self.is_first and self.num_turns == 2:
                raise ConnectionError("the tool is gone")
            return Observation(text="4", reward=10.0 * len(episodes), done=self.num_turns == 2)

        async def close(self):
            self.num_closed += 1

    engine = EpisodeEngine(Instant(), Shaky(), tries=2, backoff_s=0.05).around(Instant(), CODEC)
    engine.submit([request(0)])
    (found,) = poll_for(engine, 20.0, until=lambda found: len(found) == 1)
    engine.close()
    assert [turn.reward for turn in found.turns] == [20.0, 20.0]
    assert found.reward == 40.0
    assert len(found.token_ids) == 2 + sum(not own for own in found.loss_mask)
    assert [(conversation.num_turns, conversation.num_closed) for conversation in episodes] == [(2, 1), (2, 1)]
    assert engine.take_given_up() == []


@pytest.mark.parametrize("backoff_s", [0.0, 0.01])
def test_a_request_whose_environment_fails_in_all_tries_is_given_up_with_all_of_its_episodes(backoff_s):
    asked, closed = itertools.count(), []

    class Talk(Episode):
        async def step(self, completion):
            if next(asked) < 3:
                return Observation(text="1")  # the other samples wait for a turn that never comes
            raise ConnectionError("the tool is gone")

        async def close(self):
            closed.append(1)

    class Gone(Environment):
        async def start(self, prompt):
            return Talk()

    engine = EpisodeEngine(Instant(), Gone(), tries=3, backoff_s=backoff_s).around(Instant(), CODEC)
    engine.submit([request(7, num_samples=3)])
    given_up: list[int] = []
    found = poll_for(engine, 20.0, until=lambda _: bool(given_up.extend(engine.take_given_up()) or given_up))
    assert given_up == [7]
    assert found == []
    assert engine.outside_work() is None
    assert not engine._in_engine
    assert not engine.running
    engine.close()
    assert len(closed) >= 3 + 2


def test_an_aborted_episode_is_not_tried_again():
    asked = []

    async def answer():
        asked.append(1)
        raise ConnectionError("the tool is gone")

    engine = playing(answer, tries=9, backoff_s=1000.0)
    engine.submit([request(0)])
    poll_for(engine, 20.0, until=lambda _: len(asked) == 1 and engine.outside_work() is not None)
    engine.abort([0])
    assert engine.outside_work() is None
    assert poll_for(engine, 0.1) == []
    engine.close()
    assert len(asked) == 1


def test_a_run_goes_on_when_an_environment_fails_and_leaves_out_what_always_fails(caplog):
    """Each prompt fails once, and one for ever; the bound holds, and no group is trained twice."""
    seen: set[str] = set()

    class Shaky(Calculator):
        async def start(self, prompt):
            if prompt.text == bad or prompt.text not in seen:
                seen.add(prompt.text)
                raise ConnectionError("no container is free")
            return await super().start(prompt)

    prompts = Addition(3, size=12)
    bad = prompts[3].text
    engine = EpisodeEngine(EmbeddedEngine(), Shaky(), max_turns=3, tries=3)
    data = make_data(model=MODEL, prompts=prompts, engine=engine, reward=None, max_staleness=2, **SHORT)
    watch, texts = Watch(), []

    class Texts(Watch):
        def on_train_batch_end(self, trainer, *_):
            texts.extend(group.prompt.text for group in trainer.datamodule.last_step_groups)

    fit(make_module(model=MODEL), data, 6, [watch, Texts()])
    assert len(set(watch.trained)) == len(watch.trained) == 24
    assert bad not in texts
    assert said(caplog, "of data.engine.tries=3 failed, trying again: environment Shaky on prompt")
    assert said(caplog, "because calls for it failed (data.engine.tries=3 tries); the last error: environment Shaky")


def test_an_environment_that_fails_for_every_prompt_ends_the_run_with_its_name():
    async def answer():
        raise ConnectionError("the tool is gone")

    engine = EpisodeEngine(EmbeddedEngine(), Tool(answer), tries=2)
    data = make_data(model=MODEL, prompts=Addition(3, size=100), engine=engine, reward=None, **SHORT)
    message = r"prompts in a row could not be played, .* tried up to data\.engine\.tries=2 times.*Tool on prompt"
    with pytest.raises(ProducerError, match=f"{MAX_CONSECUTIVE_FAILURES} {message}") as caught:
        fit(make_module(model=MODEL), data, max_steps=3)
    assert isinstance(caught.value.__cause__, EnvironmentFailure)


def test_a_validation_leaves_out_what_its_environment_cannot_play():
    class Picky(Calculator):
        async def start(self, prompt):
            if prompt.text == bad:
                raise ConnectionError("no container is free")
            return await super().start(prompt)

    held_out = Addition(3, size=6)
    bad = held_out[2].text
    engine = EpisodeEngine(EmbeddedEngine(), Picky(), tries=2)
    settings = dict(model=MODEL, prompts=Addition(3, size=100), engine=engine, reward=None, **SHORT)
    data, module = make_data(**settings, val_prompts=held_out), make_module(model=MODEL)
    fit(module, data, max_steps=1, num_sanity_val_steps=1, limit_val_batches=1)
    texts = [sample.prompt.text for sample in module.validator.samples]
    assert sorted(texts) == sorted(prompt.text for prompt in held_out if prompt.text != bad)


def test_an_episode_tried_again_has_the_random_numbers_of_its_sample():
    """Validations of one policy are equal, whatever failed in between."""
    lm = AutoModelForCausalLM.from_pretrained(MODEL).eval()
    source = Addition(3, size=4)
    asked = [
        GenerationRequest(
            id=n,
            prompt_ids=CODEC.encode(source[n]),
            num_samples=3,
            sampling=SamplingParams(max_tokens=8),
            prompt=source[n],
            seed=1000 * n,
        )
        for n in range(4)
    ]
    started = itertools.count(1)

    class Shaky(Calculator):
        async def start(self, prompt):
            if next(started) % 3 == 0:
                raise ConnectionError("no container is free")
            return await super().start(prompt)

    found = []
    for environment in (Calculator(), Shaky()):
        engine = EpisodeEngine(EmbeddedEngine(), environment, tries=9).around(EmbeddedEngine.from_module(lm), CODEC)
        with torch.no_grad():
            found.append(run_requests(engine, asked))
        engine.close()
    assert next(started) > 13
    assert [[c.token_ids for c in row] for row in found[0]] == [[c.token_ids for c in row] for row in found[1]]


@pytest.mark.slow
def test_an_engine_that_is_replaced_while_environments_work_is_not_blamed_on_them(caplog):
    """It breaks in the trainer's thread, while the other one polls; its episodes are cancelled, which is no failure."""
    working, is_open, quick = threading.Event(), threading.Event(), []

    class Patient(Calculator):
        references = None  # nothing but training starts its episodes

        async def start(self, prompt):
            if len(quick) < 4 and prompt.text not in quick:
                quick.append(prompt.text)
            while prompt.text not in quick and not is_open.is_set():
                working.set()
                await asyncio.sleep(0.01)
            return await super().start(prompt)

    class Breaking(EmbeddedEngine):
        num_left = 1

        def load_weights(self, version, weights):
            if version and type(self).num_left:
                type(self).num_left -= 1
                assert working.wait(20)
                raise KeyError("broken")
            super().load_weights(version, weights)

        def fresh(self, out_of_memory=False):
            is_open.set()
            return super().fresh(out_of_memory)

    engine = EpisodeEngine(Breaking(), Patient(), max_turns=3)
    data = make_data(model=MODEL, prompts=Addition(3, size=100), engine=engine, reward=None, max_staleness=2, **SHORT)
    watch = Watch()
    fit(make_module(model=MODEL), data, 3, [watch])
    assert len(set(watch.trained)) == 12
    assert len(said(caplog, "(restarts in a row: 1; limit: data.limits.engine_restarts=3)")) == 1


def test_a_closed_engine_reports_no_failure_of_episodes_it_has_cancelled():
    asked = []

    async def answer():
        asked.append(1)
        await asyncio.sleep(1000)

    engine = playing(answer)
    engine.submit([request(0, num_samples=4)])
    poll_for(engine, 20.0, until=lambda _: len(asked) == 4)
    engine.close()
    assert engine.poll(0.0) == []


def test_a_cut_turn_is_shown_to_the_environment():
    class Cut(Instant):
        def submit(self, requests):
            super().submit(requests)
            self.finished = [dataclasses.replace(c, finish_reason="length") for c in self.finished]

    class Careful(Episode):
        async def step(self, completion):
            raise AssertionError("half a turn was executed")

        async def step_cut(self, completion):
            return Observation(text="go on", reward=-2.0)

    class Start(Environment):
        def __init__(self, make):
            self.make = make

        async def start(self, prompt):
            return self.make()

    async def answer():
        return DONE

    async def fail():
        raise ZeroDivisionError("no such tool")

    for make, reward in ((Careful, -2.0), (lambda: Tool(answer), 1.0)):
        engine = EpisodeEngine(Instant(), Start(make)).around(Cut(), CODEC)
        engine.submit([request(0)])
        (found,) = poll_for(engine, 20.0, until=lambda found: len(found) == 1)
        engine.close()
        assert (found.finish_reason, found.reward, len(found.token_ids)) == ("length", reward, 1)
    engine = EpisodeEngine(Instant(), Tool(fail)).around(Cut(), CODEC)
    engine.submit([request(0)])
    with pytest.raises(EnvironmentFailure, match="no such tool"):
        poll_for(engine, 20.0)
    engine.close()
    engine = EpisodeEngine(Instant(), Tool(fail), step_cut_turns=False).around(Cut(), CODEC)
    engine.submit([request(0)])
    (found,) = poll_for(engine, 20.0, until=lambda found: len(found) == 1)
    engine.close()
    assert (found.finish_reason, found.reward) == ("length", 0.0)


@pytest.fixture
def looks(monkeypatch) -> list[Work]:
    """Work under way, whenever a wait asks whether it keeps to its limit; the trainer asks when its own is over."""
    asked: list[Work] = []
    is_within_limits = Work.is_within_limits.fget

    def look(work: Work) -> bool:
        asked.append(work)
        return is_within_limits(work)

    monkeypatch.setattr(Work, "is_within_limits", property(look))
    return asked


def test_an_environment_within_its_own_limit_does_not_end_the_run(looks, caplog):
    class Slow(Calculator):
        async def start(self, prompt):
            while not looks:
                await asyncio.sleep(0.05)
            return await super().start(prompt)

    engine = EpisodeEngine(EmbeddedEngine(), Slow(), step_timeout_s=100.0)
    settings = dict(model=MODEL, prompts=Addition(3, size=9), engine=engine, reward=None, groups_per_step=1, **SHORT)
    fit(make_module(model=MODEL), make_data(**settings, max_staleness=0, rollout_timeout_s=5.0), max_steps=1)
    assert not said(caplog, "was restarted")
    assert said(caplog, "of environment Slow under way, the oldest for")


def test_an_environment_within_its_own_limit_does_not_end_a_validation(looks):
    async def answer():
        while len(looks) < 4:  # one of them each second
            await asyncio.sleep(0.05)
        return DONE

    engine, signs = playing(answer, step_timeout_s=100.0), []
    (found,) = run_requests(engine, [request(0)], timeout_s=2.0, on_progress=lambda: signs.append(1))
    engine.close()
    assert found[0].reward == 1.0
    assert len(signs) >= 4  # other ranks are told that this one is alive


def test_a_reward_within_its_own_limit_does_not_end_the_run(looks):
    def reward(prompt, completion):
        while not looks:
            time.sleep(0.05)
        return 1.0

    data = make_data(reward=reward, groups_per_step=1, max_staleness=0, rollout_timeout_s=5.0, reward_timeout_s=100.0)
    fit(make_module(), data, max_steps=1)
    assert looks[0].name.startswith("reward test_tries.")


def test_an_environment_that_blocks_its_loop_is_named_and_the_engine_is_not_blamed(monkeypatch):
    monkeypatch.setattr("lit_async_rl.runtime.retries.GRACE_S", 0.2)
    monkeypatch.setattr("lit_async_rl.runtime.loop.CLEANUP_TIMEOUT_S", 0.1)
    monkeypatch.setattr("lit_async_rl.runtime.loop.THREAD_JOIN_TIMEOUT_S", 0.1)
    release = threading.Event()

    class Blocking(Calculator):
        async def start(self, prompt):
            release.wait(60.0)
            return await super().start(prompt)

    engine = EpisodeEngine(EmbeddedEngine(), Blocking(), step_timeout_s=0.5)
    settings = dict(model=MODEL, prompts=Addition(3, size=9), engine=engine, reward=None, engine_restarts=0)
    data = make_data(**settings, groups_per_step=1, max_staleness=0, rollout_timeout_s=5.0, **SHORT)
    try:
        message = (
            r"under way, the oldest for .* of data\.engine\.step_timeout_s=0\.5\. Look at environment Blocking first"
        )
        with pytest.raises(StalledError, match=message):
            fit(make_module(model=MODEL), data, max_steps=1)
    finally:
        release.set()


def test_a_reward_whose_process_would_outlive_its_try_is_refused():
    reward = IsolatedReward("operator.add", timeout_s=60.0)
    with pytest.raises(ValueError, match=r"data\.reward\.timeout_s=60 must be less than data\.scoring\.timeout_s=60"):
        make_data(model=SORT, reward=reward)


def test_failed_tries_of_a_reward_pause_ever_longer():
    policy = TryPolicy(owner="data.scoring", tries=9, backoff_s=0.5)
    assert [policy.pause_s(n) for n in (1, 2, 3, 4)] == [0.5, 1.0, 2.0, 4.0]
    failures = [1, 1, 1]

    def reward(prompt, completion):
        if failures:
            failures.pop()
            raise ConnectionError("the judge is gone")
        return 1.0

    scorer = Scorer(reward, max_tries=4, backoff_s=0.05)
    try:
        assert score_all(scorer, [(Prompt(text="1+1="), "2")], lambda: None) == [1.0]
        assert scorer.work() is None
    finally:
        scorer.close()
    with pytest.raises(ValueError, match=r"data\.engine\.tries must be positive, got 0"):
        EpisodeEngine(EmbeddedEngine(), Calculator(), tries=0)
    with pytest.raises(ValueError, match=r"data\.scoring\.backoff_s must be >= 0 and finite, got -1"):
        Scorer(reward, backoff_s=-1.0)


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_episodes_that_fail(tmp_path):
    """A checkpoint is saved while episodes wait for their next try: they begin again, and no group is trained twice."""
    seen: set[str] = set()

    class Shaky(Calculator):
        async def start(self, prompt):
            if prompt.text not in seen:
                seen.add(prompt.text)
                raise ConnectionError("no container is free")
            return await super().start(prompt)

    def run(max_steps, **settings):
        engine = EpisodeEngine(EmbeddedEngine(), Shaky(), max_turns=3, tries=3, backoff_s=0.1)
        prompts = Addition(3, size=100)
        data = make_data(model=MODEL, prompts=prompts, engine=engine, reward=None, max_staleness=2, **SHORT)
        saves = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=2, save_top_k=-1)
        watch = Watch()
        fit(make_module(model=MODEL), data, max_steps, [watch, saves], enable_checkpointing=True, **settings)
        return watch.trained

    before = run(2)
    after = run(5, ckpt_path=str(tmp_path / "step=2.ckpt"))
    assert len(before) == 8
    assert len(set(before + after)) == len(before + after) == 20
