"""Conversations as rows: what trains is what the policy would say, after the tokens that it would read."""

from __future__ import annotations

import itertools

import pytest
from chat_families import ANSWER, FAMILIES, QUESTION, SECOND, write
from tool_families import CASES, TOOL, codec_with_tools

from lit_async_rl.agents.rendering import ChatRenderer, checked_call_messages
from lit_async_rl.models.tokenizer import TextCodec
from lit_async_rl.problem import TOOLS, Prompt
from lit_async_rl.supervised.records import SEGMENTS, Demonstrations
from lit_async_rl.supervised.rows import RowEncoder

TALK = [
    {"role": "user", "content": QUESTION},
    {"role": "assistant", "content": ANSWER},
    {"role": "user", "content": SECOND},
    {"role": "assistant", "content": "It is 6."},
]
THINKS = {"deepseek-r1", "nemotron-nano", "minimax-m2"}  # ask for reasoning, which the template takes out again
NO_TOKEN = {"falcon"}  # ends a turn with ordinary text
THINKING_ONLY = {"deepseek-v3"}


def pieces(codec: TextCodec, row) -> list[tuple[bool, str]]:
    """Runs of tokens that train, or do not, as text."""
    runs = itertools.groupby(zip(row.ids.tolist(), row.trains.tolist(), strict=True), key=lambda pair: pair[1])
    return [(trains, codec.tokenizer.decode([token for token, _ in run])) for trains, run in runs]


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.template])
def test_turns_train_and_follow_what_the_policy_reads(name, tmp_path):
    codec = TextCodec(write(FAMILIES[name], tmp_path))
    encode = RowEncoder(codec, "all")
    if name in THINKS | NO_TOKEN:
        with pytest.raises(
            ValueError,
            match="which is not an end token" if name in NO_TOKEN else "a completed assistant turn differently",
        ):
            encode(Prompt(messages=TALK))
        return
    row = encode(Prompt(messages=TALK))
    prompt = codec.encode(Prompt(messages=TALK[:1]))
    begin = row.trains.tolist().index(True)
    assert tuple(row.ids[:begin].tolist()) == prompt, "the first turn follows the tokens that RL samples after"
    turns = [text for trains, text in pieces(codec, row) if trains]
    assert [ANSWER in turns[0], "It is 6." in turns[1], len(turns)] == [True, True, 2]
    runs = [list(run) for trains, run in itertools.groupby(range(len(row.ids)), key=lambda n: row.trains[n]) if trains]
    assert all(int(row.ids[run[-1]]) in codec.ends.ids for run in runs), "each turn ends with a token that ends turns"
    last = RowEncoder(codec, "last")(Prompt(messages=TALK))
    assert last.ids.tolist() == row.ids.tolist()
    assert last.trains.nonzero()[0].tolist() == runs[-1]
    family = FAMILIES[name]
    if family.stable and family.ends_in_turns and not family.joins_last:
        whole = codec.tokenizer.apply_chat_template(TALK, tokenize=False)
        rendered = tuple(codec.tokenizer(whole, add_special_tokens=False)["input_ids"])
        ids = tuple(row.ids.tolist())[: len(rendered)]  # of GLM it ends before the token that opens the next turn
        assert ids == rendered[: len(ids)], "where a template only appends, as it is rendered"


@pytest.mark.parametrize("name", sorted(CASES))
def test_tool_calls_train_and_their_answers_do_not(name, tmp_path):
    codec = codec_with_tools(name, tmp_path)
    call = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": '{"a": 21}'}}
    talk = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 21?"},
        {"role": "assistant", "content": "", "reasoning_content": "a thought", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00000", "content": "twenty-one"},
        {"role": "assistant", "content": "it is that"},
    ]
    talk = talk[1:] if name == "mistral" else talk  # refuses the system message of these
    tools = [TOOL] if "tools" in codec.template_variables else []
    prompt = Prompt(messages=talk, metadata={TOOLS: tools})
    if name in THINKING_ONLY:
        with pytest.raises(ValueError, match="a completed assistant turn differently"):
            RowEncoder(codec, "all")(prompt)
        return
    writes_thoughts = "a thought" in ChatRenderer(codec).turn(checked_call_messages(talk[:-2]), tools)
    if not writes_thoughts:
        with pytest.raises(ValueError, match="leaves out the reasoning of message"):
            RowEncoder(codec, "all")(prompt)
        talk[-3].pop("reasoning_content")
        prompt = Prompt(messages=talk, metadata={TOOLS: tools})
    found = pieces(codec, RowEncoder(codec, "all")(prompt))
    said = [text for trains, text in found if trains]
    given = [text for trains, text in found if not trains]
    assert "21" in said[0]
    assert ("add" in said[0]) == (name != "kimi-k2")  # which writes the id of a call
    assert "it is that" in said[-1]
    assert len(said) == 2
    assert "twenty-one" in given[1]
    assert ("Be brief." in given[0]) == (name != "mistral")
    assert ("a thought" in said[0]) == writes_thoughts


def test_texts_train_behind_the_prompt_of_rl_up_to_the_end_of_text(tmp_path):
    for name in ("appends-eos", "unigram", "wordpiece"):
        codec = TextCodec(write(FAMILIES[name], tmp_path / name))
        row = RowEncoder(codec, "all")(Prompt(text=QUESTION, answer=f" {ANSWER}"))
        before = codec.encode(Prompt(text=QUESTION))
        assert tuple(row.ids[: len(before)].tolist()) == before
        assert row.trains.tolist() == [n >= len(before) for n in range(len(row.ids))]
        assert int(row.ids[-1]) == codec.tokenizer.eos_token_id
        assert int(row.ids[-2]) != codec.tokenizer.eos_token_id


def test_segments_train_as_they_say(tmp_path):
    codec = TextCodec(write(FAMILIES["qwen2.5"], tmp_path))
    record = {SEGMENTS: [{"text": "1+2=", "train": False}, {"text": "[1+2]<|im_end|>", "train": True}]}
    record[SEGMENTS] += [{"text": "3;", "train": False}, {"text": "3<|im_end|>", "train": True}]
    (prompt,) = [Demonstrations([record], "records")[0]]
    assert pieces(codec, RowEncoder(codec, "all")(prompt)) == [
        (False, "1+2="),
        (True, "[1+2]<|im_end|>"),
        (False, "3;"),
        (True, "3<|im_end|>"),
    ]


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"messages": TALK[:1]}, "the conversation has no assistant turn"),
        (
            {"messages": [TALK[0], {"role": "assistant", "content": " "}]},
            "message 1, an assistant turn, is empty",
        ),
        ({"messages": TALK[1:2]}, "begins with an assistant turn"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "message 0 must have a role, one of system"),
        (
            {"prompt": "1+1="},
            "a record must have messages, prompt and completion, or segments, got the keys prompt",
        ),
        ({"prompt": "1+1=", "completion": ""}, "the completion is empty"),
        ({"prompt": "1+1=", "completion": {"a": 1}}, "the completion must be text or messages"),
        ({"segments": [{"text": "x"}]}, "segments must be a list of"),
        ({"segments": [{"text": "x", "train": False}]}, "no token of the record is trained on"),
        ({"messages": TALK, "tools": "add"}, "tools of a prompt must be a list"),
        ("text", "a record must be a dictionary, got 'text'"),
    ],
)
def test_a_bad_record_is_named(record, said, tmp_path):
    codec = TextCodec(write(FAMILIES["qwen2.5"], tmp_path))
    source = Demonstrations({7: record}, "my.jsonl")
    with pytest.raises(ValueError, match=said) as error:
        RowEncoder(codec, "all")(source[0])
    if "Rows" not in said and not isinstance(record, str):
        assert source.where(0) == "my.jsonl, line 7"
    assert "\n" not in str(error.value)
