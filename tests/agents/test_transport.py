"""Calls of the clients that agents are given, here and in other processes: their answers, and that no more is lost."""

import asyncio
import contextlib
import json
import os
import signal

import httpx
import pytest
from agent_endpoints import TOOL, importable, playing, wait_for

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
ASK = {"model": "m", "messages": [USER], "seed": 5}
CHAT = "/chat/completions"
TEXT = "/completions"

MODULE = """
import asyncio, json, os, pathlib

import httpx
import openai

HERE = pathlib.Path(__file__).parent


async def until(name):
    while not (HERE / name).exists():
        await asyncio.sleep(0.01)


async def both_ways(prompt, client):
    url = str(client.base_url).rstrip("/")
    seen = []
    async with httpx.AsyncClient(timeout=60) as http:
        for path, text, headers in prompt.metadata["cases"]:
            given = {"authorization": f"Bearer {client.api_key}"} | headers
            ways = []
            for way in (client._client, http):
                response = await way.post(url + path, content=text.encode(), headers=given)
                kept = [response.headers.get(name) for name in ("content-type", "cache-control", "x-should-retry")]
                ways.append([response.status_code, kept, response.text])
            seen.append(ways)
    (HERE / "seen").write_text(json.dumps(seen))
    return 1.0


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


def without_numbers(text):
    """An answer without what differs from one call to the next."""

    def plain(value):
        if isinstance(value, dict):
            return {key: plain(one) for key, one in value.items() if key not in ("id", "created")}
        return [plain(one) for one in value] if isinstance(value, list) else value

    events = text.removeprefix("data: ").split("\n\ndata: ") if text.startswith("data: ") else [text]
    return [one if one.strip() == "[DONE]" else plain(json.loads(one)) for one in events]


def test_the_client_of_an_agent_gets_the_answers_of_the_server(module, tmp_path, monkeypatch):
    served = []

    async def counted(request, service, read=app._read_body):
        served.append(request.url.path)
        return await read(request, service)

    monkeypatch.setattr(app, "_read_body", counted)
    good = [
        (CHAT, ASK, {}),
        (CHAT, ASK | {"n": 2, "logprobs": True, "return_token_ids": True}, {}),
        (CHAT, ASK | {"stream": True, "stream_options": {"include_usage": True}}, {}),
        (CHAT, ASK | {"tools": [TOOL]}, {}),
        (TEXT, {"model": "m", "prompt": "52=", "seed": 3}, {}),
        (TEXT, {"model": "m", "prompt": ["52=", "1="], "seed": 3, "stream": True}, {}),
    ]
    bad = [
        (CHAT, ASK | {"n": 0}, {}),
        (CHAT, ASK | {"temperature": 0.3}, {}),
        (CHAT, ASK, {"authorization": "Bearer no-key"}),
        (CHAT, ASK, {"Idempotency-Key": "k" * 300}),
        (CHAT, ASK | {"user": "u" * 3000}, {}),
        (CHAT, ASK | {"seed": 1}, {}),  # one call more than `max_calls`
    ]
    cases = [(path, json.dumps(body), headers) for path, body, headers in [*good, *bad]]
    cases.insert(6, (CHAT, "{'no': JSON}", {}))
    num_calls = 2 * 5 + 2 * 2  # each way; the last of the good ones has two prompts
    clients = EndpointClients(max_body_mb=2000 / 2**20)
    given = {"wrapper": load_agent, "clients": clients, "max_calls": num_calls}
    with episode_of(f"{module}.both_ways", tmp_path, {"cases": cases}, **given) as episodes:
        episodes.results(1)
        seen = json.loads((tmp_path / "seen").read_text())
    assert len(served) == len(cases) - 1, "an unknown key is refused before the body is read, and all else came twice"
    assert [ways[0][0] for ways in seen] == [200] * 6 + [400, 400, 400, 401, 400, 413, 429]
    for case, (direct, by_http) in zip(cases, seen, strict=True):
        assert direct[:2] == by_http[:2], case
        assert without_numbers(direct[2]) == without_numbers(by_http[2]), case
    assert seen[-1][0][1][2] == "false", "the official client would try again"


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

        transport = transport_to(lambda at: True, ask)
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
