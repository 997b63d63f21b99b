"""Answers from replies, and which requests are one call: for any reply, and any order of requests."""

import dataclasses
import json

import pytest
import torch
from agent_endpoints import TOOLS
from chat_models import byte_fallback, chat_model
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from tiny_models import save, tiny_llama

from lit_async_rl.agents import Reply, ReplyMessage, ToolCall
from lit_async_rl.agents.api.answers import DONE, Answer
from lit_async_rl.agents.api.bodies import Call
from lit_async_rl.agents.api.retries import CallBook, digest_of
from lit_async_rl.models.tokenizer import TextCodec
from lit_async_rl.sampler_records import SamplerHead

MESSAGES = ({"role": "user", "content": "a"},)


@pytest.fixture(scope="module", params=["bytes", "pieces"])
def codec(request, tmp_path_factory) -> TextCodec:
    """Tokenizers whose tokens are parts of characters, or pieces with bytes for the rest."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "bytes":
        return TextCodec(chat_model(folder, TOOLS))
    tokenizer = byte_fallback()
    return TextCodec(save(tiny_llama(vocab=len(tokenizer)), folder, tokenizer))


def reply_of(codec, ids, calls=(), reasoning=None, content=None) -> Reply:
    text = codec.decode(ids)
    said = text if content is None else content
    return Reply(
        text=text,
        message=ReplyMessage(content=said, tool_calls=tuple(calls), reasoning=reasoning),
        token_ids=tuple(ids),
        logprobs=tuple(-0.1 * n for n in range(len(ids))),
        versions=tuple(n // 3 for n in range(len(ids))),
        finish_reason="tool_calls" if calls else "stop",
        prompt_token_count=7,
        token_texts=tuple(codec.token_texts(ids)),
    )


def test_of_parts_of_characters_the_likeliest_has_its_probability(codec):
    """They all have the same text."""
    parts = [n for n in range(len(codec.tokenizer)) if codec.token_texts([n]) == ["\ufffd"]][:3]
    assert len(parts) == 3
    head = SamplerHead(torch.zeros(1), torch.tensor([parts]), torch.tensor([[-0.1, -2.0, -3.0]]))
    reply = dataclasses.replace(reply_of(codec, parts[:1]), head=head)
    call = Call(model="m", prompts=("a",), logprobs=True, top_logprobs=3)
    (choice,) = json.loads(Answer(call, [reply], codec, number="1", created=0).whole)["choices"]
    assert choice["logprobs"]["top_logprobs"] == [{"\ufffd": pytest.approx(-0.1)}]


def chunks_of(events: bytes) -> list[ChatCompletionChunk]:
    text = events.decode()
    assert text.endswith(DONE)
    lines = [line for line in text.removesuffix(DONE).split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    return [ChatCompletionChunk.model_validate(json.loads(line.removeprefix("data: "))) for line in lines]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_stream_is_its_answer_for_any_tokens(codec, data):
    ids = data.draw(st.lists(st.integers(0, len(codec.tokenizer) - 1), min_size=1, max_size=60))
    end = data.draw(st.integers(0, len(codec.decode(ids))))  # cut, as at a stop string
    kept = codec.decode(ids)[:end]
    call = Call(model="m", messages=MESSAGES, logprobs=True, include_usage=True, return_token_ids=True)
    answer = Answer(call, [reply_of(codec, ids, content=kept)], codec, number="1", created=0)
    whole = ChatCompletion.model_validate(json.loads(answer.whole)).choices[0]
    parts = chunks_of(answer.events)
    assert parts[-1].usage.total_tokens == 7 + len(ids)
    own = [part.choices[0] for part in parts[:-1]]
    assert "".join(choice.delta.content or "" for choice in own) == whole.message.content == kept
    entries = [entry for choice in own if choice.logprobs for entry in choice.logprobs.content]
    assert entries == whole.logprobs.content
    assert len(entries) == len(ids)
    assert own[-1].token_ids == whole.token_ids == ids
    if "Strip" in str(codec.tokenizer.backend_tokenizer.decoder):
        return  # it drops the first space of a text
    spelled = "".join(entry.token for entry in entries)
    if "\ufffd" not in spelled:
        assert spelled == codec.tokenizer.decode(ids, skip_special_tokens=False)
        assert b"".join(bytes(entry.bytes) for entry in entries) == spelled.encode()


def test_calls_of_tools_are_deltas_of_their_own(codec):
    calls = [ToolCall(id=f"call_{n}", name="add", arguments=f'{{"a": {n}}}') for n in range(2)]
    reply = reply_of(codec, [10, 11, 12], calls=calls, reasoning="hm", content="")
    call = Call(model="m", messages=MESSAGES, n=2)
    answer = Answer(call, [reply, reply], codec, number="1", created=0)
    whole = ChatCompletion.model_validate(json.loads(answer.whole))
    assert whole.usage.prompt_tokens == 7
    for index, choice in enumerate(whole.choices):
        assert choice.message.content is None
        assert choice.message.reasoning_content == "hm"
        assert choice.finish_reason == "tool_calls"
        own = [c for part in chunks_of(answer.events) for c in part.choices if c.index == index]
        deltas = [delta for c in own for delta in c.delta.tool_calls or ()]
        assert [delta.index for delta in deltas] == [0, 1]
        for delta, expected in zip(deltas, choice.message.tool_calls, strict=True):
            assert delta.id == expected.id
            assert delta.function.name == expected.function.name
            assert delta.function.arguments == expected.function.arguments
        assert own[-1].finish_reason == "tool_calls"


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_every_request_gets_its_own_call_or_that_which_it_repeats(data):
    """Clients that send one body, lose their connection and try again: no two of them ever share an answer, and no
    client gets another answer when it tries again than the one it would have got.
    """
    book = CallBook()
    digest = digest_of("/v1/completions", b"x")
    num_clients = data.draw(st.integers(1, 4))
    served = {}
    for client in range(num_clients):  # one after the other, as an agent without concurrency
        losses = data.draw(st.integers(0, 3))
        calls = []
        for attempt in range(losses + 1):
            says_so = data.draw(st.booleans())
            call = book.join(digest, attempt=attempt if says_so else 0)
            calls.append(call)
            book.leave(call, delivered=attempt == losses)
        assert len({call.id for call in calls}) == 1
        served[client] = calls[0].id
    assert len(set(served.values())) == num_clients


def test_a_call_that_failed_is_not_repeated():
    book = CallBook()
    digest = digest_of("/v1/completions", b"x")
    first = book.join(digest, idempotency_key="k")
    book.fail(first)
    again = book.join(digest, attempt=1, idempotency_key="k")
    assert again.id != first.id
    assert digest_of("/v1/chat/completions", b"x") != digest
