"""The client in the process and one over HTTP: one table of requests, the same answers."""

import asyncio

import openai
import pytest
from agent_endpoints import TOOL, TOOLS, held
from chat_models import chat_model

from lit_async_rl.agents import InProcessClients

USER = {"role": "user", "content": "the answer"}
CALL = {"id": "a", "type": "function", "function": {"name": "add", "arguments": "{}"}}
ANSWERED = {"role": "tool", "tool_call_id": "a", "content": "3"}
IGNORED = ("frequency_penalty", "parallel_tool_calls")
SERVED = [
    {"messages": [USER]},
    {"messages": [USER], "n": 2, "max_tokens": 5, "user": "u", "store": True},
    {"messages": [USER], "max_completion_tokens": 5, "stop": "e"},
    {"messages": [USER], "stop": ["e", "an"], "temperature": 1.0, "top_p": 1, "tool_choice": None},
    {"messages": [USER], "tools": [TOOL], "tool_choice": "auto"},
    {"messages": [USER], "tools": [TOOL], "tool_choice": "none", "response_format": {"type": "text"}},
    {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, ANSWERED], "tools": [TOOL]},
    {"messages": [USER], "logprobs": True, "top_logprobs": 2, "extra_body": {"return_token_ids": True}},
    {"messages": [USER], "stream": True, "stream_options": {"include_usage": True}, "logprobs": True},
    {"messages": [USER], "frequency_penalty": 1.0, "parallel_tool_calls": False, "timeout": 60},
    {"messages": [USER], "extra_body": {"chat_template_kwargs": {"add_generation_prompt": False}}},
    {"prompt": "the answer", "stop": "e"},
    {"prompt": ["the answer", "a b"], "logprobs": 0, "n": 2},
    {"prompt": "the answer", "stream": True},
]
REFUSED = [
    {"messages": [USER], "temperature": 0.1},
    {"messages": [USER], "top_p": 0.5},
    {"messages": [USER], "temperature": "hot"},
    {"messages": [USER], "presence_penalty": 1.0},
    {"messages": [USER], "logit_bias": {"5": 1}},
    {"messages": [USER], "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "sub"}}},
    {"messages": [USER], "tool_choice": "auto"},
    {"messages": [USER], "response_format": {"type": "json_schema"}},
    {"messages": [USER], "reasoning_effort": "low"},
    {"messages": [USER], "stop": ["a", "b", "c", "d", "e"]},
    {"messages": [USER], "stop": "x" * 300},
    {"messages": [USER], "top_logprobs": 2},
    {"messages": [USER], "stream_options": {"include_usage": True}},
    {"messages": [USER], "n": 0},
    {"messages": [USER], "extra_body": {"colour": "blue"}},
    {"messages": []},
    {"messages": [USER, {"role": "robot", "content": "a"}]},
    {"messages": [USER | {"content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
    {"messages": [USER], "tools": [{"type": "function", "function": {"name": "add", "parameters": 5}}]},
    {"messages": [USER | {"content": "a" * 100_000}]},
    {"prompt": "the answer", "stop": ["e"] * 5},
    {"prompt": "the answer", "echo": True},
    {"prompt": []},
]
pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def clients(tmp_path_factory):
    """Both clients of one episode."""
    model = chat_model(tmp_path_factory.mktemp("chat"), TOOLS)
    settings = {"ignored_options": IGNORED, "max_calls": 1000, "sampling": {"max_tokens": 20, "head": 2}}
    with held(tmp_path_factory.mktemp("held"), model=model, **settings) as (episodes, (given,)):
        own = asyncio.run(InProcessClients(IGNORED).open(episodes.engine.episode(given.api_key)))
        yield own, given


async def answer(client, request) -> dict:
    """What a client says to a request, without names and times."""
    chat = "messages" in request
    create = client.chat.completions.create if chat else client.completions.create
    try:
        found = await create(model="m", seed=3, **request)
    except openai.APIStatusError as error:
        return {"status": error.status_code, "code": error.code, "param": error.param, "message": error.body["message"]}
    parts = [part async for part in found] if request.get("stream") else [found]
    said = []
    for choice in (choice for part in parts for choice in part.choices):
        message = (choice.delta if request.get("stream") else choice.message) if chat else choice
        calls = [(call.function.name, call.function.arguments) for call in getattr(message, "tool_calls", None) or ()]
        text = message.content if chat else choice.text
        tokens = getattr(choice, "token_ids", None)
        said.append((choice.index, message.role if chat else None, text, calls, choice.finish_reason, tokens))
        said.append(tokens_of(choice, chat))
    return {"said": said, "model": parts[0].model, "usage": parts[-1].usage and parts[-1].usage.total_tokens}


def tokens_of(choice, chat) -> list:
    if choice.logprobs is None:
        return []
    if not chat:
        return choice.logprobs.tokens
    return [(entry.token, [top.token for top in entry.top_logprobs]) for entry in choice.logprobs.content]


def answers(clients, request) -> list[dict]:
    """What both clients say."""
    return both(clients, lambda client: answer(client, request))


def both(clients, ask) -> list:
    """What is asked of both clients."""
    own, given = clients

    async def asks():
        async with openai.AsyncOpenAI(base_url=str(given.base_url), api_key=given.api_key, max_retries=0) as official:
            return [await ask(client) for client in (own.with_options(max_retries=0), official)]

    return asyncio.run(asks())


def test_models_are_listed_and_all_else_is_not_found_alike(clients):
    async def ask(client):
        (model,) = [one async for one in client.models.list()]
        assert await client.models.retrieve(model.id) == model
        said = [model]
        for missing in (client.models.retrieve("none"), client.embeddings.create(model="m", input="text")):
            with pytest.raises(openai.NotFoundError) as error:
                await missing
            said.append((error.value.code, error.value.body))
        with pytest.raises(openai.AuthenticationError) as error:
            await client.with_options(api_key="wrong").models.list()
        return [*said, error.value.body]

    found, expected = both(clients, ask)
    assert found == expected


@pytest.mark.parametrize("request_", SERVED, ids=str)
def test_what_is_served_is_served_alike(clients, request_):
    own, official = answers(clients, request_)
    assert own == official
    assert "said" in own, own


@pytest.mark.parametrize("request_", REFUSED, ids=lambda one: str(one)[:60])
def test_what_is_not_served_is_refused_with_the_same_line(clients, request_):
    own, official = answers(clients, request_)
    assert own == official
    assert own["status"] == 400, own
    assert "\n" not in own["message"]


def test_a_rule_that_no_reply_keeps_ends_with_the_same_error(clients):
    own, official = answers(clients, {"messages": [USER], "response_format": {"type": "json_object"}})
    assert own == official
    assert (own["status"], own["code"]) == (422, "no_valid_reply")


@pytest.mark.parametrize("streams", [False, True])
def test_responses_are_alike(clients, streams):
    async def ask(client):
        asked = {"model": "m", "input": "the answer", "extra_body": {"return_token_ids": True, "seed": 3}}
        found = await client.responses.create(**asked, stream=streams)
        if streams:
            found = [event async for event in found][-1].response
        return found.output_text, found.token_ids, found.usage

    own, official = both(clients, ask)
    assert own == official
