"""Forms of tool calls: what a parser finds, and that it never loses text."""

import json

import pytest
from agent_endpoints import TOOL
from chat_models import chat_model

from lit_async_rl.agents import AutoParser, TaggedParser, TemplateParser
from lit_async_rl.agents.calls import ReplyMessage
from lit_async_rl.agents.template_parser import XML_CALLS
from lit_async_rl.models.tokenizer import TextCodec

CALL = "<tool_call>\n<function=add>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>"
TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "assistant",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open": "[CALL]",
            "close": "[/CALL]",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"content": "text"},
    },
}


def parse(text, parser=None, tools=(TOOL,)):
    ids = iter(range(100))
    return (parser or TemplateParser(XML_CALLS)).parse(text, tools, lambda: f"call_{next(ids)}")


def test_calls_as_xml_have_the_types_of_the_schema():
    found = parse(f"<think>\nhm\n</think>\n\nLet me see.{CALL.format(7)}\n{CALL.format(8)}")
    assert found.content == "Let me see."
    assert found.reasoning == "hm"
    assert [json.loads(call.arguments) for call in found.tool_calls] == [{"a": 7}, {"a": 8}]
    assert [call.id for call in found.tool_calls] == ["call_0", "call_1"]


def test_reasoning_that_the_chat_template_began_is_reasoning():
    found = parse(f"hm\n</think>\n\n{CALL.format(7)}")
    assert found.reasoning == "hm"
    assert found.content == ""
    assert len(found.tool_calls) == 1


@pytest.mark.parametrize("text", ["", "plain", "a < b", "<tool_call>", "größe 日本 🎉", "</think>", "\ufffd"])
def test_text_without_a_call_has_none(text):
    for parser in (TemplateParser(XML_CALLS), TaggedParser(), TemplateParser(TEMPLATE)):
        assert parse(text, parser).tool_calls == ()


def test_text_around_calls_is_kept_and_calls_that_are_cut_are_text():
    found = parse(f"before {CALL.format(7)} between {CALL.format(8)} after")
    assert found.content == "before\nbetween\nafter"
    cut = f"before {CALL.format(7)} {CALL.format(8)[:40]}"
    assert parse(cut).content == cut
    assert parse(cut).tool_calls == ()


def test_arguments_that_are_no_object_are_text():
    for arguments in ("5", "[1]", '"x"', "null", '"[1]"'):
        text = f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'
        assert parse(text, TaggedParser()).content == text
    found = parse('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', TaggedParser())
    assert json.loads(found.tool_calls[0].arguments) == {"a": 1}


@pytest.mark.parametrize(
    "call",
    [
        r'{"name": "add", "arguments": {"a": "\ud83d"}}',
        r'{"name": "add", "arguments": "{\"a\": \"\\ud83d\"}"}',
        r'{"name": "add", "arguments": {"\udc00": 1}}',
        r'{"name": "add\ud83d", "arguments": {}}',
        '{"name": "add", "arguments": {"a": NaN}}',
        '{"name": "add", "arguments": {"a": -Infinity}}',
        '{"name": "add", "arguments": {"a": 1e999}}',
        '{"name": "add", "arguments": "{\\"a\\": 1e999}"}',
    ],
)
def test_calls_that_cannot_be_sent_as_json_are_text(call):
    """Half a surrogate pair is no UTF-8, and clients in other languages read no NaN."""
    tagged = f"<tool_call>{call}</tool_call>"
    assert parse(tagged, TaggedParser()) == ReplyMessage(content=tagged)
    bracketed = f"[CALL]{call}[/CALL]"
    assert parse(bracketed, TemplateParser(TEMPLATE)) == ReplyMessage(content=bracketed)


def test_calls_that_are_nested_too_deeply_are_text():
    deep = f'{{"a": {"[" * 100_000}{"]" * 100_000}}}'
    for arguments in (deep, json.dumps(deep)):
        text = f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'
        assert parse(text, TaggedParser()) == ReplyMessage(content=text)


def test_a_whole_surrogate_pair_and_a_large_number_are_arguments():
    found = parse(
        r'<tool_call>{"name": "add", "arguments": {"a": "\ud83d\ude00", "b": 1e300}}</tool_call>', TaggedParser()
    )
    assert found.tool_calls[0].arguments == '{"a": "😀", "b": 1e+300}'


def test_reasoning_that_cannot_be_sent_is_content():
    fields = TEMPLATE["fields"] | {"thinking": {"open": "[THINK]", "close": "[/THINK]", "content": "json"}}
    text = r'[THINK]"\ud83d"[/THINK]done'
    assert parse(text, TemplateParser(TEMPLATE | {"fields": fields})) == ReplyMessage(content=text)


def test_what_a_template_cannot_read_is_content():
    for broken in ("[CALL]{oops[/CALL]", "[CALL]5[/CALL]", '[CALL]{"name": "add"}[/CALL]', '[CALL]["a"][/CALL]'):
        assert parse(broken, TemplateParser(TEMPLATE)).content == broken
    good = '[CALL]{"name": "add", "arguments": {"a": 1}}[/CALL]'
    assert parse(good, TemplateParser(TEMPLATE)).tool_calls[0].name == "add"
    assert parse(good, TemplateParser(TEMPLATE), tools=()).content == good


def test_a_malformed_template_is_refused():
    with pytest.raises(ValueError, match="start_anchor"):
        TemplateParser({"fields": {"content": {}}})


def test_the_parser_fits_the_model(tmp_path):
    chat = "{% for m in messages %}{{ m.content }}{% endfor %}"
    codec = TextCodec(chat_model(tmp_path / "plain", chat))
    assert isinstance(AutoParser().for_model(codec), TaggedParser)
    with pytest.raises(ValueError, match=r"data\.engine\.parser=TemplateParser\(\) needs a template"):
        TemplateParser().for_model(codec)
    codec = TextCodec(chat_model(tmp_path / "xml", chat + "{# <function=name> #}"))
    assert AutoParser().for_model(codec).template == XML_CALLS
    codec.tokenizer.response_template = TEMPLATE
    assert AutoParser().for_model(codec).template == TEMPLATE
