"""Calls of the clients that agents are given, here and in other processes: their answers, and that no more is lost."""

import asyncio
import contextlib
import os
import signal

import httpx
import openai
import pytest
from agent_endpoints import importable, playing, wait_for

from lit_async_rl.agents import EndpointClients, ProcessAgent
from lit_async_rl.agents.api.exchange import ApiResponse
from lit_async_rl.agents.api.transport import transport_to
from lit_async_rl.agents.endpoint import app
from lit_async_rl.agents.endpoint.process import MAX_REPLY_BYTES, AgentProcessEnded, _Worker
from lit_async_rl.agents.engine import load_agent
from lit_async_rl.problem import Prompt
from lit_async_rl.runtime.process import Child

pytestmark = pytest.mark.timeout(240)
USER = {"role": "user", "content": "8312="}

MODULE = """
import asyncio, os, pathlib

import openai

HERE = pathlib.Path(__file__).parent


async def until(name):
    while not (HERE / name).exists():
        await asyncio.sleep(0.01)


async def asks(prompt, client):
    arguments = dict(model="m", messages=[{"role": "user", "content": "8312="}])
    await client.chat.completions.create(**arguments)
    (HERE / "asked").touch()
    await until("paused")
    said = ""
    try:
        other = client.with_options(timeout=prompt.metadata["timeout"], max_retries=prompt.metadata["max_retries"])
        await other.chat.completions.create(**arguments)
    except openai.OpenAIError as error:
        said = f"{type(error).__name__}: {error}"
    (HERE / "said.new").write_text(said)
    (HERE / "said.new").rename(HERE / "said")
    await until("over")
    return 1.0


async def shouts(prompt, client):
    arguments = dict(model="m", messages=[{"role": "user", "content": "8312="}])
    try:
        await client.chat.completions.create(**arguments, extra_headers={"Idempotency-Key": "k" * 2**21})
    except openai.OpenAIError:
        await client.chat.completions.create(**arguments)
        return 1.0


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


HERE_AND_ELSEWHERE = pytest.mark.parametrize("wrapper", [load_agent, ProcessAgent], ids=["here", "elsewhere"])


@contextlib.contextmanager
def episode_of(agent, folder, metadata, *, wrapper=ProcessAgent, clients=None, **settings):
    """An episode that begins; files in the test's folder say how far it is."""
    prompt = Prompt(text="sort", metadata=metadata)
    with playing(wrapper(agent), folder, prompt, clients=clients or EndpointClients(), **settings) as episodes:
        yield episodes
    assert not episodes.errors, episodes.errors


def pause_after_the_first_call(episodes, folder):
    """What `asks` asks for next is not sampled before `resume`."""
    wait_for((folder / "asked").exists)
    episodes.pause()
    (folder / "paused").touch()


def calls_of(episodes):
    return next(iter(episodes.engine.running))._calls


def test_the_client_of_an_agent_needs_no_connection(module, tmp_path, monkeypatch):
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
    with episode_of(agent, tmp_path, {}, wrapper=load_agent) as episodes:
        episodes.results(1)
    assert served == ["/v1/completions"]


@HERE_AND_ELSEWHERE
def test_a_client_that_times_out_gets_one_sample_for_all_its_tries(module, tmp_path, wrapper):
    with episode_of(f"{module}.asks", tmp_path, {"timeout": 0.3, "max_retries": 50}, wrapper=wrapper) as episodes:
        pause_after_the_first_call(episodes, tmp_path)
        (session,) = episodes.endpoint.service._sessions.values()
        wait_for(lambda: any(call.attempt >= 2 for calls in session.book._calls.values() for call in calls))
        episodes.resume()
        wait_for((tmp_path / "said").exists)
        assert (tmp_path / "said").read_text() == ""
        assert len(calls_of(episodes)) == 2
        (tmp_path / "over").touch()
        (sample,) = episodes.results(1)
    assert len(sample.rows) == 2
    assert episodes.engine.stats.num_orphans == 0


@HERE_AND_ELSEWHERE
def test_what_a_client_that_went_has_asked_for_is_not_trained(module, tmp_path, wrapper):
    with episode_of(f"{module}.asks", tmp_path, {"timeout": 0.3, "max_retries": 0}, wrapper=wrapper) as episodes:
        pause_after_the_first_call(episodes, tmp_path)
        wait_for((tmp_path / "said").exists)
        assert "APITimeoutError" in (tmp_path / "said").read_text()
        wait_for(lambda: not calls_of(episodes)[-1].num_waiting)
        episodes.resume()
        wait_for(lambda: calls_of(episodes)[-1].replies.done())
        (tmp_path / "over").touch()
        (sample,) = episodes.results(1)
    assert len(sample.rows) == 1
    assert episodes.engine.stats.num_orphans == 1


@HERE_AND_ELSEWHERE
def test_a_header_of_megabytes_is_refused_and_harms_nobody(module, tmp_path, wrapper):
    with episode_of(f"{module}.shouts", tmp_path, {}, wrapper=wrapper) as episodes:
        (sample,) = episodes.results(1)
    assert sample.reward == 1.0
    assert len(sample.rows) == 1


def test_nobody_waits_for_the_answers_to_a_process_that_was_killed(module, tmp_path):
    with episode_of(f"{module}.asks_once", tmp_path, {}, tries=2) as episodes:
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
        replies, messages = await asyncio.open_connection(sock=child.socket)
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
    assert reason_of_the_end(said).startswith("sent what is no reply (")


def test_a_process_that_ends_in_the_middle_has_ended():
    assert reason_of_the_end(framed(b'{"call": 7}') + b"half") == ""
