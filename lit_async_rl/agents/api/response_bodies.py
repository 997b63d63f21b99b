"""Calls of bodies of `/v1/responses`: the Responses API as another form of a chat.

Items of the input become the messages that `/v1/chat/completions` would have: a conversation continues its tokens
whichever of the two an agent calls. Responses are not stored: each request has its whole conversation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lit_async_rl.agents.api.bodies import (
    UNSERVED,
    Call,
    CallLimits,
    check_number_of_messages,
    check_options,
    engine_seed,
    forced_functions,
    reply_rule,
)
from lit_async_rl.agents.api.errors import invalid, not_sampled, quoted
from lit_async_rl.agents.api.formats import content_check
from lit_async_rl.agents.api.shapes import ResponseBody, TextOptions, shaped
from lit_async_rl.agents.calls import AgentCallError
from lit_async_rl.agents.rendering import checked_tools, text_of
from lit_async_rl.agents.reply_rules import ContentCheck
from lit_async_rl.types import SamplingParams

RESPONSES = "/v1/responses"
LOGPROBS = "message.output_text.logprobs"
VERBOSITY = "verbosity"
REPEATED = ("instructions", "max_output_tokens", "metadata", "tools", "text", "user", "store", "safety_identifier")
ITEM_TYPES = ("message", "function_call", "function_call_output", "reasoning")


def response_call(body: Mapping[str, Any], sampling: SamplingParams, limits: CallLimits) -> Call:
    """The call of a body of `/v1/responses`; see `chat_call`.

    Raises:
        AgentCallError: a parameter is unknown, malformed, or would change the distribution.
    """
    for name in UNSERVED:
        if name in body:
            message = f"{name} is not supported, as responses are not stored: send the whole conversation as input"
            raise AgentCallError(message, "unsupported_parameter", param=name)
    check_options(body, ResponseBody, sampling)
    check_number_of_messages(body.get("input"), limits.max_messages, param="input")
    given = shaped(ResponseBody, body)
    tools = checked_tools([_chat_tool(tool, number) for number, tool in enumerate(given.tools or ())])
    functions = forced_functions(given.tool_choice, tools)
    content = _content(given.text or TextOptions(), limits.ignored_options)
    system = [] if given.instructions is None else [{"role": "system", "content": given.instructions}]
    return Call(
        model=given.model,
        messages=(*system, *_messages(given.input)),
        tools=tools,
        calls_tools=given.tool_choice != "none",
        rule=reply_rule(functions, is_parallel=given.parallel_tool_calls, content=content),
        chat_template_kwargs=given.chat_template_kwargs,
        max_tokens=given.max_output_tokens,
        seed=engine_seed(given.seed),
        stream=given.stream,
        logprobs=LOGPROBS in given.include,
        top_logprobs=given.top_logprobs if LOGPROBS in given.include else 0,
        return_token_ids=given.return_token_ids,
        request={name: body[name] for name in REPEATED if name in body}
        | {
            "tool_choice": given.tool_choice or "auto",
            "parallel_tool_calls": given.parallel_tool_calls,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
        },
    )


def _chat_tool(tool: Mapping[str, Any], number: int) -> dict[str, Any]:
    """A tool as chats have it, without `strict`; the template may read what is not checked."""
    if tool.get("type") != "function":
        raise invalid(f"tools[{number}].type", f"tools[{number}].type must be function, got {quoted(tool.get('type'))}")
    function = {key: value for key, value in tool.items() if key not in ("type", "strict") and value is not None}
    return {"type": "function", "function": function}


def _content(text: TextOptions, ignored: frozenset[str]) -> ContentCheck | None:
    if text.verbosity is not None and VERBOSITY not in ignored:
        raise not_sampled(
            "text.verbosity",
            f"text.verbosity={quoted(text.verbosity)} has no effect on this policy: leave it out, or name {VERBOSITY} "
            "in ignored_options of the agent's engine",
        )
    wanted = text.format
    if wanted is None or "response_format" in ignored:
        return None
    if wanted.type == "json_schema" and (wanted.schema_ is None or wanted.name is None):
        missing = "schema" if wanted.schema_ is None else "name"
        raise invalid(f"text.format.{missing}", f"text.format.{missing} is needed for the type json_schema")
    return content_check(
        wanted.type, wanted.schema_ if wanted.type == "json_schema" else None, param="text.format.schema"
    )


def _check_texts(item: Mapping[str, Any], where: str, *names: str) -> None:
    for name in names:
        if not isinstance(item.get(name), str):
            raise invalid(f"{where}.{name}", f"{where}.{name} must be text, got {quoted(item.get(name))}")


def _messages(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Chat messages of items. A turn of the policy, its reasoning, text and calls in a row, is one message."""
    messages: list[dict[str, Any]] = []
    reasoning = ""
    is_open = False  # whether a call that comes next belongs to the last message
    for number, item in enumerate(items):
        where = f"input[{number}]"
        kind = item.get("type", "message")
        if kind == "reasoning":
            reasoning = text_of(item.get("content") or "", f"{where}.content", param="input")
            is_open = False
        elif kind == "message":
            _check_texts(item, where, "role")
            content = text_of(item.get("content"), f"{where}.content", param=f"{where}.content")
            is_open = item["role"] == "assistant"
            messages.append({"role": item["role"], "content": content})
        elif kind == "function_call":
            if not is_open:
                messages.append({"role": "assistant", "content": ""})
            _check_texts(item, where, "call_id", "name", "arguments")
            function = {"name": item["name"], "arguments": item["arguments"]}
            messages[-1].setdefault("tool_calls", []).append({"id": item["call_id"], "function": function})
            is_open = True
        elif kind == "function_call_output":
            _check_texts(item, where, "call_id")
            output = text_of(item.get("output"), f"{where}.output", param=f"{where}.output")
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": output})
            is_open = False
        else:
            raise invalid(f"{where}.type", f"{where}.type must be one of {', '.join(ITEM_TYPES)}, got {quoted(kind)}")
        if reasoning and is_open:
            messages[-1]["reasoning_content"] = reasoning
            reasoning = ""
    if not messages:
        raise invalid("input", "input needs an item other than reasoning")
    return messages
