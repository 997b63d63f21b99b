"""The Responses API: another form of a chat, read by the official client; the same tokens train."""

from __future__ import annotations

import json

import openai
import pydantic
import pytest
from agent_endpoints import TOOL, TOOLS
from agent_runs import user
from chat_models import chat_model
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from scripted_agents import call_text, play

from lit_async_rl.agents import AgentCallError, Reply, ReplyMessage, ToolCall
from lit_async_rl.agents.api.bodies import CallLimits
from lit_async_rl.agents.api.response_answers import ResponseAnswer
from lit_async_rl.agents.api.response_bodies import response_call
from lit_async_rl.models.tokenizer import TextCodec
from lit_async_rl.types import SamplingParams

FLAT = {"type": "function", "strict": True, **TOOL["function"]}
ASK = {"model": "m", "input": "question"}
EVENT = pydantic.TypeAdapter(ResponseStreamEvent)


@pytest.fixture(scope="module")
def codec(tmp_path_factory) -> TextCodec:
    return TextCodec(chat_model(tmp_path_factory.mktemp("chat"), TOOLS))


@pytest.mark.parametrize("streams", [False, True])
def test_a_loop_of_tools_is_one_row(codec, streams):
    """As agents write it: the items of each response are appended to the input, then the outputs of tools."""

    async def ask(client, **arguments):
        if not streams:
            return await client.responses.create(**arguments)
        async with client.responses.stream(**arguments) as stream:
            kinds = [event.type async for event in stream]
            assert kinds[0] == "response.created"
            assert kinds[-1] == "response.completed"
            return await stream.get_final_response()

    async def agent(prompt, client):
        arguments = dict(model="m", instructions="be brief", tools=[FLAT])
        items = [user("question")]
        found = await ask(client, input=items, **arguments)
        assert isinstance(found, Response)
        assert found.status == "completed"
        assert found.output_text == "Let me see."
        calls = [item for item in found.output if item.type == "function_call"]
        assert [(call.name, json.loads(call.arguments)) for call in calls] == [("add", {"a": 1}), ("add", {"a": 2})]
        items += found.output
        items += [{"type": "function_call_output", "call_id": call.call_id, "output": "3"} for call in calls]
        found = await ask(client, input=items, **arguments)
        assert [item.type for item in found.output] == ["reasoning", "message"]
        assert found.output[0].content[0].text == "hm"
        assert found.usage.total_tokens == found.usage.input_tokens + found.usage.output_tokens
        items += [*found.output, user("sure?")]
        assert (await ask(client, input=items, **arguments)).output_text == "yes"
        return 1.0

    texts = [f"Let me see.{call_text(a=1)}{call_text(a=2)}", "hm</think>4", "yes"]
    sample, engine, inner = play(agent, codec, texts)
    assert not sample.branches
    assert sum(sample.loss_mask) == sum(len(one.token_ids) for one in inner.said)
    assert engine.stats.drift.total == 0
    assert engine.stats.num_calls == 3


def test_a_response_is_the_chat_of_the_same_messages(codec):
    """Its prompt has the same tokens, and a conversation may go on with the other of the two."""
    turn = {
        "role": "assistant",
        "content": "I look.",
        "tool_calls": [{"id": "call00007", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
    }
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "developer", "content": "kind"},
        user("question"),
        turn,
        {"role": "tool", "tool_call_id": "call00007", "content": "3"},
    ]
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "ki"}, {"type": "input_text", "text": "nd"}]},
        {"type": "message", "role": "user", "content": "question"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "call00007", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "call00007", "output": [{"type": "input_text", "text": "3"}]},
    ]

    async def agent(prompt, client):
        answer = await client.chat.completions.create(model="m", messages=messages, tools=[TOOL], seed=1)
        await client.responses.create(
            model="m", instructions="be brief", input=items, tools=[FLAT], extra_body={"seed": 1}
        )
        said = [{"role": "assistant", "content": answer.choices[0].message.content}, user("sure?")]
        await client.responses.create(model="m", instructions="be brief", input=[*items, *said], tools=[FLAT])
        return 1.0

    _, engine, inner = play(agent, codec, ["4", "5", "yes"])
    chat, response, last = inner.requests
    assert chat.prompt_ids == response.prompt_ids
    assert chat.seed == response.seed
    assert chat.sampling == response.sampling
    assert last.prompt_ids[: len(chat.prompt_ids) + 2] == chat.prompt_ids + inner.said[0].token_ids
    assert engine.stats.drift.total == 0


def test_fields_of_a_response(codec):
    async def agent(prompt, client):
        asked = {
            "max_output_tokens": 100,
            "tools": [FLAT],
            "tool_choice": "none",
            "metadata": {"a": "b"},
            "store": False,
        }
        more = {"include": ["message.output_text.logprobs", "reasoning.encrypted_content"], "top_logprobs": 0}
        found = await client.responses.create(
            **ASK, **asked, **more, temperature=1.0, truncation="disabled", extra_body={"return_token_ids": True}
        )
        for name, value in asked.items():
            assert found.to_dict()[name] == value, name
        (item,) = found.output
        (part,) = item.content
        assert found.output_text == part.text == call_text(a=1), "calls are not parsed"
        assert len(part.logprobs) == len(found.token_ids) == found.usage.output_tokens
        assert found.versions == [0] * len(found.token_ids)
        assert "".join(one.token for one in part.logprobs).startswith(part.text)
        return 1.0

    _, _, inner = play(agent, codec, [call_text(a=1)])
    assert inner.requests[0].sampling.max_tokens == 100


def test_rules_of_replies_hold_here_too(codec):
    class Answer(pydantic.BaseModel):
        n: int

    async def agent(prompt, client):
        found = await client.responses.create(
            **ASK, tools=[FLAT], tool_choice={"type": "function", "name": "add"}, parallel_tool_calls=False
        )
        assert [item.type for item in found.output] == ["function_call"]
        parsed = await client.responses.parse(**ASK, text_format=Answer)
        assert parsed.output_parsed == Answer(n=1)
        found = await client.responses.create(**ASK, text={"format": {"type": "json_object"}})
        assert found.output_text == "{}"
        with pytest.raises(openai.UnprocessableEntityError, match="its content is JSON, and no object"):
            await client.responses.create(**ASK, text={"format": {"type": "json_object"}})
        return 1.0

    call = call_text(a=1)
    texts = ["5", call + call, call, "5", '{"n": 1}', "[]", "{}", *["5"] * 10]
    _, engine, inner = play(agent, codec, texts)
    assert len(inner.requests) == len(texts)
    assert engine.stats.num_orphans == len(texts) - 3


def test_a_repeated_request_gets_the_same_response(codec):
    async def agent(prompt, client):
        ask = ASK | {"extra_headers": {"Idempotency-Key": "k"}}
        answers = [await client.responses.create(**ask) for _ in range(2)]
        assert answers[0] == answers[1]
        assert (await client.responses.create(**ASK)).id != answers[0].id
        assert (await client.responses.create(input="question")).model == "policy", "the agent's own client"
        return 1.0

    _, _, inner = play(agent, codec, "abc")
    assert len(inner.requests) == 3


def reply_of(codec, ids, calls, reasoning, content, reason) -> Reply:
    return Reply(
        text=codec.decode(ids),
        message=ReplyMessage(content=content, tool_calls=tuple(calls), reasoning=reasoning),
        token_ids=tuple(ids),
        logprobs=tuple(-0.1 * n for n in range(len(ids))),
        versions=tuple(n // 3 for n in range(len(ids))),
        finish_reason=reason,
        prompt_token_count=7,
        token_texts=tuple(codec.token_texts(ids)),
    )


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_the_events_of_a_stream_build_its_response_for_any_reply(codec, data):
    ids = data.draw(st.lists(st.integers(0, len(codec.tokenizer) - 1), min_size=1, max_size=40))
    content = codec.decode(ids)[: data.draw(st.integers(0, 40))]
    calls = [ToolCall(id=f"c{n}", name="add", arguments=f'{{"a": {n}}}') for n in range(data.draw(st.integers(0, 2)))]
    reply = reply_of(
        codec, ids, calls, data.draw(st.none() | st.just("hm")), content, data.draw(st.sampled_from(["stop", "length"]))
    )
    asked = ASK | {"include": ["message.output_text.logprobs"]} if data.draw(st.booleans()) else ASK
    call = response_call(asked, SamplingParams(), CallLimits())
    answer = ResponseAnswer(call, [reply], codec, number="1", created=0)
    whole = json.loads(answer.whole)
    events = []
    for lines in answer.events.decode().removesuffix("\n\n").split("\n\n"):
        kind, body = lines.split("\n", 1)
        event = json.loads(body.removeprefix("data: "))
        assert kind == f"event: {event['type']}"
        EVENT.validate_python(event)
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["response"] == whole
    assert events[-1]["type"] == f"response.{whole['status']}"
    assert whole["status"] == ("incomplete" if reply.finish_reason == "length" else "completed")
    for place, item in enumerate(whole["output"]):
        own = [event for event in events if event.get("output_index") == place]
        empty = {"content": []} if "content" in item else {"arguments": ""}
        assert own[0]["item"] == item | {"status": "in_progress"} | empty
        assert own[-1]["item"] == item
        deltas = "".join(event["delta"] for event in own if event["type"].endswith(".delta"))
        assert deltas == (item["arguments"] if "arguments" in item else item["content"][0]["text"])
        logprobs = [one for event in own if event["type"].endswith("text.delta") for one in event.get("logprobs", ())]
        if item["type"] == "message":
            assert logprobs == item["content"][0]["logprobs"]
            assert len(logprobs) == (len(ids) if "include" in asked else 0)
    Response.model_validate(whole)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"model": None}, "model"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": ["text"]}, "input[0]"),
        ({"input": [user("a")] * 3000}, "input"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
        ({"input": [{"type": "reasoning", "id": "rs_1", "summary": []}]}, "input"),
        ({"input": [{"type": "reasoning", "content": 5}]}, "input"),
        ({"input": [{"role": None, "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [user("a"), {"type": "function_call", "call_id": "1", "name": "add"}]}, "input[1].arguments"),
        ({"input": [{"type": "function_call_output", "call_id": "1"}]}, "input[0].output"),
        ({"instructions": ["a"]}, "instructions"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [TOOL]}, "tools"),
        ({"tools": [FLAT | {"parameters": "text"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [FLAT], "tool_choice": {"type": "function", "name": "sub"}}, "tool_choice"),
        ({"tools": [FLAT], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "x"}}}}, "text.format.schema"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"reasoning": {"effort": "low"}}, "reasoning"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"max_tool_calls": 1}, "max_tool_calls"),
        ({"temperature": 0.2}, "temperature"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"n": 2}, "n"),
        ({"messages": [user("a")]}, "messages"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_what_is_not_served_is_named(body, param):
    asked = {name: value for name, value in (ASK | body).items() if value is not None}
    with pytest.raises(AgentCallError) as error:
        response_call(asked, SamplingParams(), CallLimits())
    assert error.value.status == 400
    assert error.value.param == param
    assert param.partition("[")[0] in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500


def test_options_of_codex_are_taken_when_they_are_ignored(codec):
    asked = {"reasoning": {"effort": "low"}, "text": {"verbosity": "low"}, "store": False, "prompt_cache_key": "a"}

    async def agent(prompt, client):
        found = await client.responses.create(**ASK, **asked, include=["reasoning.encrypted_content"])
        assert found.output_text == "5"
        with pytest.raises(openai.BadRequestError, match="context is 4000 tokens") as error:
            await client.responses.create(model="m", input="1" * 50_000)
        assert error.value.param == "input"
        image = user([{"type": "input_image", "image_url": "x"}])
        for item, param in (
            ({"role": "robot", "content": "a"}, "input"),
            (user(5), "input[0].content"),
            (image, "input[0].content"),
        ):
            with pytest.raises(openai.BadRequestError) as error:
                await client.responses.create(model="m", input=[item])
            assert error.value.param == param
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve("resp_1")
        return 1.0

    play(agent, codec, ["5"], ignored=("reasoning", "verbosity"))
