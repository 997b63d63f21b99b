"""Parsers of replies: which part of a text is reasoning, which a tool call.

Sampling is never constrained to what a parser reads: a malformed tool call stays text, which the agent sees.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lit_async_rl.agents.calls import ReplyMessage, ToolCall
from lit_async_rl.agents.strict_json import checked_json, read_object
from lit_async_rl.models.tokenizer import TextCodec

NewId = Callable[[], str]


class ReplyParser(ABC):
    """Splits the text of a reply into content, tool calls and reasoning."""

    def for_model(self, codec: TextCodec) -> ReplyParser:
        """The parser for a model; itself, if it does not depend on the model."""
        return self

    @abstractmethod
    def parse(self, text: str, tools: Sequence[Mapping[str, Any]], new_id: NewId) -> ReplyMessage:
        """The parts of a reply.

        Args:
            text: decoded reply, special tokens of the end left out.
            tools: of the call; empty without any.
            new_id: returns a fresh id for a tool call.
        """


class TextParser(ReplyParser):
    """Takes the whole text as content."""

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]], new_id: NewId) -> ReplyMessage:
        return ReplyMessage(content=text)


class TaggedParser(ReplyParser):
    """Reasoning and tool calls between tags, as Qwen, Hermes and many other models write them.

    A tool call is `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`; anything else stays in the content.
    Reasoning ends with `</think>`; the template may have written its opening tag.

    Args:
        call: opening and closing tag of a tool call.
        reasoning: opening and closing tag of the reasoning.
    """

    def __init__(
        self,
        call: tuple[str, str] = ("<tool_call>", "</tool_call>"),
        reasoning: tuple[str, str] = ("<think>", "</think>"),
    ) -> None:
        self.call = tuple(call)
        self.reasoning = tuple(reasoning)
        begin, end = map(re.escape, self.call)
        self._calls = re.compile(f"{begin}(.*?)(?:{end}|$)", re.DOTALL)

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]], new_id: NewId) -> ReplyMessage:
        begin, end = self.reasoning
        reasoning = None
        if end in text:
            before, _, text = text.partition(end)
            reasoning = before.strip().removeprefix(begin).strip()
        if not tools:
            return ReplyMessage(content=text.strip() if reasoning is not None else text, reasoning=reasoning)
        calls: list[ToolCall] = []

        def taken(match: re.Match[str]) -> str:
            call = _json_call(match[1], new_id)
            if call is None:
                return match[0]
            calls.append(call)
            return ""

        content = self._calls.sub(taken, text)
        if calls or reasoning is not None:
            content = content.strip()
        return ReplyMessage(content=content, tool_calls=tuple(calls), reasoning=reasoning)


def _json_call(text: str, new_id: NewId) -> ToolCall | None:
    """The call `{"name": ..., "arguments": {...}}`; None if it is none. Arguments may be an object's JSON."""
    try:
        call = json.loads(text)
        if isinstance(call, dict) and str(call.get("name", "")).strip():
            return read_call(call["name"], call.get("arguments", call.get("parameters", {})), new_id)
    except (ValueError, RecursionError):
        pass
    return None


def read_call(name: Any, arguments: Any, new_id: NewId) -> ToolCall:
    """The call of a name with arguments: an object, or its JSON.

    Raises:
        ValueError: they are none, or cannot be sent as JSON in UTF-8.
    """
    written = arguments if isinstance(arguments, str) else checked_json(arguments)
    if not isinstance(name, str):
        raise ValueError(f"the name of a tool call is not text: {str(name)[:100]}")
    checked_json(name)
    try:
        read_object(written)
    except ValueError as error:
        raise ValueError(f"arguments of a tool call are not a JSON object: {written[:100]} ({error})") from None
    return ToolCall(id=new_id(), name=name, arguments=written)
