"""Agents play samples: what they read trains, those that die are left out, and whatever they do harms no other."""

from __future__ import annotations

import asyncio
import csv
import math
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import lightning.pytorch as pl
import openai
import pytest
import torch
from agent_runs import CODEC, MODEL, TEMPLATE, Branching, playing, request, user
from flow import fit, make_data, make_module, parameters
from instant_episodes import Instant, poll_for

import lit_async_rl as rl
from lit_async_rl.agents.calls import AgentCallError, CallSampling
from lit_async_rl.agents.credit import BranchCredit, Discount, MeanByLeaf, Share
from lit_async_rl.agents.endpoint.clients import EndpointClients
from lit_async_rl.agents.engine import AgentEngine
from lit_async_rl.agents.results import AgentResult
from lit_async_rl.engines.base import SamplingParams
from lit_async_rl.engines.completion_check import run_requests
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.errors import EnvironmentFailure, SetupError
from lit_async_rl.problem import Prompt
from lit_async_rl.ray.placement import Placement
from lit_async_rl.rollouts.group_book import GroupBook, GroupState, pack_groups, unpack_groups
from lit_async_rl.rollouts.resume import is_producer_state
from lit_async_rl.tasks import Addition, CalculatorAgent, CalculatorParser
from lit_async_rl.types import Completion


class Numbered(Instant):
    """Its replies are one token, a new one each; `is_held` keeps them back."""

    def __init__(self, error=None):
        super().__init__(error)
        self.is_held = False
        self.aborted = []
        self.requests = []
        self.lock = threading.Lock()  # agents submit in the loop's thread while another polls

    def submit(self, requests):
        with self.lock:
            super().submit(requests)
            self.requests += requests
            own = {r.id for r in requests}
            token = (2 + len(self.requests) % 90,)
            self.finished = [replace(c, token_ids=token) if c.request_id in own else c for c in self.finished]

    def poll(self, timeout_s):
        time.sleep(min(timeout_s, 0.01))
        with self.lock:
            return [] if self.is_held else super().poll(0.0)

    def abort(self, request_ids):
        with self.lock:
            self.aborted += request_ids
            self.finished = [c for c in self.finished if c.request_id not in set(request_ids)]


def play(agent, num_samples=1, inner=None, **settings):
    """The completions of one request, and the engine."""
    engine = playing(agent, Numbered() if inner is None else inner, **settings)
    try:
        (found,) = run_requests(engine, [request(num_samples=num_samples)], timeout_s=20.0)
    finally:
        engine.close()
        engine.end()
    return found, engine


async def once(prompt, client):
    reply = await client.chat.completions.create(messages=[user(prompt.text)], model="any", temperature=1.0)
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + 1
    return 1.0


def test_the_client_in_the_process_needs_no_server_and_has_no_address(monkeypatch):
    async def asks(prompt, client):
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key=client.api_key, max_retries=0) as other:
            with pytest.raises(openai.APIConnectionError):
                await other.chat.completions.create(model="any", messages=[user(prompt.text)])
        assert client.timeout is None, "the episode has a limit"
        return await once(prompt, client)

    for name in [one for one in sys.modules if one.partition(".")[0] in ("starlette", "uvicorn")]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "lit_async_rl.agents.endpoint.app", None)
    ((completion,), _) = play(asks)
    assert completion.reward == 1.0
    with pytest.raises(ImportError, match=r"lit-async-rl\[agents\]"):  # at the start, and not in the first episode
        EndpointClients().prepare()


# -- the reward and the rows of an episode ----------------------------------------------------------------------------


def test_what_an_agent_returns_is_its_reward():
    async def parts(prompt, client):
        await once(prompt, client)
        return AgentResult(reward=0.5, parts={"style": 0.25, "answer": 0.25})

    ((completion,), _) = play(once)
    assert completion.reward == 1.0
    assert completion.turns[-1].reward == 1.0
    ((completion,), _) = play(parts)
    assert (completion.reward, completion.reward_parts) == (0.5, {"style": 0.25, "answer": 0.25})


def test_each_conversation_that_ends_is_a_row_and_side_calls_train_only_if_asked():
    ((completion,), engine) = play(Branching())
    assert [len(row.prompt_ids or CODEC.encode(request().prompt)) for row in completion.rows] == [4, 8, 4]
    assert [sum(row.loss_mask) for row in completion.rows] == [2, 1, 1]
    assert completion.credit == 1.0
    assert [[turn.call for turn in row.turns] for row in completion.rows] == [[0, 2], [1], [3]]
    assert [[turn.reward for turn in row.turns] for row in completion.rows] == [[0, 0], [0], [completion.reward]]
    assert (engine.stats.num_calls, engine.stats.num_side_turns, engine.stats.num_rows) == (5, 1, 3)
    asked = []

    def all_of_them(call):
        asked.append((call.messages[0]["content"], call.is_side_call, len(call.first_messages)))
        return True

    ((completion,), engine) = play(Branching(), side_calls=all_of_them)
    assert len(completion.rows) == 4
    assert asked == [("title", True, 1)]


@pytest.mark.parametrize(
    ("credit", "expected"),
    [(Share(), [1.0, 1.0, 1.0]), (MeanByLeaf(), [1 / 3] * 3), (Discount(gamma=0.5), [0.5, 0.25, 1.0])],
)
def test_credit_of_branches(credit, expected):
    """The main conversation of `Branching` is that of the first call up to the branch that ended last."""
    ((completion,), _) = play(Branching(), credit=credit)
    credits = [row.credit for row in completion.rows]
    assert sorted(credits) == sorted(expected)
    assert credits[-1] == expected[-1]


def test_calls_of_an_episode_stay_on_one_replica_until_it_is_far_behind():
    """Where their beginning is cached; the samples of a group go to all replicas, so that none of them has the tail."""
    inner = Numbered()
    play(Branching(), num_samples=6, inner=inner)
    by_episode = Counter(one.session for one in inner.requests)
    assert sorted(by_episode.values()) == [5] * 6
    placement = Placement(session_margin=4.0)
    for number in range(2):
        placement.add(number)
    places: dict[int, list[int]] = {}
    for one in inner.requests:
        num_tokens = len(one.prompt_ids) + one.sampling.max_tokens
        places.setdefault(one.session, []).append(placement.place(one.session, num_tokens))
        if len(places[one.session]) > 1:
            placement.finish(places[one.session][-2], num_tokens)
    assert all(len(set(one)) == 1 for one in places.values())
    assert sorted(one[0] for one in places.values()) == [0, 0, 0, 1, 1, 1]
    session, (before, *_) = next(iter(places.items()))
    assert placement.place(session, 10_000) == before  # a call as long as this may wait
    assert placement.place(session, 100) != before


class ByDepth(BranchCredit):
    def __call__(self, branches):
        return [float("nan")] if branches[0].is_main else []


def test_a_wrong_credit_ends_the_run():
    with pytest.raises(ValueError, match="ByDepth must return 3 finite numbers"):
        play(Branching(), credit=ByDepth())


def test_a_history_that_the_agent_has_changed_is_a_drift():
    async def editing(prompt, client):
        messages = [user(prompt.text)]
        (reply,) = await client.episode.complete(messages)
        await client.episode.complete([*messages, {"role": "assistant", "content": f"{reply.text}!"}, user("1")])
        return 1.0

    ((completion,), engine) = play(editing)
    assert engine.stats.drift.other == 1
    assert len(completion.rows) == 2
    assert engine.metrics()["agent/drift_other"] == 1.0


def test_of_turns_that_say_the_same_the_one_is_continued_that_was_continued_before():
    async def twins(prompt, client):
        complete = client.episode.complete
        messages = [user("1")]
        (first,) = await complete(messages)
        longer = [*messages, first.message.as_message(), user("2")]
        (second,) = await complete(longer)
        (twin,) = await complete(messages)  # says the same as the first, and is the latest
        assert twin.text == first.text
        await complete([*longer, second.message.as_message(), user("3")])
        return 1.0

    ((completion,), engine) = play(twins, inner=Instant())
    assert [sum(row.loss_mask) for row in completion.rows] == [3, 1]
    assert engine.stats.drift.total == 0


def test_token_ids_may_continue_with_or_without_the_end_token():
    async def by_ids(prompt, client):
        ids = list(CODEC.encode(prompt))
        for drops_end in (False, True):
            (reply,) = await client.episode.complete_text(ids)
            ids += reply.token_ids[: -1 if drops_end else None]
            ids.append(5)
        await client.episode.complete_text(ids)
        return 1.0

    ((completion,), engine) = play(by_ids, inner=Instant())  # whose replies are the end token
    assert len(completion.rows) == 1
    assert completion.token_ids == (1, 5, 1, 5, 1)
    assert completion.loss_mask == (True, False, True, False, True)
    assert engine.stats.drift.total == 0


# -- retries, cancellation, errors of calls ---------------------------------------------------------------------------


def test_a_call_with_the_same_id_is_never_a_second_sample():
    async def retrying(prompt, client):
        messages = [user(prompt.text)]
        inner.is_held = True
        first = asyncio.ensure_future(client.episode.complete(messages, call_id="a"))
        await asyncio.sleep(0.05)
        first.cancel()
        await asyncio.wait({first})
        inner.is_held = False
        found = [await client.episode.complete(messages, call_id="a") for _ in range(3)]
        assert found[0] == found[1] == found[2]
        (other,) = await client.episode.complete(messages, call_id="b")
        assert other != found[0][0]
        return 1.0

    inner = Numbered()
    ((completion,), engine) = play(retrying, inner=inner)
    assert len(inner.requests) == 2
    assert len(completion.rows) == 2
    assert engine.stats.num_orphans == 0


def test_a_cancelled_call_is_aborted_and_a_reply_that_nobody_read_is_an_orphan():
    async def impatient(prompt, client):
        for call_id in (None, "kept"):
            inner.is_held = True
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(client.episode.complete([user("1")], call_id=call_id), 0.05)
            inner.is_held = False
        await asyncio.sleep(0.1)  # the reply to the second comes, and nobody asks for it again
        await client.episode.complete([user("2")])
        return 1.0

    inner = Numbered()
    ((completion,), engine) = play(impatient, inner=inner)
    assert inner.aborted == [inner.requests[0].id]
    assert completion.branches == ()
    assert sum(completion.loss_mask) == 1
    assert engine.stats.num_orphans == 1


def test_what_an_agent_discards_neither_trains_nor_is_continued():
    """The second try is told the same as the first: its tokens are its own."""

    async def trying_again(prompt, client):
        for attempt in "ab":
            messages = [user("1")]
            for turn in range(2):
                (reply,) = await client.episode.complete(messages, call_id=f"{attempt}{turn}")
                messages += [reply.message.as_message(), user("2")]
            if attempt == "a":
                client.episode.discard(["a0", "a1"])
        return 1.0

    ((completion,), engine) = play(trying_again, inner=Instant())
    assert engine.stats.num_calls == 4
    assert engine.stats.num_orphans == 2
    assert completion.branches == ()
    assert sum(completion.loss_mask) == 2


def test_an_agent_whose_own_task_exits_fails_and_the_others_go_on():
    """asyncio lets `SystemExit` of a task out of the event loop: no agent, and no time limit, would ever end."""

    async def exits():
        sys.exit("there is no key")

    async def careless(prompt, client):
        if not agents:
            agents.append(asyncio.create_task(exits()))
            await agents[0]
        await client.episode.complete([user("1")])
        return 1.0

    agents = []
    ((completion,), _) = play(careless, inner=Instant(), tries=2)
    assert completion.reward == 1.0
    assert isinstance(agents[0].exception(), SystemExit)


def test_bad_calls_get_errors_and_the_agent_goes_on():
    async def clumsy(prompt, client):
        complete = client.episode.complete
        for call, code in (
            (lambda: complete([user("1")], n=0), "invalid_n"),
            (lambda: complete([user("1")], n=True), "invalid_n"),
            (lambda: complete([user("1")], n=10**9), "invalid_n"),
            (lambda: complete([]), "invalid_messages"),
            (lambda: complete([{"role": "wizard", "content": "1"}]), "invalid_messages"),
            (lambda: complete([user("1")], tools=[{"type": "function"}]), "invalid_tools"),
            (lambda: complete([user("1" * 5000)]), "context_length_exceeded"),
            (lambda: client.episode.complete_text(""), "invalid_prompt"),
            (lambda: client.episode.complete_text([10**6]), "invalid_prompt"),
        ):
            with pytest.raises(AgentCallError) as raised:
                await call()
            assert raised.value.code == code
        with pytest.raises(ValueError, match="max_tokens"):
            CallSampling(max_tokens=0)
        return await once(prompt, client)

    ((completion,), engine) = play(clumsy)
    assert completion.reward == 1.0
    assert engine.stats.num_calls == 1


def test_calls_are_limited_and_refused_when_the_episode_is_over():
    episodes = []

    async def greedy(prompt, client):
        episodes.append(client.episode)
        await once(prompt, client)
        await once(prompt, client)
        with pytest.raises(openai.RateLimitError, match="max_calls=2"):
            await once(prompt, client)
        with pytest.raises(AgentCallError, match="max_calls=2") as raised:
            await client.episode.complete([user("1")])
        assert raised.value.status == 429
        return 1.0

    _, engine = play(greedy, max_calls=2)
    (episode,) = episodes
    assert episode.key not in repr(episode)
    assert engine.episode(episode.key) is None
    with pytest.raises(AgentCallError, match="has ended") as raised:
        asyncio.run(episode.complete([user("1")]))
    assert raised.value.status == 401


def test_a_call_gets_the_sampling_of_the_run():
    async def cold(prompt, client):
        asked = CallSampling(max_tokens=2, stop=("x",))
        await client.episode.complete_text("1+1=", sampling=asked)
        await client.completions.create(prompt="1+2=", max_tokens=10**6, model="any")
        return 1.0

    inner = Numbered()
    play(cold, inner=inner)
    first, second = (one.sampling for one in inner.requests)
    assert (first.temperature, first.max_tokens, first.stop) == (1.0, 2, ("x",))
    assert second.max_tokens == 6


def test_calls_may_come_from_another_event_loop():
    """As from a server that has a thread of its own."""

    async def elsewhere(prompt, client):
        reply = await asyncio.to_thread(lambda: asyncio.run(client.episode.complete([user("1+1=")])))
        return float(len(reply))

    ((completion,), _) = play(elsewhere)
    assert completion.reward == 1.0


def test_the_engine_does_not_wait_for_what_a_call_costs(monkeypatch):
    """Templates, tokens and rules of the user: with the engine's lock held, all other episodes would stand still."""
    found = []

    def is_free() -> bool:
        free = engine._lock.acquire(timeout=10.0)
        if free:
            engine._lock.release()
        return free

    def probing(name, function):
        def probed(*args, **settings):
            with ThreadPoolExecutor(1) as pool:
                found.append((name, pool.submit(is_free).result()))
            return function(*args, **settings)

        return probed

    async def agent(prompt, client):
        episode = client.episode
        (reply,) = await episode.complete([user("1+1=")])
        await episode.complete([user("1+1="), reply.message.as_message(), user("2:")])
        (reply,) = await episode.complete_text("1+2=")
        await episode.complete_text(f"1+2={reply.text}3:")
        await episode.complete([{"role": "system", "content": "title"}, user("5")])
        return 1.0

    engine = playing(agent, Numbered(), side_calls=probing("rule", lambda call: False))
    renderer = engine._rules.renderer
    for owner, name in (
        (renderer, "_render"),
        (renderer, "encode"),
        (renderer, "encode_after"),
        (CODEC, "encode"),
        (CODEC, "encode_continuation"),
    ):
        monkeypatch.setattr(owner, name, probing(name, getattr(owner, name)))
    ((completion,),) = run_requests(engine, [request()], timeout_s=120.0)
    engine.close()
    engine.end()
    assert completion.reward == 1.0
    assert {name for name, _ in found} == {"_render", "encode", "encode_after", "encode_continuation", "rule"}
    assert all(free for _, free in found), found


# -- agents that fail -------------------------------------------------------------------------------------------------


async def _raises(prompt, client):
    raise KeyError("no such tool")


async def _exits(prompt, client):
    sys.exit(3)


async def _never_ends(prompt, client):
    await once(prompt, client)
    await asyncio.sleep(1000)


async def _does_not_let_itself_be_cancelled(prompt, client):
    for _ in range(20):  # far beyond its time limit, and within that of what is left in a loop
        try:
            await asyncio.sleep(0.1)
        except asyncio.CancelledError:
            continue


async def _cancels_itself(prompt, client):
    raise asyncio.CancelledError


async def _returns_nothing(prompt, client):
    await once(prompt, client)


async def _returns_nan(prompt, client):
    return math.nan


async def _never_calls(prompt, client):
    return 1.0


FAILURES = {
    _raises: "raised KeyError: 'no such tool'",
    _exits: "exit",
    _never_ends: "did not end within data.engine.timeout_s=0.3",
    _does_not_let_itself_be_cancelled: "did not end within data.engine.timeout_s=0.3",
    _cancels_itself: "was cancelled",
    _returns_nothing: "raised",
    _returns_nan: "raised",
    _never_calls: "trains nothing",
}


@pytest.mark.parametrize("failing", FAILURES, ids=lambda one: one.__name__)
def test_a_group_goes_on_without_the_sample_of_an_agent_that_died(failing, caplog):
    async def agent(prompt, client):
        return await (failing if client.episode.sample_index == 1 else once)(prompt, client)

    limits = {"timeout_s": 0.3 if "timeout_s" in FAILURES[failing] else 60.0}
    found, engine = play(agent, num_samples=3, **limits)
    assert [one.sample_index for one in found] == [0, 2]
    assert engine.stats.num_lost == 1
    assert FAILURES[failing] in caplog.text
    with pytest.raises(EnvironmentFailure, match=FAILURES[failing].split(":")[0]):
        play(agent, num_samples=3, tries=None, **limits)


def test_an_agent_that_fails_has_other_tries():
    keys = []

    async def flaky(prompt, client):
        keys.append(client.episode.key)
        if len(keys) < 3:
            await once(prompt, client)  # of which nothing trains
            raise OSError("the tool is away")
        return await once(prompt, client)

    ((completion,), engine) = play(flaky, tries=3)
    assert len(set(keys)) == 3
    assert len(completion.token_ids) == 1
    assert engine.stats.num_lost == 0


def test_agents_that_fail_always_end_the_run():
    engine = playing(_raises, Numbered())
    engine.submit([request(n) for n in range(10)])
    with pytest.raises(EnvironmentFailure, match="10 prompts in a row could not be played"):
        poll_for(engine, 20.0, until=lambda found: False)
    engine.close()


def test_an_engine_that_fails_is_no_failure_of_the_agent():
    async def twice(prompt, client):
        await once(prompt, client)
        return await once(prompt, client)

    engine = playing(twice, Numbered(error=RuntimeError("out of memory")))
    engine.submit([request()])
    with pytest.raises(RuntimeError, match="out of memory"):
        poll_for(engine, 20.0, until=lambda found: False)
    engine.close()


def test_aborted_episodes_are_cancelled_and_their_errors_ignored():
    ended = []

    async def slow(prompt, client):
        try:
            await once(prompt, client)
            await asyncio.sleep(1000)
        finally:
            ended.append(client.episode.request.id)
            raise ValueError("too late")

    engine = playing(slow, Numbered(), tries=None)
    engine.submit([request(0, num_samples=2), request(1)])
    poll_for(engine, 0.2, until=lambda found: False)
    assert engine.outside_work().num_calls == 3
    engine.abort([0])
    poll_for(engine, 20.0, until=lambda found: ended == [0, 0])
    engine.close()
    assert sorted(ended) == [0, 0, 1]
    engine.end()


def test_what_is_no_agent_is_refused():
    for wrong in (lambda prompt, client: 1.0, "json.dumps", "no_such_module.agent"):
        with pytest.raises(ValueError, match=r"data\.engine\.agent"):
            AgentEngine(EmbeddedEngine(), wrong)
    with pytest.raises(ValueError, match="in_flight_weight_updates"):
        AgentEngine(EmbeddedEngine(in_flight_weight_updates=False), once)
    assert AgentEngine(EmbeddedEngine(), "lit_async_rl.tasks.CalculatorAgent").agent.max_calls == 2


def test_a_template_that_rewrites_history_is_refused_or_forks(tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages|length }}{% for m in messages %}{{ m.content }};{% endfor %}")
    with pytest.raises(SetupError, match=r"data\.engine\.forks=false"):
        playing(once, Numbered(), chat_template=str(template))

    async def twice(prompt, client):
        messages = [user(prompt.text)]
        reply = await client.chat.completions.create(messages=messages)
        messages += [reply.choices[0].message, user("1")]
        await client.chat.completions.create(messages=messages)
        return 1.0

    ((completion,), engine) = play(twice, chat_template=str(template), forks=True)
    assert len(completion.rows) == 2
    assert engine.stats.drift.template == 1


# -- training ---------------------------------------------------------------------------------------------------------


def agent_data(agent, **changes):
    engine = AgentEngine(EmbeddedEngine(num_slots=8), agent, chat_template=TEMPLATE, parser=CalculatorParser())
    settings = dict(model=MODEL, prompts=Addition(3, size=1000), engine=engine, reward=None)
    return make_data(**(settings | dict(sampling=SamplingParams(max_tokens=12), max_staleness=2) | changes))


class Groups(pl.Callback):
    """The groups of each step."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen += trainer.datamodule.last_step_groups


@pytest.mark.slow
def test_a_run_trains_on_branches_and_goes_on_without_dead_agents():
    class Dying(Branching):
        async def __call__(self, prompt, client):
            if client.episode.sample_index == 2:
                raise OSError("killed")
            return await super().__call__(prompt, client)

    groups = Groups()
    module = make_module(model=MODEL)
    fit(module, agent_data(Dying()), 3, [groups])
    assert groups.seen
    for group in groups.seen:
        assert [rollout.sample_index for rollout in group.rollouts] == [0, 1, 3]
        assert all(len(rollout.branches) == 2 for rollout in group.rollouts)
        oldest = min(version for rollout in group.rollouts for version in rollout.all_versions)
        assert oldest >= group.admitted_version


@pytest.mark.slow
def test_the_default_recipe_trains_on_branches_in_trees_fresh_and_resumed(tmp_path, monkeypatch):
    """Weights of whole rollouts and the optimal baseline, with all default callbacks and prefixes computed once."""
    monkeypatch.chdir(tmp_path)
    groups = Groups()
    for steps, checkpoint in ((2, None), (4, "runs/version_0/checkpoints/last.ckpt")):
        engine = AgentEngine(
            EmbeddedEngine(num_slots=8), Branching(), chat_template=TEMPLATE, parser=CalculatorParser()
        )
        trainer = rl.fit(
            MODEL,
            Addition(3, size=1000),
            engine=engine,
            sampling=SamplingParams(max_tokens=12),
            packing=rl.PrefixTreePacking(),
            micro_batches_per_step=2,
            groups_per_step=3,
            group_size=4,
            max_staleness=2,
            max_steps=steps,
            ckpt_path=checkpoint,
            callbacks=[groups],
            accelerator="cpu",
            enable_progress_bar=False,
        )
        assert trainer.global_step == steps
        assert isinstance(trainer.lightning_module.objective.baseline, rl.OptimalBaseline)
    assert all(len(rollout.branches) == 2 for group in groups.seen for rollout in group.rollouts)
    with Path("runs/version_0/metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    for name in ("importance/ess_ratio", "perf/computed_share"):
        shares = [float(row[name]) for row in rows if row[name]]
        assert len(shares) == 4
        assert all(0 < share <= 1 for share in shares)
    assert max(shares) < 1, "computed as separate rows"


@pytest.mark.slow
def test_a_tape_of_branches_is_replayed_to_the_bit(tmp_path):
    recorded, replayed = make_module(model=MODEL), make_module(model=MODEL)
    fit(recorded, agent_data(Branching()), 3, [rl.RolloutTape(str(tmp_path))])
    fit(replayed, agent_data(Branching(), tape=str(tmp_path)), 3)
    assert torch.equal(parameters(recorded), parameters(replayed))


@pytest.mark.slow
def test_the_calculator_agent_plays_through_messages_and_tools():
    engine = AgentEngine(
        EmbeddedEngine(num_slots=8), CalculatorAgent(), chat_template=TEMPLATE, parser=CalculatorParser()
    )
    data = agent_data(CalculatorAgent(), engine=engine)
    groups = Groups()
    fit(make_module(model=MODEL), data, 2, [groups])
    turns = [len(rollout.turns) for group in groups.seen for rollout in group.rollouts]
    assert max(turns) > 1, "nobody calls the calculator"
    assert engine.stats.drift.total == 0


class Saving(Groups):
    """Saves after the first step, once a group waits to be trained on."""

    def __init__(self, path):
        super().__init__()
        self.path = path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        producer = trainer.datamodule.feed.source._producer
        if not self.path.exists():
            with producer.changed:
                producer.changed.wait_for(lambda: producer.book.in_state(GroupState.FINISHED), 20.0)
            trainer.save_checkpoint(self.path)


def producer_state(value):
    """The state of the producer, wherever it is in a checkpoint."""
    if is_producer_state(value):
        return value
    found = (producer_state(item) for item in value.values()) if isinstance(value, dict) else ()
    return next((state for state in found if state is not None), None)


@pytest.mark.slow
def test_a_resumed_run_trains_on_the_saved_rows(tmp_path):
    path = tmp_path / "saved.ckpt"
    fit(make_module(model=MODEL), agent_data(Branching()), 2, [Saving(path)])
    saved = unpack_groups(
        producer_state(torch.load(path, weights_only=True))["groups"], lambda position: Prompt(text="1+1=")
    )
    finished = {group.index: tuple(group.rollouts.values()) for group in saved if group.state is GroupState.FINISHED}
    assert finished
    assert all(len(rollout.branches) == 2 for rollouts in finished.values() for rollout in rollouts)
    groups = Groups()
    fit(make_module(model=MODEL), agent_data(Branching()), 4, [groups], ckpt_path=str(path))
    trained = {group.index: group.rollouts for group in groups.seen}
    assert finished.keys() <= trained.keys()
    assert {index: _without_texts(trained[index]) for index in finished} == {
        index: _without_texts(rollouts) for index, rollouts in finished.items()
    }


def _without_texts(rollouts):
    return [replace(rollout, text="") for rollout in rollouts]


def test_a_book_completes_groups_without_lost_samples():
    book = GroupBook(CODEC, 3, SamplingParams(max_tokens=4))
    (asked,) = book.open(0, 0, Prompt(text="1+2="), version=0)
    one = dict(request_id=asked.id, token_ids=(5,), logprobs=(-1.0,), versions=(0,), finish_reason="stop")
    group, sample = book.collect(Completion(sample_index=2, **one))
    assert not book.reward(group, sample, 1.0)
    assert book.lose(asked.id, 0) is group
    assert not book.finish_if_rewarded(group)
    assert book.lose(asked.id, 2) is None  # it has come
    assert [request.num_samples for request in book.missing(group)] == [1]
    assert book.lose(asked.id, 0) is group  # sample 1, in the request for what was missing
    assert book.finish_if_rewarded(group)
    assert [rollout.sample_index for rollout in group.finished.rollouts] == [2]
    (again,) = unpack_groups(pack_groups([group]), lambda position: Prompt(text="1+2="))
    assert book.restore(replace(again, index=7)) == []
    assert len(book.groups[7].finished.rollouts) == 1


def test_an_agent_that_was_given_by_its_name_is_made_once():
    engine = AgentEngine(EmbeddedEngine(num_slots=3), "lit_async_rl.CalculatorAgent")
    successor = engine.fresh()
    assert successor.agent is engine.agent
    assert successor.clients is engine.clients
    assert successor.num_slots == 3
    other = EmbeddedEngine()
    again = engine.with_engine(other, max_calls=5)
    assert (again.engine, again.agent, again.max_calls) == (other, engine.agent, 5)
