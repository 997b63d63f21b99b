"""Clients that agents get are those of the official package: what they send is what it would send."""

import asyncio
import json
import sys

import openai
import pytest
from agent_endpoints import TOOL
from openai.types.chat import ChatCompletion

from lit_async_rl.agents.api.openai_clients import EndpointAddress, OpenAIClients

CALL = {"id": "a", "type": "function", "function": {"name": "add", "arguments": "{}"}}
ANSWER = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1,
    "model": "policy",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": None, "tool_calls": [CALL]},
            "finish_reason": "tool_calls",
        }
    ],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}
REPLY = ChatCompletion.model_validate(ANSWER).choices[0].message
HELLO = {"role": "user", "content": "hello"}
PARTS = {"role": "user", "content": ({"type": "text", "text": "a"}, {"type": "text", "text": "b"})}
NESTED = {"role": "assistant", "content": "", "tool_calls": REPLY.tool_calls}
TOLD = {"role": "tool", "tool_call_id": "a", "content": "3"}


def sent(make, use) -> list[dict]:
    """Bodies of the requests of a client that `make` makes on these connections."""
    bodies = []
    http = sys.modules[openai.DefaultAsyncHttpxClient.__mro__[1].__module__.partition(".")[0]]

    def answer(request):
        bodies.append(json.loads(request.content) | {"timeout": request.extensions["timeout"]})
        return http.Response(200, json=ANSWER)

    pool = openai.DefaultAsyncHttpxClient(transport=http.MockTransport(answer))
    asyncio.run(use(make(pool)))
    return bodies


def ours(pool):
    clients = OpenAIClients()
    clients._pools["http://127.0.0.1:9/v1"] = [pool] * 64
    return clients.make(EndpointAddress("http://127.0.0.1:9/v1", "a key", timeout=7.0))


def ours_of(episode):
    return OpenAIClients().make(EndpointAddress("http://127.0.0.1:9/v1", "a key"), episode)


def official(pool):
    return openai.AsyncOpenAI(base_url="http://127.0.0.1:9/v1", api_key="a key", timeout=7.0, http_client=pool)


@pytest.mark.parametrize(
    "call",
    [
        dict(messages=[HELLO]),
        dict(messages=(HELLO, REPLY, TOLD)),
        dict(messages=[HELLO, NESTED, TOLD, PARTS], tools=[TOOL], tool_choice="auto"),
        dict(messages=[HELLO], tools=(TOOL,), n=2, seed=3, stop=["a", "b"], logprobs=True, top_logprobs=2),
        dict(messages=[HELLO], tools=None, temperature=None, max_tokens=4, timeout=3.0),
        dict(messages=[HELLO], extra_body={"return_token_ids": True}, user="someone"),
        dict(messages=[HELLO], extra_body={"messages": [TOLD], "tools": []}, tools=[TOOL]),
        dict(messages=[HELLO], stream=True, stream_options={"include_usage": True}),
        dict(messages=[HELLO], response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}),
    ],
)
@pytest.mark.parametrize("how", ["create", "another_client", "raw"])
def test_the_same_requests_are_sent(call, how):
    async def use(client):
        if how == "another_client":
            client = client.with_options(max_retries=0)
        completions = client.chat.completions.with_raw_response if how == "raw" else client.chat.completions
        return await completions.create(model="any", **call)

    (found,) = sent(ours, use)
    assert [found] == sent(official, use)
    assert found["messages"]


def test_a_call_needs_no_model():
    async def use(client):
        await client.chat.completions.create(messages=[HELLO])
        await client.completions.create(prompt="hello")
        await client.responses.create(input="hello")

    assert [body["model"] for body in sent(ours, use)] == ["policy", "policy", "policy"]


def test_a_client_knows_its_episode_also_with_other_options():
    made = ours_of("the episode")
    assert made.episode == made.with_options(timeout=3.0).episode == made.copy(max_retries=0).episode == "the episode"
    assert not hasattr(ours_of(None), "episode")


def test_messages_may_be_read_once():
    async def use(client):
        return await client.chat.completions.create(model="any", messages=iter([HELLO, TOLD]))

    assert sent(ours, use)[0]["messages"] == [HELLO, TOLD]


def test_answers_and_errors_are_those_of_the_package():
    async def use(client):
        assert isinstance(client, openai.AsyncOpenAI)
        answer = await client.chat.completions.create(model="any", messages=[HELLO])
        assert isinstance(answer, ChatCompletion)
        assert answer.choices[0].message.tool_calls[0].function.name == "add"
        with pytest.raises(TypeError):
            await client.chat.completions.create(model="any")
        with pytest.raises(TypeError):
            await client.chat.completions.create(model="any", messages=[HELLO], no_such_option=1)

    assert len(sent(ours, use)) == 1
