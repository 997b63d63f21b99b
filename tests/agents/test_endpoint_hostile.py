"""Requests that are broken or hostile: each gets the API's error, and no other episode notices."""

import contextlib
import http.client
import json
import select
import socket
import sys
from urllib.parse import urlsplit

import httpx
import pytest
from agent_endpoints import TOOL, WAIT_S, held, wait_for

from lit_async_rl.agents import AgentCallError
from lit_async_rl.agents import episode as episode_file
from lit_async_rl.agents.api.bodies import CallLimits, chat_call, parse_body, text_call
from lit_async_rl.agents.api.retries import digest_of
from lit_async_rl.agents.endpoint import app
from lit_async_rl.agents.endpoint.clients import EndpointClients
from lit_async_rl.types import SamplingParams

USER = {"role": "user", "content": "83="}
ASK = {"model": "m", "messages": [USER]}
pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two episodes: one that is well, and one that sends what it should not."""
    with held(tmp_path_factory.mktemp("pair"), num_samples=2) as (episodes, (good, bad)):
        yield episodes, good, bad


def send(client, content, path="/chat/completions", **headers) -> httpx.Response:
    url = str(client.base_url).rstrip("/") + path
    sent = {"Authorization": f"Bearer {client.api_key}"} | headers
    return httpx.post(url, content=content, headers=sent, timeout=WAIT_S)


def well(client) -> None:
    """The other episode gets its answers."""
    answer = send(client, json.dumps(ASK))
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["message"]["content"] is not None


def checked(response: httpx.Response) -> dict:
    """An error in the API's form."""
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert len(response.content) < 2000, "an error repeats what was sent"
    return error


# -- bodies that can be tested without a server -----------------------------------------------------------------------


def message(**changes) -> dict:
    return {"model": "m", "messages": [USER, USER | changes]}


def tool(**changes) -> dict:
    return ASK | {"tools": [{"type": "function", "function": TOOL["function"] | changes}]}


BROKEN = [
    ({"messages": [USER]}, "model"),
    ({"model": 3, "messages": [USER]}, "model"),
    ({"model": "m"}, "messages"),
    ({"model": "m", "messages": []}, "messages"),
    ({"model": "m", "messages": "text"}, "messages"),
    ({"model": "m", "messages": ["text"]}, "messages[0]"),
    (message(role="assistant", function_call={"name": "a"}), "messages[1].function_call"),
    (message(audio={"id": "a"}), "messages[1].audio"),
    (ASK | {"n": 0}, "n"),
    (ASK | {"n": -1}, "n"),
    (ASK | {"n": 1.5}, "n"),
    (ASK | {"n": True}, "n"),
    (ASK | {"n": 10**9}, "n"),
    (ASK | {"n": 10**400}, "n"),
    (ASK | {"max_tokens": 0}, "max_tokens"),
    (ASK | {"max_completion_tokens": "5"}, "max_completion_tokens"),
    (ASK | {"stop": [""]}, "stop[0]"),
    (ASK | {"stop": 5}, "stop"),
    (ASK | {"stop": ["a"] * 5}, "stop"),
    (ASK | {"stop": ["a", "b" * 257]}, "stop[1]"),
    (ASK | {"stream": "yes"}, "stream"),
    (ASK | {"stream_options": {"include_usage": True}}, "stream_options"),
    (ASK | {"stream": True, "stream_options": 5}, "stream_options"),
    (ASK | {"logprobs": 5}, "logprobs"),
    (ASK | {"top_logprobs": 5}, "top_logprobs"),
    (ASK | {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (ASK | {"seed": "x"}, "seed"),
    (ASK | {"seed": 2**70}, "seed"),
    (ASK | {"temperature": "hot"}, "temperature"),
    (ASK | {"temperature": True}, "temperature"),
    (ASK | {"chat_template_kwargs": []}, "chat_template_kwargs"),
    (ASK | {"colour": "blue"}, "colour"),
    (ASK | {"tools": {}}, "tools"),
    (ASK | {"tools": [TOOL] * 200}, "tools"),
    (ASK | {"tools": [{"type": "retrieval"}]}, "tools"),
    (ASK | {"tools": [{"type": "function", "function": {}}]}, "tools"),
    (tool(name=5), "tools"),
    (tool(parameters="text"), "tools"),
    (ASK | {"tool_choice": "auto"}, "tool_choice"),
    (ASK | {"tool_choice": "required"}, "tool_choice"),
    (tool() | {"tool_choice": "sometimes"}, "tool_choice"),
    (tool() | {"tool_choice": {"type": "function", "function": {"name": "sub"}}}, "tool_choice"),
    (tool() | {"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    (ASK | {"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    (ASK | {"response_format": "json"}, "response_format"),
    (ASK | {"response_format": {"type": "grammar"}}, "response_format.type"),
    (ASK | {"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (
        ASK | {"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}},
        "response_format.json_schema.name",
    ),
    (
        ASK | {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "x"}}}},
        "response_format.json_schema.schema",
    ),
    (ASK | {"previous_response_id": "resp_1"}, "previous_response_id"),
    (ASK | {"functions": [{"name": "a"}]}, "functions"),
    (ASK | {"guided_json": {}}, "guided_json"),
    (ASK | {"min_tokens": False}, "min_tokens"),
]


@pytest.mark.parametrize(("body", "param"), BROKEN, ids=[f"{n}-{param}" for n, (_, param) in enumerate(BROKEN)])
def test_what_is_wrong_with_a_chat_is_named(body, param):
    with pytest.raises(AgentCallError) as error:
        chat_call({k: v for k, v in body.items() if v is not None}, SamplingParams(), CallLimits())
    assert error.value.status == 400
    assert error.value.param == param
    assert param.partition("[")[0] in str(error.value)
    assert len(str(error.value)) < 500


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"model": "m"}, "prompt"),
        ({"model": "m", "prompt": []}, "prompt"),
        ({"model": "m", "prompt": [-1]}, "prompt"),
        ({"model": "m", "prompt": [True]}, "prompt"),
        ({"model": "m", "prompt": ["a", 5]}, "prompt"),
        ({"model": "m", "prompt": {"a": 1}}, "prompt"),
        ({"model": "m", "prompt": ["a"] * 200}, "prompt"),
        ({"model": "m", "prompt": ["a"] * 100, "n": 2}, "n"),
        ({"model": "m", "prompt": "a", "echo": True}, "echo"),
        ({"model": "m", "prompt": "a", "best_of": 3}, "best_of"),
        ({"model": "m", "prompt": "a", "messages": [USER]}, "messages"),
        ({"model": "m", "prompt": "a", "logprobs": 50}, "logprobs"),
    ],
)
def test_what_is_wrong_with_a_completion_is_named(body, param):
    with pytest.raises(AgentCallError) as error:
        text_call(body, SamplingParams(), CallLimits())
    assert error.value.param == param


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"5",
        b"\xff\xfe{}",
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"a": "\xc3"}',
        b'{"a": "\\ud800"}',
        b'{"a": ' + b"9" * 5000 + b"}",
        b"[" * 200_000,
        b'{"a":' * 100_000,
    ],
    ids=lambda data: repr(data[:12]),
)
def test_what_is_no_json_object_of_text_is_refused(data):
    with pytest.raises(AgentCallError) as error:
        parse_body(data)
    assert error.value.status == 400
    assert error.value.code == "invalid_body"


def test_settings_out_of_range_are_refused():
    with pytest.raises(ValueError, match=r"EndpointClients\.max_messages must be >= 1, got 0"):
        EndpointClients(max_messages=0)
    with pytest.raises(ValueError, match=r"EndpointClients\.ignored_options must be a list of names, got 'temp"):
        EndpointClients(ignored_options="temperature")
    with pytest.raises(ValueError, match=r"EndpointClients\.ignored_options must not contain messages"):
        EndpointClients(ignored_options=("messages",))
    with pytest.raises(ValueError, match=r"EndpointClients\.port must be in \[0, 65535\], got 70000"):
        EndpointClients(port=70000)


# -- requests to a server ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["length", "chunks"])
def test_a_body_of_10_mb_is_refused(pair, kind):
    _, good, bad = pair
    part = b" " * 2**20
    if kind == "length":
        response = send(bad, part * 10)
    else:
        response = send(bad, (part for _ in range(10)))
    assert response.status_code == 413
    assert checked(response)["code"] == "request_too_large"
    well(good)
    well(bad)


def test_too_many_messages_are_refused(pair):
    _, good, bad = pair
    response = send(bad, json.dumps({"model": "m", "messages": [USER] * 300_000}))
    assert response.status_code == 413
    response = send(bad, json.dumps({"model": "m", "messages": [USER] * 100_000}))
    assert response.status_code == 400
    assert checked(response)["param"] == "messages"
    well(good)
    well(bad)


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xfe\xfa",
        b"[" * 100_000,
        json.dumps({"model": "m", "messages": [{"role": "robot", "content": "x"}]}).encode(),
        json.dumps({"model": "m", "messages": [{"role": "user", "content": "€" * 300}]}).encode(),
    ],
    ids=["no_text", "deep", "role", "unknown_characters"],
)
def test_each_broken_body_gets_the_error_of_the_api(pair, data):
    _, good, bad = pair
    response = send(bad, data)
    assert response.status_code == 400
    checked(response)
    well(good)
    well(bad)


def calling(arguments: str) -> dict:
    """A message that calls a tool, which the template of these tests does not write."""
    return {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "add", "arguments": arguments}}]}


def test_texts_of_megabytes_are_refused_before_they_are_tokenised(pair):
    """Tokenising them takes tens of seconds, in which no episode would get an answer."""
    episodes, good, bad = pair
    long = "8312=" * 1_000_000
    for path, body, param in (
        ("/chat/completions", {"messages": [USER | {"content": long}]}, "messages"),
        ("/chat/completions", {"messages": [USER | {"content": long[:1000]}] * 1500}, "messages"),
        ("/chat/completions", tool(description=long), "messages"),
        ("/chat/completions", {"messages": [USER, calling(long), USER]}, "messages"),
        ("/chat/completions", {"messages": [USER | {"name": long}]}, "messages"),
        ("/completions", {"prompt": long}, "prompt"),
        ("/completions", {"prompt": [[5] * 1_000_000]}, "prompt"),
    ):
        response = send(bad, json.dumps(body | {"model": "m"}), path)
        assert response.status_code == 400
        error = checked(response)
        assert error["code"] == "context_length_exceeded"
        assert error["param"] == param
    well(good)
    assert not episodes.errors


def test_keys_that_are_wrong_get_401(pair):
    _, good, bad = pair
    url = str(bad.base_url).rstrip("/") + "/chat/completions"
    for header in ("", "Bearer", "Bearer wrong", f"Basic {bad.api_key}", bad.api_key, "Bearer " + "x" * 8000):
        response = httpx.post(url, json=ASK, headers={"Authorization": header}, timeout=WAIT_S)
        assert response.status_code == 401, header[:20]
        assert checked(response)["code"] == "invalid_api_key"
    response = httpx.post(url, json=ASK, headers={b"Authorization": b"Bearer \xff\xfe"}, timeout=WAIT_S)
    assert response.status_code == 401
    well(good)


def test_paths_that_do_not_exist_get_404(pair):
    _, good, bad = pair
    for path in ("/embeddings", "/../etc/passwd", "/chat", "/chat/completions/x", "/%00"):
        response = send(bad, json.dumps(ASK), path)
        assert response.status_code == 404, path
        checked(response)
    well(good)


def connect(client) -> socket.socket:
    at = urlsplit(str(client.base_url))
    return socket.create_connection((at.hostname, at.port), timeout=WAIT_S)


def head(client, length: int) -> bytes:
    lines = [f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {client.api_key}"]
    return "\r\n".join([*lines, f"Content-Length: {length}\r\n\r\n"]).encode()


def test_sockets_that_speak_no_http_or_stop_in_the_middle_harm_nobody(pair):
    episodes, good, bad = pair
    body = json.dumps(ASK).encode()
    said = [
        b"\x16\x03\x01\x02\x00",  # TLS
        b"GARBAGE\r\n\r\n",
        b"POST /v1/chat/completions HTTP/9.9\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\n" + b"A: b\r\n" * 50_000,
        head(bad, 50),
        head(bad, len(body)) + body[:10],
        head(bad, 10**12) + body,
        head(bad, -5) + body,
        b"",
    ]
    before = len(episodes.engine.episode(bad.api_key)._calls)
    connections = []
    for data in said:
        connection = connect(bad)
        with contextlib.suppress(OSError):  # refused before all was said
            connection.sendall(data)
        connections.append(connection)
    well(good)  # while they are open
    for connection in connections:
        connection.close()
    well(good)
    assert len(episodes.engine.episode(bad.api_key)._calls) == before
    well(bad)


@pytest.mark.parametrize("part", [b"x" * 2**16, b"A: b\r\n" * 2**13], ids=["one_header", "many_headers"])
def test_a_head_without_an_end_is_not_kept_in_memory(pair, part):
    _, good, bad = pair
    with connect(bad) as connection:
        connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nA: ")
        with pytest.raises(ConnectionError):  # long before all of this was taken
            connection.sendall(part * 500)
    well(good)


def test_connections_without_a_whole_head_are_closed_in_time(pair, monkeypatch):
    """Those that say nothing, stop in the middle, or stop behind a call; not those that wait for an answer."""
    episodes, good, bad = pair
    body = json.dumps(ASK).encode()
    whole = head(bad, len(body)) + body
    for said in (whole + b"POST /v1", b"", b"\r\n", b"POST /v1", whole[:60]):
        # the first call has to be answered before, also on a busy machine
        monkeypatch.setattr(app, "HEAD_TIMEOUT_S", 2.0 if said.startswith(whole) else 0.3)
        with connect(bad) as connection:
            connection.sendall(said)
            found = b""
            while part := connection.recv(65536):
                found += part
            assert (b"chat.completion" in found) == said.startswith(whole)
    episodes.pause()
    with connect(bad) as connection:
        connection.sendall(whole)
        connection.settimeout(1.0)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        episodes.resume()
        connection.settimeout(WAIT_S)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
    well(good)


def test_a_body_that_does_not_come_in_time_is_refused(pair, monkeypatch):
    _, good, bad = pair
    monkeypatch.setattr(app, "BODY_TIMEOUT_S", 0.3)
    with connect(bad) as connection:
        connection.sendall(head(bad, 50) + b"{")
        assert connection.recv(65536).startswith(b"HTTP/1.1 408")
    monkeypatch.undo()
    well(good)


def test_a_thousand_connections_that_say_nothing_harm_nobody(pair):
    _, good, bad = pair
    connections = [connect(bad) for _ in range(300)]
    well(good)
    for connection in connections:
        connection.close()
    well(good)


def test_requests_behind_each_other_in_one_connection_are_all_answered(pair):
    _, _, bad = pair
    body = json.dumps(ASK | {"seed": 1}).encode()
    with connect(bad) as connection:
        connection.sendall((head(bad, len(body)) + body) * 3)
        found = b""
        while found.count(b"chat.completion") < 3:
            part = connection.recv(65536)
            assert part, found
            found += part


def test_an_agent_that_asks_too_much_gets_429_and_the_other_goes_on(tmp_path):
    with held(tmp_path, num_samples=2, max_calls=3) as (_, (good, bad)):
        answers = [send(bad, json.dumps(ASK)) for _ in range(5)]
        assert [answer.status_code for answer in answers] == [200, 200, 200, 429, 429]
        assert answers[-1].headers["x-should-retry"] == "false"
        well(good)


def test_a_message_is_written_once_however_many_replies_it_may_follow(tmp_path, monkeypatch):
    """Written for each of a thousand equal replies, some MB would keep the engine's lock for minutes."""
    with held(tmp_path) as (_, (given,)):
        written = []
        message_key = episode_file.message_key
        monkeypatch.setattr(episode_file, "message_key", lambda one: (written.append(one), message_key(one))[1])
        reply = send(given, json.dumps(ASK | {"n": 40, "max_tokens": 1, "seed": 1})).json()["choices"][0]["message"]
        written.clear()
        sent = [USER, reply, {"role": "user", "content": "8" * 1000}]
        send(given, json.dumps(ASK | {"messages": sent}))
        assert [one["content"] for one in written] == [one["content"] for one in sent]


def test_clients_that_go_at_once_leave_nothing_behind(tmp_path):
    with held(tmp_path, num_samples=2) as (episodes, (good, bad)):
        episodes.pause()
        body = json.dumps(ASK).encode()
        for _ in range(20):
            with connect(bad) as connection:
                connection.sendall(head(bad, len(body)) + body)
        episode = episodes.engine.episode(bad.api_key)
        wait_for(lambda: episode._calls and not any(call.num_waiting for call in episode._calls))
        episodes.resume()
        well(good)
        wait_for(lambda: all(call.replies.done() for call in episode._calls))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel tells whether an answer was read")
def test_an_answer_that_its_client_has_not_read_is_not_trained_and_given_to_the_next(tmp_path):
    """It was written in the moment in which the client gave up."""
    with held(tmp_path) as (episodes, (given,)):
        episode = episodes.engine.episode(given.api_key)
        (session,) = episodes.endpoint.service._sessions.values()
        for number, is_read in enumerate((True, False, False)):
            content = json.dumps(ASK | {"seed": number}).encode()
            with connect(given) as connection:
                connection.sendall(head(given, len(content)) + content)
                assert select.select([connection], [], [], WAIT_S)[0], "no answer"
                if is_read:
                    answer = http.client.HTTPResponse(connection)
                    answer.begin()
                    answer.read()  # to the end, which may come after its beginning
            (call,) = session.book._calls[digest_of("/v1/chat/completions", content)]
            if not is_read:
                wait_for(lambda call=call: not call.is_delivered)
        assert [call.turns[0].is_kept for call in episode._calls] == [True, False, False]
        again = send(given, content)  # without a word that it is a repetition
        assert len(episode._calls) == 3
        assert episode._calls[-1].turns[0].is_kept
        assert send(given, content).json()["id"] != again.json()["id"], "a second call was taken for a repetition"
        episodes.end_agents()
        (sample,) = episodes.results(1)
    assert len(sample.rows) == 3
    assert episodes.engine.stats.num_orphans == 1
