"""Tool loops under the templates of the large families: one row, which extends what was sampled; or one clear line."""

from __future__ import annotations

import logging

import pytest
from agent_runs import user
from chat_families import FAMILIES, write
from instant_episodes import Instant
from tool_families import CASES, TOOL, Case, codec_with_tools

from lit_async_rl.agents.calls import AgentCallError, ReplyMessage, ToolCall
from lit_async_rl.agents.engine import AgentEngine
from lit_async_rl.agents.parsing import ReplyParser
from lit_async_rl.agents.rendering import ChatRenderer, checked_call_messages
from lit_async_rl.engines.completion_check import run_requests
from lit_async_rl.models.tokenizer import TextCodec
from lit_async_rl.problem import Prompt
from lit_async_rl.types import Completion, GenerationRequest, SamplingParams

# -- an agent whose policy says what a test wants ----------------------------------------------------------------------


class Says(ReplyParser):
    """Reads turn n of the policy: reasoning, words and `calls[n]` calls."""

    def __init__(self, calls: list[int]) -> None:
        self.calls = calls

    def parse(self, text, tools, new_id):
        number = int(text.split()[1])
        calls = [ToolCall(id=new_id(), name="add", arguments=f'{{"a": {n}}}') for n in range(self.calls[number])]
        return ReplyMessage(content=f"words {number}", reasoning=f"thought {number}", tool_calls=tuple(calls))


class Scripted(Instant):
    """Samples the turns that `Says` reads, each with the end token of its family."""

    max_model_len = 10_000

    def __init__(self, codec: TextCodec, case: Case, calls: list[int]) -> None:
        super().__init__()
        self.codec = codec
        self.case = case
        self.calls = calls
        self.sampled: list[tuple[tuple[int, ...], tuple[int, ...]]] = []  # prompt and completion of each call

    def submit(self, requests):
        (request,) = requests
        number = len(self.sampled)
        end = self.codec.tokenizer.convert_tokens_to_ids(self.case.call if self.calls[number] else self.case.answer)
        ids = (*self.codec.encode_continuation(f"thought {number} words {number}"), end)
        tokens = dict(token_ids=ids, logprobs=(-1.0,) * len(ids), versions=(0,) * len(ids))
        self.sampled.append((request.prompt_ids, ids))
        self.finished.append(Completion(request_id=request.id, sample_index=0, finish_reason="stop", **tokens))


class Loop:
    """Asks, answers calls, and asks again after each answer; keeps the messages of every call."""

    def __init__(self, num_calls: int) -> None:
        self.num_calls = num_calls
        self.asked: list[list[dict]] = []

    async def __call__(self, prompt, client):
        messages = [user("question 0")]
        for number in range(self.num_calls):
            self.asked.append(list(messages))
            (reply,) = await client.episode.complete(messages, tools=[TOOL])
            messages.append(reply.message.as_message())
            calls = reply.message.tool_calls
            messages += [
                {"role": "tool", "tool_call_id": c.id, "content": f"answer {number}{c.arguments}"} for c in calls
            ]
            if not calls:
                messages.append(user(f"question {number}"))
        return 1.0


@pytest.fixture(scope="module")
def codec_of(tmp_path_factory):
    made: dict[str, TextCodec] = {}

    def codec(name: str) -> TextCodec:
        if name not in made:
            made[name] = codec_with_tools(name, tmp_path_factory.mktemp(name))
        return made[name]

    return codec


def play(codec: TextCodec, case: Case, calls: list[int], **settings):
    """The completion of an agent that is answered by `calls`, with engine, inner engine and agent."""
    inner = Scripted(codec, case, calls)
    agent = Loop(len(calls))
    engine = AgentEngine(Instant(), agent, parser=Says(calls), timeout_s=120.0, **settings).around(inner, codec)
    prompt = Prompt(text="question 0")
    sampling = SamplingParams(max_tokens=100)
    request = GenerationRequest(id=0, prompt_ids=(3,), num_samples=1, sampling=sampling, prompt=prompt)
    try:
        ((completion,),) = run_requests(engine, [request], timeout_s=120.0)
    finally:
        engine.close()
        engine.end()
    return completion, engine, inner, agent


@pytest.mark.parametrize("name", CASES)
def test_a_tool_loop_is_one_row_that_extends_what_was_sampled(codec_of, name, caplog):
    case = CASES[name]
    codec = codec_of(name)
    calls = [1, 2 if case.several else 1, 0, 1, 0] if case.goes_on else [1, 2, 1, 0]
    with caplog.at_level(logging.WARNING):
        completion, engine, inner, agent = play(codec, case, calls)
    assert engine.stats.drift.total == 0
    (row,) = completion.rows
    assert sum(row.loss_mask) == sum(len(ids) for _, ids in inner.sampled)
    assert (*row.prompt_ids, *row.token_ids) == (*inner.sampled[-1][0], *inner.sampled[-1][1])
    renderer = ChatRenderer(codec)
    known: tuple[int, ...] = ()
    for messages, (prompt_ids, ids) in zip(agent.asked, inner.sampled, strict=True):
        assert prompt_ids[: len(known)] == known
        new = codec.tokenizer.decode(prompt_ids[len(known) :])
        # Gemma 4 writes words of a call behind its answer, where they were not sampled
        plain = [message | {"content": ""} if message.get("tool_calls") else message for message in messages]
        (whole,) = renderer.segments(checked_call_messages(plain), [TOOL])
        assert whole.endswith(new)
        assert messages[-1]["content"].replace('"', "") in new.replace("\\", "").replace('"', "")
        known = (*prompt_ids, *ids)
    assert ("cannot continue a recorded conversation become separate training rows" in caplog.text) is not case.goes_on


def test_a_template_that_moves_tools_begins_a_row_with_the_next_question(codec_of, caplog):
    case = CASES["mistral"]
    with caplog.at_level(logging.WARNING):
        completion, engine, *_ = play(codec_of("mistral"), case, [1, 0, 1, 0])
    assert len(completion.rows) == 2
    assert engine.stats.drift.template == 1
    assert (
        "when tools are used, its chat template writes earlier messages differently when a conversation continues"
        in caplog.text
    )
    with caplog.at_level(logging.WARNING):
        caplog.clear()
        play(codec_of("mistral"), case, [1, 0], forks=True)
    assert not caplog.text


@pytest.mark.parametrize("name", ["qwen3.5", "qwen3.6", "gpt-oss", "glm-4.5", "kimi-k2"])
@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_that_a_client_sends_is_rendered(codec_of, name, key):
    """As in a conversation that the agent made up, or that begins a row of its own."""
    call = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    turn = {"role": "assistant", "content": "", key: "because of it", "tool_calls": [call]}
    answer = {"role": "tool", "content": "3", "tool_call_id": "call00000"}
    (text,) = ChatRenderer(codec_of(name)).segments(checked_call_messages([user("q"), turn, answer]), [TOOL])
    assert text.count("because of it") == 1


def test_reasoning_and_words_beside_a_call_are_no_error_of_gpt_oss(codec_of):
    call = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    turn = {"role": "assistant", "content": "Let me see.", "thinking": "hm", "tool_calls": [call]}
    answer = {"role": "tool", "content": "3", "tool_call_id": "call00000"}
    (text,) = ChatRenderer(codec_of("gpt-oss")).segments(checked_call_messages([user("q"), turn, answer]), [TOOL])
    assert "Let me see." in text


@pytest.mark.parametrize("name", ["phi3", "vicuna", "falcon3"])
def test_a_template_that_leaves_out_answers_of_tools_is_refused(tmp_path, name):
    codec = TextCodec(write(FAMILIES[name], tmp_path))
    template = "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}{{ m.content }}{% endif %}{% endfor %}"
    renderer = ChatRenderer(codec, template)
    assert renderer.problem is None
    assert renderer.tool_problem is None
    answer = {"role": "tool", "content": "3", "tool_call_id": "call00000"}
    with pytest.raises(AgentCallError, match="leaves out the results of tools"):
        renderer.segments(checked_call_messages([user("q"), {"role": "assistant", "content": "a"}, answer]))
