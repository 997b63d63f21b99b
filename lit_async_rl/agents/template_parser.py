"""Parsers for the forms of models' tool calls, by response templates of transformers.

| the model writes | found by |
|---|---|
| a form that its tokenizer describes (`response_template` in `tokenizer_config.json`) | `TemplateParser()` |
| `<tool_call><function=add><parameter=a>1</parameter>...` (Qwen 3 Coder, Qwen 3.5) | `TemplateParser(XML_CALLS)` |
| `<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>` (Hermes, Qwen 2.5 and 3, SmolLM) | `TaggedParser` |

`AutoParser` chooses among them, in this order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lit_async_rl.agents.calls import REASONING_KEYS, ReplyMessage
from lit_async_rl.agents.parsing import NewId, ReplyParser, TaggedParser, read_call
from lit_async_rl.agents.strict_json import checked_json
from lit_async_rl.models.tokenizer import TextCodec
from lit_async_rl.runtime.limited_log import LimitedLog

XML_MARK = "<function="  # in chat templates of models that write calls as XML
XML_CALLS: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"</function>\s*</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"content": "text", "repeats": True, "join": "\n"},  # before, between and after calls
    },
}


class TemplateParser(ReplyParser):
    """Parses a reply with a response template of transformers.

    A reply that the template cannot read is content as a whole. Arguments get the types of the tool's schema.

    See https://huggingface.co/docs/transformers/main/chat_response_parsing.

    Args:
        template: response template; None is that of the model's tokenizer.

    Raises:
        ValueError: the template is malformed.
    """

    def __init__(self, template: Mapping[str, Any] | None = None) -> None:
        from transformers.utils.chat_parsing.response_templates import load_response_template

        self.template = None if template is None else dict(template)
        if self.template is not None:
            load_response_template(self.template)
        self._warnings = LimitedLog(logging.getLogger(__name__))

    def for_model(self, codec: TextCodec) -> ReplyParser:
        """See `ReplyParser`.

        Raises:
            ValueError: the parser has no template, and neither has the tokenizer.
        """
        if self.template is not None:
            return self
        own = getattr(codec.tokenizer, "response_template", None)
        if own is None:
            raise ValueError(
                f"data.engine.parser=TemplateParser() needs a template: the tokenizer of {codec.model!r} has no "
                "response_template"
            )
        return TemplateParser(own)

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]], new_id: NewId) -> ReplyMessage:
        """See `ReplyParser`."""
        from transformers.utils.chat_parsing import ResponseParser

        # the chat template may have begun the reasoning
        prefix = "<think>\n" if "</think>" in text and "<think>" not in text.partition("</think>")[0] else ""
        template = self.template or {}  # `for_model` has seen to it that there is one
        schemas: list[dict[Any, Any] | Callable[..., Any]] = [dict(tool) for tool in tools]

        def parsed(whole: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
            parser = ResponseParser(template, prefix=prefix, tools=schemas)
            parser.feed(whole)
            return parser.finalize()

        try:
            found, at_end = parsed(text)
            # with a line after it, the last call is closed before the end, unless it was cut
            if self._is_open(at_end) and self._is_open(parsed(f"{text}\n")[1]):
                return ReplyMessage(content=text)
            message = _message(found, new_id)
        except Exception as error:  # of a template that may be anybody's; what it cannot read is content
            self._warnings.warning("a reply could not be parsed and is treated as text: %s", str(error)[:200])
            return ReplyMessage(content=text)
        return message if tools or not message.tool_calls else ReplyMessage(content=text)

    def _is_open(self, at_end: Sequence[Mapping[str, Any]]) -> bool:
        """Whether a call was open at the end; JSON itself shows a cut, also without a closing tag."""
        fields = (self.template or {}).get("fields", {})
        return any(
            event["type"] == "region_close"
            and event["field"] == "tool_calls"
            and fields["tool_calls"].get("content") != "json"
            for event in at_end
        )


def _message(found: Mapping[str, Any], new_id: NewId) -> ReplyMessage:
    """The message of a response template's output."""
    functions = [call["function"] for call in found.get("tool_calls") or ()]
    calls = [read_call(function["name"], function["arguments"], new_id) for function in functions]
    content = found.get("content") or ""
    if not isinstance(content, str):
        raise TypeError(f"the content is not text: {str(content)[:100]}")
    reasoning = next((str(found[name]) for name in REASONING_KEYS if found.get(name)), None)
    checked_json([content, reasoning])  # a template may read them from JSON, with its escapes
    return ReplyMessage(content=content, tool_calls=tuple(calls), reasoning=reasoning)


class AutoParser(ReplyParser):
    """The parser that fits a model by its response template or chat template, else `TaggedParser`."""

    def for_model(self, codec: TextCodec) -> ReplyParser:
        """See `ReplyParser`."""
        if getattr(codec.tokenizer, "response_template", None) is not None:
            return TemplateParser().for_model(codec)
        if XML_MARK in str(codec.tokenizer.chat_template or ""):
            return TemplateParser(XML_CALLS)
        return TaggedParser()

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]], new_id: NewId) -> ReplyMessage:
        """As `TaggedParser`, before it knows the model."""
        return TaggedParser().parse(text, tools, new_id)
