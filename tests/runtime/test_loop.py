"""Event loops in threads: calls that end in time, loops that are blocked, and who is named for it."""

import asyncio
import threading
import time
from contextlib import ExitStack

import agent_endpoints
import agent_runs
import instant_episodes
import pytest
from instant_episodes import poll_for

import lit_async_rl as rl
from lit_async_rl.agents import EndpointClients
from lit_async_rl.environments.base import Observation
from lit_async_rl.errors import EngineError, StalledError
from lit_async_rl.problem import Prompt
from lit_async_rl.rewards.scorer import Scorer, score_all
from lit_async_rl.runtime import loop
from lit_async_rl.runtime.loop import LoopTasks, LoopThread, ReplaceableLoop, SharedLoop
from lit_async_rl.runtime.waiting import CLOCK_INTERVAL_S, clock

PROMPT = Prompt(text="8312=", answer="1238")
WAIT_S = 20.0


def test_a_call_into_the_loop_ends_in_time():
    thread = LoopThread("a loop")
    with pytest.raises(StalledError, match=r"sleeping did not end within 0\.2 s"):
        thread.call(asyncio.sleep(60), 0.2, "sleeping")
    threading.Timer(0.2, lambda: thread.close(asyncio.sleep(0))).start()
    with pytest.raises(EngineError, match="a loop was closed during sleeping"):
        thread.call(asyncio.sleep(60), 30.0, "sleeping")


def test_a_call_that_ends_before_its_timeout_is_not_cancelled():
    thread = LoopThread("a loop")
    try:
        assert thread.call(asyncio.sleep(0.6, "done"), 0.74, "sleeping") == "done"  # not a multiple of POLL_INTERVAL_S
    finally:
        thread.close(asyncio.sleep(0))


def test_a_task_that_exits_ends_neither_the_loop_nor_its_time_limits():
    thread = LoopThread("a loop")

    async def leave():
        raise SystemExit(3)

    try:
        with pytest.raises(SystemExit):
            thread.call(leave(), WAIT_S, "leaving")
        assert thread.call(asyncio.wait_for(asyncio.sleep(0.01, "done"), 10.0), WAIT_S, "sleeping") == "done"
    finally:
        thread.close()


def test_a_blocked_loop_is_replaced_for_later_calls_and_ends_when_it_can(monkeypatch):
    monkeypatch.setattr(loop, "ANSWER_S", 0.1)
    released, before = threading.Event(), threading.active_count()

    async def block():
        released.wait(WAIT_S)

    calls = ReplaceableLoop("a loop", runs="a test")
    with pytest.raises(StalledError, match="waiting did not end"):
        calls.call(asyncio.sleep(60), 0.1, "waiting")
    assert calls.num_blocked == 0  # it only takes long
    first = calls.get()
    with pytest.raises(StalledError, match="blocking did not end"):
        calls.call(block(), 0.2, "blocking")
    assert calls.num_blocked == 1
    assert calls.get() is not first
    assert calls.call(asyncio.sleep(0, "done"), WAIT_S, "sleeping") == "done"
    released.set()
    assert first.answers(WAIT_S)
    calls.close()
    assert threading.active_count() <= before + 1  # the clock


def test_a_shared_loop_that_is_blocked_is_given_up(monkeypatch):
    monkeypatch.setattr(loop, "CLEANUP_TIMEOUT_S", 0.1)
    monkeypatch.setattr(loop, "THREAD_JOIN_TIMEOUT_S", 0.1)
    blocked, released, done = threading.Event(), threading.Event(), threading.Event()

    async def block():
        blocked.set()
        released.wait(WAIT_S)

    async def note():
        done.set()

    shared = SharedLoop("a loop", runs="a test")
    tasks = LoopTasks(shared)
    tasks.begin(1, block())
    assert blocked.wait(WAIT_S)
    tasks.close()
    others = LoopTasks(shared)
    others.begin(1, note())
    assert done.wait(WAIT_S)
    released.set()
    others.close()


# -- Watchdog ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def block(monkeypatch, caplog):
    """Blocks its thread until the log says so; `block.named` has the messages."""

    def block():
        deadline = time.monotonic() + WAIT_S
        while not named() and time.monotonic() < deadline:
            time.sleep(0.01)

    def named():
        return [text for text in caplog.messages if "has blocked its event loop" in text]

    monkeypatch.setattr(loop, "BLOCKED_S", 2 * CLOCK_INTERVAL_S)
    block.named = named
    return block


def test_who_blocks_a_loop_for_five_seconds_is_named_within_ten_and_once(block):
    async def blocking():
        block()
        time.sleep(3 * CLOCK_INTERVAL_S)

    num_watchers = len(clock.watchers)
    thread = LoopThread("a loop", runs="a test")
    try:
        thread.call(asyncio.sleep(4 * CLOCK_INTERVAL_S), WAIT_S, "waiting")
        assert block.named() == []
        thread.call(blocking(), WAIT_S, "blocking")
    finally:
        thread.close()
    (message,) = block.named()
    assert message.startswith("a test has blocked its event loop for 0.5 s")
    assert __file__ in message
    assert "in block\n    time.sleep(0.01)" in message
    assert len(clock.watchers) <= num_watchers


def test_its_default_is_five_seconds():
    assert loop.BLOCKED_S == 5.0
    assert loop.BLOCKED_S + 4 * CLOCK_INTERVAL_S < 10.0


def block_in_an_environment(block, folder):
    async def answer():
        block()
        return Observation(reward=1.0, done=True)

    engine = instant_episodes.playing(answer)  # as in a validation
    engine.submit([instant_episodes.request(0)])
    poll_for(engine, WAIT_S, until=lambda found: found)
    engine.close()


def blocking_agent(block):
    async def agent(prompt, client):
        block()
        messages = [{"role": "user", "content": prompt.text}]
        await client.chat.completions.create(model="any", messages=messages)
        return 1.0

    return agent


def block_in_an_agent(block, folder):
    engine = agent_runs.playing(blocking_agent(block))
    engine.submit([agent_runs.request()])
    poll_for(engine, WAIT_S, until=lambda found: found)
    engine.close()


def block_behind_the_endpoint(block, folder):
    with agent_endpoints.playing(blocking_agent(block), folder, PROMPT, clients=EndpointClients()) as episodes:
        assert episodes.results(1)[0].reward == 1.0


def block_in_an_async_reward(block, folder):
    async def reward(prompt, completion):
        block()
        return 1.0

    score_with(reward)


def block_in_an_awaitable_of_a_reward(block, folder):
    async def late():
        block()
        return 1.0

    def reward(prompt, completion):
        return late()

    score_with(reward)


def score_with(reward):
    scorer = Scorer(reward, timeout_s=WAIT_S)
    try:
        assert score_all(scorer, [(PROMPT, "1")], lambda: None) == [1.0]
    finally:
        scorer.close()


def block_in_a_judge(block, folder):
    async def fallback(prompt, completion):
        block()
        return 1.0

    nowhere = dict(base_url="http://127.0.0.1:9/v1", limits=rl.JudgeLimits(backoff_s=0.01, tries=1), cache=None)
    judge = rl.JudgeReward("a-judge", on_failure="fallback", fallback=fallback, **nowhere)
    with ExitStack() as stack:
        stack.callback(judge.close)
        assert asyncio.run(judge(PROMPT, "4")) == 1.0


@pytest.mark.parametrize(
    ("user", "name"),
    [
        (block_in_an_environment, "environment Tool"),
        (block_in_an_agent, "agent blocking_agent.<locals>.agent"),
        (block_behind_the_endpoint, "agent blocking_agent.<locals>.agent"),
        (block_in_an_async_reward, "reward test_loop.block_in_an_async_reward.<locals>.reward"),
        (block_in_an_awaitable_of_a_reward, "reward test_loop.block_in_an_awaitable_of_a_reward.<locals>.reward"),
        (block_in_a_judge, "JudgeReward judge"),
    ],
)
def test_users_code_that_blocks_is_named(user, name, block, tmp_path):
    user(block, tmp_path)
    assert any(message.startswith(f"{name} has blocked its event loop") for message in block.named())
