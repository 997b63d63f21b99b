"""Forced tool calls and formats: whole replies are sampled again, and the one that is kept trains as it was sampled."""

from __future__ import annotations

import asyncio

import openai
import pydantic
import pytest
import torch
from agent_endpoints import TOOL, TOOLS
from agent_runs import user
from chat_models import chat_model
from scripted_agents import Scripted, call_text, play

from lit_async_rl.agents.calls import AgentCallError
from lit_async_rl.agents.reply_rules import MAX_TRIES
from lit_async_rl.models.tokenizer import TextCodec

LOOK = {"type": "function", "function": {"name": "look"}}
ADD = call_text(a=1)
ASK = {"model": "m", "messages": [user("question")]}
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


def named(name):
    return {"type": "function", "function": {"name": name}}


def of_schema(schema):
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


@pytest.fixture(scope="module")
def codec(tmp_path_factory) -> TextCodec:
    return TextCodec(chat_model(tmp_path_factory.mktemp("chat"), TOOLS))


@pytest.mark.parametrize(
    ("options", "wrong", "right"),
    [
        ({"tool_choice": "required"}, ["5", "<tool_call>{", call_text("sub")], ADD),
        ({"tool_choice": named("add")}, ["5", call_text("look")], ADD),
        ({"tool_choice": "required", "parallel_tool_calls": False}, [ADD + ADD], ADD),
        ({"parallel_tool_calls": False}, [ADD + call_text("look")], "5"),
        ({"response_format": {"type": "json_object"}}, ["5", "{", "[1]", '{"n": NaN}', "```{}```"], '{"n": []}'),
        ({"response_format": of_schema(SCHEMA)}, ["5", "{}", '{"n": "1"}', "[1]"], ' {"n": 1}\n'),
        ({"response_format": of_schema(SCHEMA), "tools": [TOOL]}, ['{"n": 0.5}'], ADD),
    ],
    ids=["required", "named", "one_of_required", "at_most_one", "json_object", "json_schema", "schema_or_call"],
)
def test_a_reply_that_breaks_the_rule_is_sampled_again_and_does_not_train(codec, options, wrong, right):
    async def agent(prompt, client):
        answer = await client.chat.completions.create(**{**ASK, "tools": [TOOL, LOOK], **options})
        message = answer.choices[0].message
        if message.tool_calls:
            assert [(call.function.name, call.function.arguments) for call in message.tool_calls] == [
                ("add", '{"a": 1}')
            ]
            turns = [
                *ASK["messages"],
                message,
                {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "2"},
            ]
        else:
            assert message.content == right
            turns = [*ASK["messages"], message, user("and now?")]
        await client.chat.completions.create(model="m", messages=turns, tools=options.get("tools", [TOOL, LOOK]))
        return 1.0

    sample, engine, inner = play(agent, codec, [*wrong, right, "done"])
    first, *others, last = inner.requests
    assert [one.prompt_ids for one in others] == [first.prompt_ids] * len(wrong)
    kept, after = inner.said[-2:]
    assert last.prompt_ids[: len(first.prompt_ids) + len(kept.token_ids)] == first.prompt_ids + kept.token_ids
    assert not sample.branches
    trained = [n for n, own in enumerate(sample.loss_mask) if own]
    for field in ("token_ids", "logprobs", "versions"):
        values = getattr(sample, field)
        assert tuple(values[n] for n in trained) == getattr(kept, field) + getattr(after, field), field
    assert engine.stats.num_orphans == len(wrong)
    assert engine.stats.num_calls == len(wrong) + 2
    assert engine.stats.drift.total == 0


def test_an_answer_that_is_never_valid_is_an_error_of_which_nothing_trains(codec):
    async def agent(prompt, client):
        with pytest.raises(
            openai.UnprocessableEntityError, match=f"no valid reply in {MAX_TRIES} attempts; .*: it calls none of add"
        ) as error:
            await client.chat.completions.create(**ASK, tools=[TOOL], tool_choice="required", n=2)
        assert error.value.code == "no_valid_reply"
        assert "\n" not in error.value.message
        await client.chat.completions.create(**ASK)
        return 1.0

    sample, engine, inner = play(agent, codec, [ADD, *["5"] * MAX_TRIES, "7"])
    assert [one.num_samples for one in inner.requests] == [2, *[1] * (MAX_TRIES - 1), 1]
    assert sample.token_ids == inner.said[-1].token_ids
    assert not sample.branches
    assert engine.stats.num_orphans == MAX_TRIES + 1


def test_of_several_replies_only_those_that_break_the_rule_are_sampled_again(codec):
    async def agent(prompt, client):
        wanted = {"response_format": {"type": "json_object"}, "seed": 7}
        answer = await client.chat.completions.create(**ASK, **wanted, n=3)
        assert [choice.message.content for choice in answer.choices] == ['{"a":0}', '{"a":1}', '{"a":2}']
        return 1.0

    sample, engine, inner = play(agent, codec, ["x", '{"a":1}', "y", "z", '{"a":2}', '{"a":0}'])
    assert [one.num_samples for one in inner.requests] == [3, 2, 1]
    assert len({one.seed for one in inner.requests}) == 3, "with the same seed the same reply would come again"
    rows = {row.token_ids for row in sample.rows}
    assert rows == {inner.said[n].token_ids for n in (1, 4, 5)}
    assert engine.stats.num_orphans == 3


def test_each_try_counts_for_the_limit_of_calls(codec):
    async def agent(prompt, client):
        await client.chat.completions.create(**ASK)
        with pytest.raises(openai.RateLimitError, match="max_calls=4"):
            await client.chat.completions.create(**ASK, response_format={"type": "json_object"})
        return 1.0

    sample, _, inner = play(agent, codec, "abcdef", max_calls=4)
    assert len(inner.requests) == 4
    assert sample.token_ids == inner.said[0].token_ids


def test_a_repeated_request_gets_the_reply_that_was_kept(codec):
    async def agent(prompt, client):
        ask = ASK | {"response_format": {"type": "json_object"}, "extra_headers": {"Idempotency-Key": "k"}}
        answers = [await client.chat.completions.create(**ask) for _ in range(2)]
        assert answers[0] == answers[1]
        return 1.0

    sample, _, inner = play(agent, codec, ["x", "{}"])
    assert len(inner.requests) == 2
    assert sample.token_ids == inner.said[1].token_ids


def test_a_reply_that_was_sampled_again_can_be_withdrawn_or_discarded(codec):
    def check(reply):
        return None if reply.text in ("b", "c") else "it is neither b nor c"

    async def agent(prompt, client):
        episode = client.episode
        for name, undo in (("one", episode.withdraw), ("two", lambda name: episode.discard([name]))):
            (reply,) = await episode.complete(ASK["messages"], check=check, call_id=name)
            (same,) = await episode.complete(ASK["messages"], check=check, call_id=name)
            assert same is reply
            undo(name)
        with pytest.raises(AgentCallError, match="the last error: it is neither"):
            await episode.complete(ASK["messages"], check=check)
        await episode.complete(ASK["messages"])
        return 1.0

    sample, _, inner = play(agent, codec, ["a", "b", "a", "c", *["d"] * MAX_TRIES, "e"])
    assert sample.token_ids == inner.said[-1].token_ids
    assert not sample.branches


def test_a_caller_that_goes_during_another_try_aborts_it(codec):
    inner = Scripted(codec, ["a", "b"])

    async def agent(prompt, client):
        call = asyncio.ensure_future(client.episode.complete(ASK["messages"], check=lambda reply: "it is wrong"))
        while client.episode.num_calls < 3:
            await asyncio.sleep(0.01)
        call.cancel()
        await asyncio.wait({call})
        inner.texts.append("done")
        await client.episode.complete(ASK["messages"])
        return 1.0

    sample, _, _ = play(agent, codec, [], inner=inner)
    assert inner.aborted == [inner.requests[2].id]
    assert sample.token_ids == inner.said[-1].token_ids


def test_the_official_client_parses_what_it_asked_for(codec):
    class Answer(pydantic.BaseModel):
        n: int

    async def agent(prompt, client):
        answer = await client.chat.completions.parse(**ASK, response_format=Answer)
        assert answer.choices[0].message.parsed == Answer(n=3)
        return 1.0

    _, _, inner = play(agent, codec, ['{"n": "three"}', '{"n": 3}'])
    assert len(inner.requests) == 2


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "thing"}, "is not a JSON schema"),
        ({"$ref": "#/nowhere"}, "refers to '/nowhere', which is not in it"),
        ({"$ref": "http://127.0.0.1:9/schema"}, "which is not in it"),
        ({"$ref": "#"}, "has references that never end"),
        ({"description": "d" * 100_000}, "must have at most 100000 characters"),
    ],
)
def test_a_schema_that_cannot_be_checked_is_refused(codec, schema, message):
    async def agent(prompt, client):
        with pytest.raises(openai.BadRequestError, match=message) as error:
            await client.chat.completions.create(**ASK, response_format=of_schema(schema))
        assert error.value.param == "response_format.json_schema.schema"
        await client.chat.completions.create(**ASK)
        return 1.0

    sample, _, inner = play(agent, codec, ["{}", "{}"])
    assert not sample.branches
    assert len(sample.token_ids) == len(inner.said[-1].token_ids)


def test_options_that_are_ignored_discard_nothing(codec):
    options = {"tool_choice": "required", "parallel_tool_calls": False, "response_format": {"type": "json_object"}}

    async def agent(prompt, client):
        answer = await client.chat.completions.create(**ASK, tools=[TOOL], **options)
        assert answer.choices[0].message.content == "5"
        return 1.0

    _, engine, _ = play(agent, codec, ["5"], ignored=tuple(options))
    assert engine.stats.num_orphans == 0


def test_the_gradient_is_that_of_the_conditioned_policy_up_to_the_term_that_is_named():
    """A policy over 6 replies in float64, of which 3 keep the rule: the formula of `reply_rules`."""
    torch.manual_seed(0)
    scores = torch.randn(6, dtype=torch.float64, requires_grad=True)
    rewards = torch.randn(6, dtype=torch.float64)
    valid = torch.tensor([True, False, True, False, False, True])
    logprobs = scores.log_softmax(0)
    log_z = logprobs[valid].logsumexp(0)
    given_valid = (logprobs[valid] - log_z).exp()
    mean = (given_valid * rewards[valid]).sum()
    of_mean, of_log_z = (torch.autograd.grad(one, scores, retain_graph=True)[0] for one in (mean, log_z))
    for baseline in (mean.detach(), torch.tensor(0.3, dtype=torch.float64)):
        loss = (given_valid.detach() * (rewards[valid] - baseline) * logprobs[valid]).sum()
        (found,) = torch.autograd.grad(loss, scores, retain_graph=True)
        torch.testing.assert_close(found, of_mean + (mean.detach() - baseline) * of_log_z)
