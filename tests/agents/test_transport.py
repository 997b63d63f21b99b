"""Calls of the clients that agents are given, which need no connection: their answers, and that no more is lost."""

import asyncio
import contextlib
import os
import queue
import signal
import threading

import httpx
import openai
import pytest
from agent_endpoints import WAIT_S, importable, playing, wait_for

from lit_async_rl.agents import EndpointClients, ProcessAgent
from lit_async_rl.agents.api.exchange import ApiResponse
from lit_async_rl.agents.api.transport import transport_to
from lit_async_rl.agents.endpoint import app
from lit_async_rl.agents.endpoint.process import MAX_REPLY_BYTES, AgentProcessEnded, _Worker
from lit_async_rl.problem import Prompt
from lit_async_rl.runtime.process import Child

pytestmark = pytest.mark.timeout(240)
USER = {"role": "user", "content": "8312="}

MODULE = """
import os, pathlib

HERE = pathlib.Path(__file__).parent


async def asks_once(prompt, client):
    (HERE / str(os.getpid())).touch()
    await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "8312="}])
    return 1.0
"""


@pytest.fixture
def module(tmp_path):
    """Name of the module of these agents."""
    with importable(tmp_path, MODULE) as name:
        yield name


@contextlib.contextmanager
def episode_of(agent, folder, **settings):
    """An episode that begins."""
    with playing(agent, folder, Prompt(text="sort"), clients=EndpointClients(), **settings) as episodes:
        yield episodes
    assert not episodes.errors, episodes.errors


def calls_of(episodes):
    return next(iter(episodes.engine.running))._calls


def test_the_client_of_an_agent_needs_no_connection(tmp_path, monkeypatch):
    served = []

    async def counted(request, service, read=app._read_body):
        served.append(request.url.path)
        return await read(request, service)

    async def agent(prompt, client):
        await client.chat.completions.create(model="m", messages=[USER])
        assert not served
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key=client.api_key) as other:
            await other.completions.create(model="m", prompt="52=")
        return 1.0

    monkeypatch.setattr(app, "_read_body", counted)
    with episode_of(agent, tmp_path) as episodes:
        episodes.results(1)
    assert served == ["/v1/completions"]


class Asks:
    """An agent whose second call is asked for when nothing is sampled, and that ends when it is told to."""

    def __init__(self, **options):
        self.options = options
        self.asked, self.paused, self.over = (threading.Event() for _ in range(3))
        self.said = queue.SimpleQueue()

    async def __call__(self, prompt, client):
        await client.chat.completions.create(model="m", messages=[USER])
        self.asked.set()
        await asyncio.to_thread(self.paused.wait, WAIT_S)
        try:
            self.said.put(await client.with_options(**self.options).chat.completions.create(model="m", messages=[USER]))
        except openai.OpenAIError as error:
            self.said.put(error)
        await asyncio.to_thread(self.over.wait, WAIT_S)
        return 1.0

    def pause(self, episodes):
        assert self.asked.wait(WAIT_S)
        episodes.pause()
        self.paused.set()


def test_a_client_that_times_out_gets_one_sample_for_all_its_tries(tmp_path):
    agent = Asks(timeout=0.3, max_retries=50)
    with episode_of(agent, tmp_path) as episodes:
        agent.pause(episodes)
        (session,) = episodes.endpoint.service._sessions.values()
        wait_for(lambda: any(call.attempt >= 2 for calls in session.book._calls.values() for call in calls))
        episodes.resume()
        assert agent.said.get(timeout=WAIT_S).choices
        assert len(calls_of(episodes)) == 2
        agent.over.set()
        (sample,) = episodes.results(1)
    assert len(sample.rows) == 2
    assert episodes.engine.stats.num_orphans == 0


def test_what_a_client_that_went_has_asked_for_is_not_trained(tmp_path):
    agent = Asks(timeout=0.3, max_retries=0)
    with episode_of(agent, tmp_path) as episodes:
        agent.pause(episodes)
        assert isinstance(agent.said.get(timeout=WAIT_S), openai.APITimeoutError)
        wait_for(lambda: not calls_of(episodes)[-1].num_waiting)
        episodes.resume()
        wait_for(lambda: calls_of(episodes)[-1].replies.done())
        agent.over.set()
        (sample,) = episodes.results(1)
    assert len(sample.rows) == 1
    assert episodes.engine.stats.num_orphans == 1


@pytest.mark.slow
def test_nobody_waits_for_the_answers_to_a_process_that_was_killed(module, tmp_path):
    with episode_of(ProcessAgent(f"{module}.asks_once"), tmp_path, tries=2) as episodes:
        episodes.pause()
        wait_for(lambda: episodes.engine.running and calls_of(episodes))
        (first,) = calls_of(episodes)
        (pid,) = [int(path.name) for path in tmp_path.iterdir() if path.name.isdecimal()]
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not first.num_waiting)
        episodes.resume()
        (sample,) = episodes.results(1)
    assert len(sample.rows) == 1
    assert episodes.engine.stats.num_lost == 0


def test_an_answer_that_comes_as_its_client_goes_is_lost():
    lost = []

    async def play():
        answered = asyncio.get_running_loop().create_future()

        async def ask(call):
            return await answered

        transport = transport_to(ask)
        request = httpx.Request("POST", "http://127.0.0.1:1/v1/chat/completions", content=b"{}")
        task = asyncio.ensure_future(transport.handle_async_request(request))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        answered.set_result(ApiResponse(body=b"{}", lose=lambda: lost.append("here")))
        await asyncio.sleep(0)  # the answer is there, and nobody has taken it
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()

    asyncio.run(play())
    assert lost == ["here"]


# -- what a process says that is no reply ------------------------------------------------------------------------------


def framed(text: bytes) -> bytes:
    return len(text).to_bytes(8, "big") + bytes(8) + text


def reason_of_the_end(said: bytes) -> str:
    """Why a process that says this was killed."""

    async def play():
        child = Child(["sh", "-c", "exec cat >&0"], name="agent")  # says what it is told
        replies, messages = await child.streams()
        worker = _Worker("agent", child, replies, messages=messages)
        worker._waiting[1] = asyncio.get_running_loop().create_future()
        messages.write(said)
        messages.write_eof()
        await worker._read()
        reason = worker._reason
        await worker.end()
        assert isinstance(worker._waiting[1].exception(), AgentProcessEnded)
        return reason

    return asyncio.run(play())


@pytest.mark.parametrize(
    "said",
    [
        framed(b'{"call": "1"}'),
        framed(b'{"call": 1}'),
        framed(b'{"call": 1, "reward": NaN, "parts": {}}'),
        framed(b'{"call": 1, "reward": 1.0, "parts": [1]}'),
        framed(b"[1]"),
        framed(b"\xff"),
        framed(b"[" * 10_000),
        (MAX_REPLY_BYTES + 1).to_bytes(8, "big") + bytes(8),
    ],
    ids=lambda said: repr(said[16:40]),
)
def test_a_process_that_says_what_is_no_reply_is_killed(said):
    assert reason_of_the_end(said).startswith("sent something that is not a reply (")


def test_a_process_that_ends_in_the_middle_has_ended():
    assert reason_of_the_end(framed(b'{"call": 7}') + b"half") == ""
