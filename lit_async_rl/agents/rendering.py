"""Messages as tokens: a chat template cut at the turns that the policy sampled.

A conversation is rendered with a mark in place of each turn that the policy sampled, and the text between the marks is
tokenised: what the policy wrote is never rendered, nor tokenised, again. That is sound only with templates that write a
turn the same way wherever it stands, which is checked once a model; what they strip from earlier turns of the policy
(reasoning, whitespace) does not matter, because it stands where the marks are.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from jinja2 import TemplateError

from lit_async_rl.agents.calls import AgentCallError
from lit_async_rl.models.run_clock import clock_options
from lit_async_rl.models.tokenizer import TextCodec
from lit_async_rl.types import ROLES

Message = Mapping[str, Any]
Messages = Sequence[Message]
MAX_OPENINGS = 256  # that are kept: agents may send other tools in each call
UNSTABLE = "unstable_template"  # code of the error of a template whose turns cannot be found again
MESSAGE_KEYS = frozenset(
    {"role", "content", "name", "tool_calls", "tool_call_id"}
)  # others are of clients, not of chat


def checked_call_messages(messages: Any) -> tuple[dict[str, Any], ...]:
    """Messages of a call in the form that chat templates read.

    Contents of parts become their texts; a content that is missing becomes empty; arguments of tool calls become
    objects where they are JSON, because most templates write them as such.

    Raises:
        AgentCallError: they are malformed.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise _invalid("messages must be a list of at least one message")
    return tuple(_checked_message(message, number) for number, message in enumerate(messages))


def _invalid(text: str) -> AgentCallError:
    return AgentCallError(text, "invalid_messages", param="messages")


def _checked_message(message: Any, number: int) -> dict[str, Any]:
    if not isinstance(message, Mapping) or message.get("role") not in ROLES:
        raise _invalid(f"messages[{number}] must have a role, one of {', '.join(ROLES)}: {str(message)[:80]!r}")
    content = message.get("content")
    if content is None:
        content = ""
    if isinstance(content, (list, tuple)):
        parts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        if not all(isinstance(part, str) for part in parts):
            raise _invalid(f"messages[{number}] has a part that is no text; only text can be read")
        content = "".join(str(part) for part in parts)
    if not isinstance(content, str):
        raise _invalid(f"messages[{number}].content must be text: {str(content)[:80]!r}")
    checked = {key: value for key, value in message.items() if key in MESSAGE_KEYS and value is not None}
    checked["content"] = content
    if "tool_calls" in checked:
        calls = checked.pop("tool_calls")
        if not isinstance(calls, Sequence) or isinstance(calls, str):
            raise _invalid(f"messages[{number}].tool_calls must be a list")
        if calls:
            checked["tool_calls"] = [_checked_tool_call(call, number) for call in calls]
    return checked


def _checked_tool_call(call: Any, number: int) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _invalid(f"messages[{number}] has a tool call without a function's name: {str(call)[:80]!r}")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):  # else the template gets the text
            arguments = json.loads(arguments)
    return {"id": call.get("id"), "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def message_key(message: Message) -> str:
    """Equal for messages that say the same.

    An assistant's message is compared by its words and calls alone: clients drop reasoning, rewrite the whitespace and
    the JSON, and number the tool calls anew.
    """
    if message["role"] != "assistant":
        return json.dumps(message, sort_keys=True, default=str, ensure_ascii=False)
    calls = [
        [call["function"]["name"], json.dumps(call["function"]["arguments"], sort_keys=True, default=str)]
        for call in message.get("tool_calls", ())
    ]
    words = " ".join(str(message["content"]).split())
    return json.dumps(["assistant", words, calls], ensure_ascii=False)


def _marked_text(mark: str) -> dict[str, Any]:
    return {"role": "assistant", "content": mark}


def _marked_call(message: Message, mark: str) -> dict[str, Any]:
    """A message with the mark as the name of its first tool call."""
    first, *others = message["tool_calls"]
    function = {"name": mark, "arguments": {}}
    return {"role": "assistant", "content": "", "tool_calls": [{**first, "function": function}, *others]}


class ChatRenderer:
    """Renders conversations with the chat template of a model, in segments between the policy's turns.

    Args:
        codec: tokenizer of the model.
        template: chat template in place of the tokenizer's own, as Jinja source.
    """

    def __init__(self, codec: TextCodec, template: str | None = None) -> None:
        self.codec = codec
        self._template = template or codec.tokenizer.chat_template
        self._mark = f"turn{secrets.token_hex(6)}n"
        self._problem: str | None = None
        self._is_checked = False
        self._known_openings: dict[str, tuple[tuple[str, str] | None]] = {}

    def segments(
        self,
        messages: Messages,
        tools: Messages = (),
        options: Mapping[str, Any] = MappingProxyType({}),
        *,
        sampled: Sequence[int] = (),
    ) -> list[str]:
        """Texts between the policy's turns: before the first, after each, and up to where the next turn begins.

        Args:
            messages: the conversation, see `checked_call_messages`.
            tools: JSON schemas of the tools.
            options: further arguments of the template.
            sampled: positions of the messages that the policy sampled.

        Raises:
            AgentCallError: there is no template, or it refuses the messages.
        """
        if not self._template:
            raise AgentCallError(
                f"{self.codec.model!r} has no chat template, so it cannot be called with messages: call it with texts, "
                "or set data.engine.chat_template",
                "no_template",
            )
        try:
            return self._cut(messages, tools, options, sampled=sampled, kept=frozenset())
        except AgentCallError:
            kept = frozenset(place for place in sampled if messages[place].get("tool_calls"))
            if not kept:
                raise
            # a template that wants a call before each answer of a tool, as Mistral's
            return self._cut(messages, tools, options, sampled=sampled, kept=kept)

    def _cut(
        self,
        messages: Messages,
        tools: Messages,
        options: Mapping[str, Any],
        *,
        sampled: Sequence[int],
        kept: frozenset[int],
    ) -> list[str]:
        """Segments of a rendering with a mark in each turn; turns that are `kept` are still tool calls then."""
        marked = [dict(message) for message in messages]
        marks = [f"{self._mark}{number}." for number in range(len(sampled))]
        for mark, place in zip(marks, sampled, strict=True):
            marked[place] = _marked_call(messages[place], mark) if place in kept else _marked_text(mark)
        whole = self._render(marked, tools, options)
        cursor = 0
        found = []
        for mark, place in zip(marks, sampled, strict=True):
            at = whole.find(mark, cursor)
            if at < 0:
                raise AgentCallError("the chat template leaves out an earlier turn", UNSTABLE)
            if place not in kept:
                found.append(whole[cursor:at])
                cursor = at + len(mark)
                continue
            closed = self._render(marked[:place], tools, {**options, "add_generation_prompt": False})
            openings = self._openings(tools, options)
            end = self._end_of_turn(whole, at)
            if openings is None or end is None or not whole.startswith(closed) or len(closed) < cursor:
                raise AgentCallError("it is unclear where the chat template writes a tool call", UNSTABLE)
            found.append(whole[cursor : len(closed)] + openings[0])
            cursor = end
        return [*found, whole[cursor:]]

    def _end_of_turn(self, text: str, begin: int) -> int | None:
        """Where the first end token stands in the text; None if there is none."""
        ends = [str(self.codec.tokenizer.convert_ids_to_tokens(token)) for token in self.codec.ends.ids]
        return min((place for end in ends if (place := text.find(end, begin)) >= 0), default=None)

    def _render(self, messages: list[dict[str, Any]], tools: Messages, options: Mapping[str, Any]) -> str:
        continues = messages[-1]["role"] == "assistant" and bool(options.get("continue_final_message"))
        try:
            return str(
                self.codec.tokenizer.apply_chat_template(
                    messages,
                    tools=[dict(tool) for tool in tools] or None,
                    chat_template=self._template,
                    tokenize=False,
                    **({"add_generation_prompt": not continues} | clock_options(self._template) | dict(options)),
                )
            )
        except (TemplateError, ValueError, TypeError, KeyError, AttributeError) as error:
            roles = ", ".join(message["role"] for message in messages[-8:])
            raise AgentCallError(
                f"the chat template of {self.codec.model!r} refuses a conversation that ends with the roles {roles}: "
                f"{type(error).__name__}: {error}",
                "invalid_messages",
                param="messages",
            ) from error

    def encode(self, text: str) -> tuple[int, ...]:
        """Tokens of a conversation's beginning; the template has written the tokenizer's prefix."""
        return tuple(self.codec.tokenizer(text, add_special_tokens=False)["input_ids"])

    def encode_after(self, token_ids: Sequence[int], text: str) -> tuple[int, ...]:
        """Tokens of the text that follows a turn, without the end of turn that the turn has written itself."""
        if token_ids and token_ids[-1] in self.codec.ends.ids:
            end = str(self.codec.tokenizer.convert_ids_to_tokens(token_ids[-1]))
            if text.lstrip().startswith(end):  # Llama 2 writes a space before it
                text = text.lstrip().removeprefix(end)
        return self.codec.encode_continuation(text) if text else ()

    # -- whether earlier segments stay as they were -------------------------------------------------------------------

    def is_continued(
        self,
        before: Sequence[str],
        now: Sequence[str],
        *,
        tools: Messages = (),
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> bool:
        """Whether segments are what earlier calls have rendered.

        The opening of a turn may differ, because many templates open an answer otherwise (with an empty reasoning, say)
        than they write it later: what the policy has read stays in the conversation.
        """
        if list(before) == list(now):
            return True
        openings = self._openings(tools, options)
        if openings is None:
            return False
        asked, written = openings
        return all(
            old == new
            or (old.endswith(asked) and new.endswith(written) and _without(old, asked) == _without(new, written))
            for old, new in zip(before, now, strict=True)
        )

    def _openings(self, tools: Messages, options: Mapping[str, Any]) -> tuple[str, str] | None:
        """How the template opens the turn that it asks for, and an earlier one; None if that is unclear."""
        key = json.dumps([list(tools), dict(options)], default=str, sort_keys=True)
        known = self._known_openings.get(key)
        if known is None:
            user = {"role": "user", "content": "question"}
            closed = self._render([user], tools, {**options, "add_generation_prompt": False})
            asked = self.segments([user], tools, options)[0]
            written = self.segments([user, {"role": "assistant", "content": ""}, user], tools, options, sampled=(1,))[0]
            is_clear = asked.startswith(closed) and written.startswith(closed)
            known = ((asked[len(closed) :], written[len(closed) :]) if is_clear else None,)
            if len(self._known_openings) >= MAX_OPENINGS:
                self._known_openings.clear()
            self._known_openings[key] = known
        return known[0]

    # -- check of a template, once a model ----------------------------------------------------------------------------

    @property
    def has_template(self) -> bool:
        """Whether messages can be rendered at all."""
        return bool(self._template)

    @property
    def problem(self) -> str | None:
        """Why conversations cannot be continued token by token; None if they can."""
        if not self._is_checked:
            self._problem = self._find_problem()
            self._is_checked = True
        return self._problem

    def _find_problem(self) -> str | None:
        """Renders a conversation that grows, and looks whether what was rendered before stays."""
        user = {"role": "user", "content": "first"}
        turn = {"role": "assistant", "content": "answer"}
        grown = [user, turn, {"role": "user", "content": "second"}, turn, {"role": "user", "content": "third"}]
        before: list[str] = []
        for length, sampled in ((1, ()), (3, (1,)), (5, (1, 3))):
            try:
                now = self.segments(grown[:length], sampled=sampled)
            except AgentCallError as error:
                return str(error)
            if not self.is_continued(before, now[: len(before)]):
                return "its chat template writes earlier messages differently when a conversation goes on"
            before = now
        if len({segment.strip() for segment in before}) < len(before):
            return "its chat template leaves out messages of the user"
        return None


def _without(text: str, end: str) -> str:
    return text[: len(text) - len(end)]
