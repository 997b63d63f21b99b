"""Messages as tokens: a chat template cut at the turns that the policy sampled.

A conversation is rendered with a mark in place of each such turn, and the text between the marks is tokenised: what the
policy wrote is never rendered, nor tokenised, again. That is sound only with templates that write a turn the same way
wherever it stands, which is checked once a model; what they strip from earlier turns of the policy (reasoning,
whitespace) does not matter, because a mark replaces it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

from jinja2 import TemplateError

from lit_async_rl.agents.calls import REASONING_KEYS, AgentCallError
from lit_async_rl.agents.strict_json import MAX_DEPTH, checked_json, is_too_deep
from lit_async_rl.models.run_clock import clock_options
from lit_async_rl.models.tokenizer import TextCodec
from lit_async_rl.problem import ROLES

Message = Mapping[str, Any]
Messages = Sequence[Message]
MAX_KINDS = 256  # of tools and arguments of the template that are remembered: an agent may change them in each call
UNSTABLE = "unstable_template"  # code of the error of a template whose turns cannot be found again
REWRITES = "its chat template writes earlier messages differently when a conversation continues"
INSTRUCTIONS = ("system", "developer")  # roles
TEXT_PARTS = ("text", "input_text", "output_text", "reasoning_text", "refusal")  # types of the parts of a content
MESSAGE_KEYS = frozenset(
    {"role", "content", "name", "tool_calls", "tool_call_id"}
)  # others are of clients, not of chat


def checked_call_messages(messages: Any) -> tuple[dict[str, Any], ...]:
    """Messages of a call in the form that chat templates read.

    Contents of parts become their texts; a missing content becomes empty; arguments of tool calls that are JSON become
    objects, as most templates want them; an assistant's reasoning gets every name that a template may read.

    Raises:
        AgentCallError: they are malformed.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise _invalid("messages must be a list of at least one message")
    return tuple(_checked_message(message, number) for number, message in enumerate(messages))


def _invalid(text: str, param: str = "messages") -> AgentCallError:
    return AgentCallError(text, "invalid_messages", param=param)


def _checked_message(message: Any, number: int) -> dict[str, Any]:
    if not isinstance(message, Mapping) or message.get("role") not in ROLES:
        raise _invalid(f"messages[{number}] must have a role, one of {', '.join(ROLES)}: {str(message)[:80]!r}")
    content = message.get("content")
    if content is None:
        content = message.get("refusal") or ""
    checked = {key: value for key, value in message.items() if key in MESSAGE_KEYS and value is not None}
    checked["content"] = text_of(content, f"messages[{number}].content")
    for key in ("name", "tool_call_id"):
        if not isinstance(checked.get(key), str | int | None):
            raise _invalid(f"messages[{number}].{key} must be text: {type(checked[key]).__name__}")
    reasoning = next((message[key] for key in REASONING_KEYS if isinstance(message.get(key), str)), "")
    if reasoning and message["role"] == "assistant":
        checked |= dict.fromkeys(REASONING_KEYS, reasoning)
    if "tool_calls" in checked:
        calls = checked.pop("tool_calls")
        if not isinstance(calls, Sequence) or isinstance(calls, str):
            raise _invalid(f"messages[{number}].tool_calls must be a list")
        if calls:
            checked["tool_calls"] = [_checked_tool_call(call, number) for call in calls]
    return checked


def text_of(content: Any, where: str, param: str = "messages") -> str:
    """The text of a content: itself, or that of its parts.

    Args:
        content: of a message, or of an item of the Responses API.
        where: its path, for the error.
        param: argument of the call that has it.

    Raises:
        AgentCallError: it has anything but text.
    """
    if isinstance(content, (list, tuple)):
        parts = [_text_of_part(part) for part in content]
        if not all(isinstance(part, str) for part in parts):
            raise _invalid(f"{where} has a part that is not text; only text is supported", param)
        content = "".join(str(part) for part in parts)
    if not isinstance(content, str):
        raise _invalid(f"{where} must be text: {str(content)[:80]!r}", param)
    return content


def _text_of_part(part: Any) -> Any:
    is_text = isinstance(part, Mapping) and part.get("type", "text") in TEXT_PARTS
    return part.get("refusal" if part.get("type") == "refusal" else "text") if is_text else None


def _checked_tool_call(call: Any, number: int) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _invalid(f"messages[{number}] has a tool call without a function name: {str(call)[:80]!r}")
    if not isinstance(call.get("id"), str | int | None):
        raise _invalid(f"messages[{number}] has a tool call whose id is not text: {type(call['id']).__name__}")
    arguments = function.get("arguments")
    if arguments is None:
        arguments = {}
    if isinstance(arguments, str):
        arguments = _parsed(arguments)
    elif is_too_deep(arguments):
        raise _invalid(f"messages[{number}] has a tool call whose arguments are nested more than {MAX_DEPTH} deep")
    return {"id": call.get("id"), "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _parsed(arguments: str) -> Any:
    """The value of arguments in JSON; the text itself if they have none that can be written again."""
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(arguments)
        if not is_too_deep(value):
            checked_json(value)
            return value
    return arguments


def checked_tools(tools: Any) -> Messages:
    """Tools of a call; keys not read here are the template's.

    Raises:
        AgentCallError: they are malformed.
    """
    if tools is None:
        return ()
    if isinstance(tools, (str, bytes, Mapping)) or not isinstance(tools, Sequence):
        raise AgentCallError("tools must be a list of JSON schemas", "invalid_tools", param="tools")
    for number, tool in enumerate(tools):
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise AgentCallError(f"tools[{number}] must be a function with a name", "invalid_tools", param="tools")
        if not isinstance(function.get("parameters"), Mapping | None):
            raise AgentCallError(
                f"tools[{number}] must have the JSON schema of an object as its parameters",
                "invalid_tools",
                param="tools",
            )
    return tuple(tools)


def message_key(message: Message) -> str:
    """Equal for messages that say the same.

    An assistant's message is compared by words and calls alone: clients drop reasoning, rewrite whitespace and JSON,
    and number tool calls anew.
    """
    if message["role"] != "assistant":
        return json.dumps(message, sort_keys=True, default=str, ensure_ascii=False)
    calls = [
        [call["function"]["name"], json.dumps(call["function"]["arguments"], sort_keys=True, default=str)]
        for call in message.get("tool_calls", ())
    ]
    words = " ".join(str(message["content"]).split())
    return json.dumps(["assistant", words, calls], ensure_ascii=False)


def length_of(message: Message) -> int:
    """Characters of a message that the graph keeps, without those between its parts."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    texts = [message["content"], message.get("name", ""), message.get("tool_call_id", "")]
    texts += [call["name"] for call in calls]
    texts += [json.dumps(call["arguments"], default=str, ensure_ascii=False) for call in calls]
    return sum(len(str(text)) for text in texts)


def kind_of(tools: Messages, options: Mapping[str, Any]) -> str:
    """Tools and arguments of the template as JSON, equal for calls that may continue each other.

    Raises:
        AgentCallError: they are nested too deeply.
    """
    for param, given in (("tools", tools), ("chat_template_kwargs", options)):
        if is_too_deep([given]):
            raise AgentCallError(f"{param}: more than {MAX_DEPTH} levels", "invalid_value", param=param)
    return json.dumps([list(tools), dict(options)], default=str, sort_keys=True, ensure_ascii=False)


# -- messages of the checks ------------------------------------------------------------------------------------------

_USER = {"role": "user", "content": "question"}
_TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string", "description": "Place."}}},
    },
}


def _call(*names: str) -> dict[str, Any]:
    """Assistant's message with a tool call of each name, which has one letter."""
    calls = [
        {"id": f"call0000{name}", "type": "function", "function": {"name": "look", "arguments": {"at": name}}}
        for name in names
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _answer(content: str, name: str) -> dict[str, Any]:
    """A tool's answer to the call of a name."""
    return {"role": "tool", "content": content, "tool_call_id": f"call0000{name}"}


def _marked_text(mark: str) -> dict[str, Any]:
    return {"role": "assistant", "content": mark}


def _marked_call(message: Message, mark: str) -> dict[str, Any]:
    """A message with the mark in its tool calls; names stay, because answers of tools may repeat them."""
    calls = [
        {**call, "function": {"name": call["function"]["name"], "arguments": {"mark": mark}}}
        for call in message["tool_calls"]
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _forms(messages: Messages) -> Iterator[list[dict[str, Any]]]:
    """Messages in the form that templates read, and in those that some model families want instead."""
    yield [dict(message) for message in messages]
    if any(message.get("tool_calls") for message in messages):
        yield [_with_text_arguments(message) for message in messages]  # DeepSeek's join them to other texts
    if any(message.get(REASONING_KEYS[0]) for message in messages):  # gpt-oss: beside a call either this or content
        yield [{key: value for key, value in message.items() if key not in REASONING_KEYS} for message in messages]


def _with_text_arguments(message: Message) -> dict[str, Any]:
    if not message.get("tool_calls"):
        return dict(message)
    calls = [
        {**call, "function": call["function"] | {"arguments": json.dumps(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


class ChatRenderer:
    """Renders conversations with the chat template of a model, in segments between the policy's turns.

    Args:
        codec: tokenizer of the model.
        template: chat template in place of the tokenizer's, as Jinja source.
    """

    def __init__(self, codec: TextCodec, template: str | None = None) -> None:
        self.codec = codec
        self._template = template or codec.tokenizer.chat_template
        self._mark = f"turn{secrets.token_hex(6)}n"
        self._tail = functools.lru_cache(MAX_KINDS)(self._find_tail)
        self._form_of_calls = functools.lru_cache(MAX_KINDS)(self._find_form_of_calls)
        self._unread: dict[tuple[Any, str], int | None] = {}  # by roles and kind, see `_find_unread`

    def segments(
        self,
        messages: Messages,
        tools: Messages = (),
        options: Mapping[str, Any] = MappingProxyType({}),
        *,
        sampled: Sequence[int] = (),
    ) -> list[str]:
        """Texts between the policy's turns: before the first, and after each up to where the next begins.

        Args:
            messages: the conversation, see `checked_call_messages`.
            tools: JSON schemas of the tools.
            options: further arguments of the template.
            sampled: positions of the messages that the policy sampled.

        A developer's message becomes one of the system where the template writes only those.

        Raises:
            AgentCallError: there is no template, or it refuses the messages or leaves one of the system out.
        """
        if not self._template:
            raise AgentCallError(
                f"the model {self.codec.model!r} has no chat template, so it cannot be called with messages: call it "
                "with text, or set data.engine.chat_template",
                "no_template",
            )
        messages = self._as_read(messages, tools, options)
        form = "text"
        if any(message["role"] == "tool" for message in messages):
            form = self._form_of_calls(kind_of(tools, options))
        if form == "lost":
            raise _invalid(f"the chat template of {self.codec.model!r} leaves out the results of tools")
        calls = frozenset(place for place in sampled if messages[place].get("tool_calls"))
        if calls and form == "unclear":
            raise AgentCallError(
                "the text that the chat template writes after a tool call could not be determined", UNSTABLE
            )
        kept = calls if form == "call" else frozenset[int]()
        return self._cut(messages, tools, options, sampled=sampled, kept=kept)

    def turn(
        self,
        messages: Messages,
        tools: Messages = (),
        options: Mapping[str, Any] = MappingProxyType({}),
        *,
        sampled: Sequence[int] = (),
    ) -> str:
        """Text of the assistant's turn that ends a conversation, with the token that ends it.

        It is written as at the end of a conversation, behind other turns of the assistant (`sampled`).

        Raises:
            AgentCallError: the template refuses the messages, begins a completed turn differently, or ends it
                with no token.
        """
        closed = {**options, "add_generation_prompt": False}
        asked = self.segments(messages[:-1], tools, options, sampled=sampled)[-1]
        written = self.segments(messages, tools, closed, sampled=sampled)[-1]
        if not written.startswith(asked):
            raise AgentCallError(
                f"the chat template of {self.codec.model!r} ends a prompt with {asked[-40:]!r}, but begins "
                "a completed assistant turn differently: include the turn's reasoning, or switch thinking off "
                "(chat_template_kwargs)",
                UNSTABLE,
            )
        calls = messages[-1].get("tool_calls", ())
        text = written[len(asked) :]
        words = [messages[-1]["content"].strip(), *(call["function"]["name"] for call in calls)]
        words = [word for word in words if word and word in text]
        end = self._end_of_turn(text, max((text.rfind(word) + len(word) for word in words), default=0))
        if end is None:  # GLM's turns end with the token that opens the next one
            following = {"role": "tool", "content": "", "tool_call_id": calls[-1]["id"]} if calls else _USER
            own = text
            with contextlib.suppress(AgentCallError):
                text = self.segments([*messages, following], tools, closed, sampled=sampled)[-1][len(asked) :]
            end = self._end_of_turn(text, len(own))
            if end is None or not text.startswith(own) or text[len(own) : end].strip():
                raise AgentCallError(
                    f"the chat template of {self.codec.model!r} ends a turn with {own[-20:]!r}, which is not an end "
                    "token: completions do not end there",
                    UNSTABLE,
                )
        return text[:end] + max((token for token in self._ends if text.startswith(token, end)), key=len)

    def _as_read(self, messages: Messages, tools: Messages, options: Mapping[str, Any]) -> Messages:
        """The messages with roles whose texts the template writes."""
        if self._find_unread(messages, tools, options) is None:
            return messages
        changed = [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
        if (lost := self._find_unread(changed, tools, options)) is not None:
            raise _invalid(
                f"the chat template of {self.codec.model!r} leaves out messages[{lost}], of the role "
                f"{messages[lost]['role']}: the policy would never read it"
            )
        return changed

    def _find_unread(self, messages: Messages, tools: Messages, options: Mapping[str, Any]) -> int | None:
        """First system or developer message that the template leaves out; None if it writes all.

        Searched for once per sequence of roles and empty messages, with other texts.
        """
        # an empty one may be left out
        places = [n for n, one in enumerate(messages) if one["role"] in INSTRUCTIONS and one["content"].strip()]
        if not places:
            return None
        begin = messages[: places[-1] + 1]
        key = tuple((message["role"], n in places) for n, message in enumerate(begin)), kind_of(tools, options)
        if key not in self._unread:
            marks = {n: f"{self._mark}{n}n" for n in places}
            marked = [{**message, "content": marks.get(n, message["content"])} for n, message in enumerate(begin)]
            others = {name: value for name, value in options.items() if name != "continue_final_message"}
            try:
                text = self._render([*marked, _USER], tools, others)
            except AgentCallError:  # for the role, or because it needs other texts: the call itself will say
                text = "".join(mark for n, mark in marks.items() if begin[n]["role"] == "system")
            if len(self._unread) >= MAX_KINDS:
                self._unread.clear()
            self._unread[key] = next((n for n, mark in marks.items() if mark not in text), None)
        return self._unread[key]

    @functools.cached_property
    def longest_token(self) -> int:
        """Characters of the longest token."""
        return max(map(len, self.codec.tokenizer.get_vocab()), default=1)

    @functools.cached_property
    def _ends(self) -> list[str]:
        """Texts of the tokens that end a turn."""
        return [str(self.codec.tokenizer.convert_ids_to_tokens(token)) for token in self.codec.ends.ids]

    def _find_form_of_calls(self, kind: str) -> Literal["text", "call", "unclear", "lost"]:
        """How a turn with tool calls is marked: by a `text` in its place or in its `call`; `lost` if its answers are.

        Most templates take the text. Some write a tool's answer only behind its call (Mistral, gpt-oss, Gemma 4), or
        with its call's number (Command A).
        """
        tools, options = json.loads(kind)
        answers = [_answer(f"{self._mark}{name}", name) for name in "ab"]
        talk = [_USER, _call("a"), answers[0], _call("b"), answers[1]]
        try:
            whole = self._render(talk, tools, options)
        except AgentCallError:  # it refuses answers of tools, or just these
            return "text"
        if not all(answer["content"] in whole for answer in answers):
            return "lost"
        forms: dict[Literal["text", "call"], frozenset[int]] = {"text": frozenset(), "call": frozenset([1, 3])}
        for form, kept in forms.items():
            with contextlib.suppress(AgentCallError):
                _, *after = self._cut(talk, tools, options, sampled=(1, 3), kept=kept)
                if whole.endswith(after[1]) and all(
                    one["content"] in text for one, text in zip(answers, after, strict=True)
                ):
                    return form
        return "unclear"

    def _cut(
        self,
        messages: Messages,
        tools: Messages,
        options: Mapping[str, Any],
        *,
        sampled: Sequence[int],
        kept: frozenset[int],
    ) -> list[str]:
        """Segments of a rendering with a mark in each turn; `kept` turns stay tool calls."""
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
            asked = self._render(marked[:place], tools, options)
            end = self._end_of_turn(whole, whole.rfind(mark))
            if end is None or len(asked) < cursor:
                raise AgentCallError(
                    "the place where the chat template writes a tool call could not be determined", UNSTABLE
                )
            if not self._goes_on(asked, whole, messages[place - 1]["role"], tools=tools, options=options):
                raise AgentCallError(REWRITES, UNSTABLE)
            found.append(asked[cursor:])
            cursor = end
        return [*found, whole[cursor:]]

    def _end_of_turn(self, text: str, begin: int) -> int | None:
        """Where the first end token stands in the text; None if there is none."""
        return min((place for end in self._ends if (place := text.find(end, begin)) >= 0), default=None)

    def _render(self, messages: Messages, tools: Messages, options: Mapping[str, Any]) -> str:
        continues = messages[-1]["role"] == "assistant" and bool(options.get("continue_final_message"))
        refusal: Exception | None = None
        clock = clock_options(self._template)
        for form in _forms(messages):
            try:
                return str(
                    self.codec.tokenizer.apply_chat_template(
                        form,
                        tools=[dict(tool) for tool in tools] or None,
                        chat_template=self._template,
                        tokenize=False,
                        **({"add_generation_prompt": not continues} | clock | dict(options)),
                    )
                )
            except (TemplateError, ValueError, TypeError, KeyError, AttributeError) as error:
                refusal = refusal or error
        roles = ", ".join(message["role"] for message in messages[-8:])
        raise AgentCallError(
            f"the chat template of {self.codec.model!r} refuses a conversation that ends with the roles {roles}: "
            f"{type(refusal).__name__}: {refusal}",
            "invalid_messages",
            param="messages",
        ) from refusal

    def encode(self, text: str) -> tuple[int, ...]:
        """Tokens of a conversation's beginning; the template writes the tokenizer's prefix."""
        return tuple(self.codec.tokenizer(text, add_special_tokens=False)["input_ids"])

    def encode_after(self, token_ids: Sequence[int], text: str) -> tuple[int, ...]:
        """Tokens of the text after a turn, without the end of turn, which the turn has already."""
        if token_ids and token_ids[-1] in self.codec.ends.ids:
            end = str(self.codec.tokenizer.convert_ids_to_tokens(token_ids[-1]))
            before, found, rest = text.partition(end)
            # Llama 2 writes a space before it, and Command A the end of its response
            if found and (not before.strip() or before == self._before_end):
                text = rest
        return self.codec.encode_continuation(text) if text else ()

    @functools.cached_property
    def _before_end(self) -> str:
        """Text that the template writes between an answer and the token that ends the turn."""
        answer = {"role": "assistant", "content": self._mark}
        after = ""
        with contextlib.suppress(AgentCallError):
            after = self._render([_USER, answer, _USER], (), {}).partition(self._mark)[2]
        return after[: self._end_of_turn(after, 0) or 0]

    # -- whether earlier segments stay as they were -------------------------------------------------------------------

    def is_continued(
        self,
        before: Sequence[str],
        now: Sequence[str],
        *,
        roles: Sequence[str],
        tools: Messages = (),
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> bool:
        """Whether segments are what earlier calls have rendered.

        The opening of a turn may differ: many templates open an answer otherwise (with an empty reasoning, say) than
        they write it later, and what the policy has read stays in the conversation.

        Args:
            before: segments as rendered when the turns behind them were asked for.
            now: the same segments in the longer conversation.
            roles: role of the last message in each segment.
            tools: JSON schemas of the tools.
            options: further arguments of the template.
        """
        return all(
            self._goes_on(old, new, role, tools=tools, options=options)
            for old, new, role in zip(before, now, roles, strict=True)
        )

    def _goes_on(self, old: str, new: str, role: str, *, tools: Messages, options: Mapping[str, Any]) -> bool:
        """Whether two texts differ only in the opening of a turn after a message of this role."""
        if new.startswith(old):
            return True
        tail = self._tail(role, kind_of(tools, options))
        return tail is not None and old.endswith(tail) and new.startswith(old.removesuffix(tail))

    def _find_tail(self, role: str, kind: str) -> str | None:
        """Text between a message's content and the next turn; None if that is unclear."""
        tools, options = json.loads(kind)
        last = _answer(self._mark, "a") if role == "tool" else {"role": role, "content": self._mark}
        before = {"tool": [_USER, _call("a")], "assistant": [_USER]}.get(role, [])
        try:
            _, found, tail = self._render([*before, last], tools, options).rpartition(self._mark)
        except AgentCallError:
            return None
        return tail if found else None

    # -- check of a template, once a model ----------------------------------------------------------------------------

    @property
    def has_template(self) -> bool:
        """Whether messages can be rendered."""
        return bool(self._template)

    @functools.cached_property
    def problem(self) -> str | None:
        """Why conversations cannot be continued token by token; None if they can."""
        turn = {"role": "assistant", "content": "answer"}
        user = [{"role": "user", "content": f"{self._mark}q{n}"} for n in range(3)]
        try:
            return self._growth_problem([user[0], turn, user[1], turn, user[2]])
        except AgentCallError as error:
            return str(error)

    @functools.cached_property
    def tool_problem(self) -> str | None:
        """Why conversations with tools cannot be continued; None if they can, or if the template refuses them."""
        user = [{"role": "user", "content": f"{self._mark}q{n}"} for n in range(2)]
        said = {name: _answer(f"{self._mark}{name}", name) for name in "abc"}
        turn = {"role": "assistant", "content": "answer"}
        one_by_one = [user[0], _call("a"), said["a"], _call("b"), said["b"], turn, user[1]]
        both_at_once = [user[0], _call("a", "b"), said["a"], said["b"], _call("c"), said["c"], turn, user[1]]
        for talk in (one_by_one, both_at_once):
            try:
                problem = self._growth_problem(talk, [_TOOL])
            except AgentCallError as error:
                problem = str(error) if error.code == UNSTABLE else None
            if problem is not None:
                return problem
        return None

    def _growth_problem(self, talk: Messages, tools: Messages = ()) -> str | None:
        """Why a conversation that grows turn by turn cannot be continued; None if it can."""
        before: list[str] = []
        roles: list[str] = []
        turns = [n for n, message in enumerate(talk) if message["role"] == "assistant"]
        for number, end in enumerate([*turns, len(talk)]):
            now = self.segments(talk[:end], tools, sampled=turns[:number])
            if not self.is_continued(before, now[: len(before)], roles=roles, tools=tools):
                return REWRITES
            before.append(now[-1])
            roles.append(talk[end - 1]["role"])
        whole = "".join(before)
        given = [message for message in talk if message["role"] != "assistant"]
        left_out = next((message["role"] for message in given if message["content"] not in whole), None)
        return None if left_out is None else f"its chat template leaves out messages of the {left_out}"
