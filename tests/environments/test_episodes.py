"""Episodes: what is trained on is what the policy wrote, with its own probabilities; slow tools wait side by side."""

import asyncio
import copy
import threading
import time

import pytest
import torch
from flow import fit, make_data, make_module
from transformers import AutoModelForCausalLM

from lit_async_rl.assets import asset
from lit_async_rl.engines.base import GenerationRequest, SamplingParams
from lit_async_rl.engines.completion_check import run_requests
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.environments.base import Environment, Episode, Observation
from lit_async_rl.environments.episode_engine import EpisodeEngine
from lit_async_rl.environments.gymnasium import GymnasiumEnvironment
from lit_async_rl.errors import EnvironmentFailure, ProducerError
from lit_async_rl.models.tokenizer import TextCodec
from lit_async_rl.problem import Prompt
from lit_async_rl.tasks import Addition, Calculator

MODEL = asset("calculator_policy")
SAMPLING = SamplingParams(max_tokens=12)


class Echo(Environment):
    """Answers `turns` times with the number of the turn; each is worth 0.5."""

    def __init__(self, turns: int = 2) -> None:
        self.turns = turns

    async def start(self, prompt):
        return EchoEpisode(self.turns)


class EchoEpisode(Episode):
    def __init__(self, turns):
        self.left, self.said = turns, []

    async def step(self, completion):
        self.said.append(completion)
        self.left -= 1
        return Observation(text=f"<{len(self.said)}>", reward=0.5, done=self.left == 0)


class Failing(Environment):
    def __init__(self, sleeps_s: float = 0.0) -> None:
        self.sleeps_s = sleeps_s

    async def start(self, prompt):
        return self

    async def step(self, completion):
        await asyncio.sleep(self.sleeps_s)
        raise ZeroDivisionError("no such tool")


@pytest.fixture(scope="module")
def lm():
    return AutoModelForCausalLM.from_pretrained(MODEL).eval()


def around(lm, environment, **settings) -> EpisodeEngine:
    codec = TextCodec(MODEL)
    return EpisodeEngine(EmbeddedEngine(), environment, **settings).around(EmbeddedEngine.from_module(lm), codec)


def requests(num: int, samples: int = 2, sampling: SamplingParams = SAMPLING) -> list[GenerationRequest]:
    codec, source = TextCodec(MODEL), Addition(3, size=num)
    return [
        GenerationRequest(
            id=n, prompt_ids=codec.encode(source[n]), num_samples=samples, sampling=sampling, prompt=source[n]
        )
        for n in range(num)
    ]


def calculator_data(**changes):
    engine = EpisodeEngine(EmbeddedEngine(), Calculator(), max_turns=4)
    settings = dict(model=MODEL, prompts=Addition(3, size=1000), engine=engine, reward=None, sampling=SAMPLING)
    return make_data(**(settings | changes))


@torch.no_grad()
def test_each_token_of_the_policy_has_its_probability_in_the_whole_conversation(lm):
    lm = copy.deepcopy(lm).double()  # in float32 rounding alone was 3.3e-5 on one machine
    codec, asked = TextCodec(MODEL), requests(6)
    environment = Echo(turns=3)
    for request, completions in zip(asked, run_requests(around(lm, environment), asked), strict=True):
        assert [c.sample_index for c in completions] == [0, 1]
        for c in completions:
            ids = torch.tensor([[*request.prompt_ids, *c.token_ids]])
            logprobs = torch.log_softmax(lm(ids).logits[0, :-1], -1).gather(-1, ids[0, 1:, None])[:, 0]
            mask = torch.tensor(c.loss_mask)
            mine = torch.tensor(c.logprobs)
            theirs = logprobs[len(request.prompt_ids) - 1 :].float()
            torch.testing.assert_close(mine[mask], theirs[mask], atol=1e-5, rtol=1e-5)
            told = codec.decode([i for i, own in zip(c.token_ids, c.loss_mask, strict=True) if not own])
            turns = told.count("<")
            assert told == "".join(f"<{n + 1}>" for n in range(turns))
            assert len(c.turns) == (3 if c.finish_reason == "stop" else turns + 1)
            assert c.reward == 0.5 * len(c.turns)  # a turn that was cut has its own


def test_an_episode_ends_by_itself_or_by_its_bounds(lm):
    for settings, reason, turns in (({}, "stop", 5), ({"max_turns": 2}, "length", 2)):
        (completions,) = run_requests(around(lm, Echo(turns=5), **settings), requests(1, samples=8))
        assert any(c.finish_reason == reason for c in completions)
        for c in completions:
            assert c.loss_mask[-1]  # nothing that the policy never read
            assert c.reward <= 0.5 * turns
    limit = lm.config.max_position_embeddings
    (completions,) = run_requests(around(lm, Echo(turns=99), max_turns=99), requests(1, samples=4))
    assert all(len(c.token_ids) <= limit for c in completions)
    assert {c.finish_reason for c in completions} == {"length"}


def test_slow_environments_wait_side_by_side(lm):
    began = time.monotonic()
    found = run_requests(around(lm, Calculator(latency_s=0.5)), requests(16, samples=8))
    took = time.monotonic() - began
    calls = sum(not all(c.loss_mask) for completions in found for c in completions)
    assert calls > 20
    assert took < 0.25 * calls * 0.5, f"{calls} calls of half a second took {took:.1f} s"


def test_aborted_episodes_are_never_handed_out(lm):
    engine = around(lm, Calculator(latency_s=0.2))
    asked = requests(8, samples=4)
    engine.submit(asked)
    found = [c for _ in range(5) for c in engine.poll(0.05)]
    engine.abort([r.id for r in asked[:4]])
    until = time.monotonic() + 30
    while sum(c.request_id >= 4 for c in found) < 16 and time.monotonic() < until:
        new = engine.poll(0.1)
        assert all(c.request_id >= 4 for c in new)
        found += new
    assert sum(c.request_id >= 4 for c in found) == 16
    engine.close()


def test_nothing_is_kept_of_episodes_that_have_ended(lm):
    engine = around(lm, Echo(turns=3))
    asked = requests(4)
    engine.submit(asked)
    found: list = []
    deadline = time.monotonic() + 60
    while len(found) < 8 and time.monotonic() < deadline:
        found += engine.poll(0.1)
    engine.close()
    assert len(found) == 8
    assert not engine._in_engine
    assert not engine.running


@pytest.mark.slow
@pytest.mark.parametrize("max_staleness", [0, 2])
def test_training_sees_only_what_the_policy_wrote(max_staleness):
    data = calculator_data(max_staleness=max_staleness)
    module = make_module(model=MODEL)
    fit(module, data, max_steps=4)
    rollouts = [rollout for group in data.last_step_groups for rollout in group.rollouts]
    assert any(not all(rollout.loss_mask) for rollout in rollouts)
    assert module.stabilizer_signals["mask"].sum() == sum(sum(rollout.loss_mask) for rollout in rollouts)
    if max_staleness == 0:  # on-policy: the trainer's probabilities are the engine's, over all turns
        assert module.stabilizer_signals["log_ratio"][module.stabilizer_signals["mask"]].abs().max() < 1e-4
    for rollout in rollouts:
        assert list(rollout.versions) == sorted(rollout.versions)
        assert 3 - rollout.versions[0] <= max_staleness


def test_an_environment_that_breaks_or_hangs_ends_the_run_with_its_name():
    for environment, message in (
        (Failing(), r"Failing on prompt '\d+\+\d+=', turn .* raised ZeroDivisionError: no such tool"),
        (Failing(sleeps_s=60), r"did not answer within step_timeout_s=0\.5"),
    ):
        engine = EpisodeEngine(EmbeddedEngine(), environment, step_timeout_s=0.5)
        began = time.monotonic()
        with pytest.raises(ProducerError, match=message) as caught:
            fit(make_module(model=MODEL), calculator_data(engine=engine), max_steps=3)
        assert isinstance(caught.value.__cause__, EnvironmentFailure)
        assert time.monotonic() - began < 20


def test_a_validation_that_fails_leaves_no_thread():
    data = calculator_data(engine=EpisodeEngine(EmbeddedEngine(), Failing()), val_prompts=Addition(3, size=4))
    module, before = make_module(model=MODEL), set(threading.enumerate())
    with pytest.raises(EnvironmentFailure, match="no such tool"):
        fit(module, data, max_steps=1, num_sanity_val_steps=1, limit_val_batches=1)
    assert not [t for t in set(threading.enumerate()) - before if t.name == "environments"]


def test_settings_that_contradict_each_other_are_named():
    with pytest.raises(ValueError, match=r"EpisodeEngine\) gives rewards itself"):
        calculator_data(reward=lambda prompt, text: 1.0)
    with pytest.raises(ValueError, match=r"data\.reward=None, but data\.engine \(EmbeddedEngine\) gives no rewards"):
        make_data(reward=None)
    with pytest.raises(ValueError, match="in_flight_weight_updates=true"):
        EpisodeEngine(EmbeddedEngine(in_flight_weight_updates=False), Calculator())
    with pytest.raises(ValueError, match=r"data\.admission=FixedLag"):
        calculator_data(schedule="fixed_lag")
    with pytest.raises(ValueError, match=r"max_turns must be >= 1, got 0"):
        EpisodeEngine(EmbeddedEngine(), Calculator(), max_turns=0)


def test_gymnasium_style_environments_can_be_talked_to():
    class Guess:
        def reset(self, seed=None):
            self.secret, self.tries = seed, 0
            return "guess", {}

        def step(self, action):
            self.tries += 1
            right = action == str(self.secret)
            return ("yes" if right else "no"), float(right), right, self.tries == 3, {}

    async def play(actions):
        episode = await GymnasiumEnvironment(lambda prompt: Guess()).start(Prompt(text="guess", metadata={"seed": 7}))
        return [await episode.step(action) for action in actions]

    wrong, right = asyncio.run(play(["4", "7"]))
    assert (wrong.text, wrong.reward, wrong.done) == ("no", 0.0, False)
    assert (right.reward, right.done) == (1.0, True)
    assert asyncio.run(play("456"))[-1].done
