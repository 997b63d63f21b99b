"""Calls of request bodies, and rules for what a call may ask of the policy; `shapes` has the bodies' shapes.

The trainer recomputes the log-probability of each token under the run's own sampling distribution (`data.sampling`). An
option that changes it for one call is therefore refused, unless it has the run's value or a neutral one, or is named in
`ignored_options`; validation ignores those of `DISTRIBUTION`. Options that end a reply sooner (`stop`, `max_tokens`)
are free. Forced tool calls and formats have whole replies sampled again, see `reply_rules`. `response_bodies` has the
Responses API.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lit_async_rl.agents.api.errors import invalid, not_sampled, quoted
from lit_async_rl.agents.api.formats import content_check
from lit_async_rl.agents.api.shapes import (
    MAX_CHOICES,
    Body,
    ChatBody,
    ContentFormat,
    Shape,
    TextBody,
    shaped,
)
from lit_async_rl.agents.calls import AgentCallError
from lit_async_rl.agents.rendering import checked_tools
from lit_async_rl.agents.reply_rules import ContentCheck, ReplyRule
from lit_async_rl.agents.strict_json import refuse_constant
from lit_async_rl.types import SamplingParams

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
MAX_PROMPTS = 128
ACCEPTED_AND_UNUSED = frozenset(
    # of accounts, caches and billing: nothing that a token depends on
    ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
)
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "use_beam_search": (False,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "functions": ([],),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "function_call": ("auto", "none"),
    "reasoning": ({},),
    "background": (False,),
    "truncation": ("disabled",),
}
UNSERVED = ("previous_response_id", "conversation")  # responses are not stored
ANSWERED = ("messages", "prompt", "input", "instructions", "model", "tools", "n", "stream")  # every answer needs them
DISTRIBUTION = ("temperature", "top_p", "top_k", "min_p")  # as in `SamplingParams.distribution`


@dataclass(frozen=True, kw_only=True)
class CallLimits:
    """Limits of a call, beside the context length of the model.

    Attributes:
        max_body_bytes: length of a body.
        max_messages: messages of a conversation.
        ignored_options: options accepted without effect, whatever their value; `CallService` removes them from a body
            before it is read.
    """

    max_body_bytes: int = 8 * 2**20
    max_messages: int = 2000
    ignored_options: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Call:
    """Parsed request body.

    Attributes:
        model: name that the agent asks for; every name means the policy.
        n: number of replies.
        max_tokens: limit of each, beside the run's own; None is the run's.
        stop: strings that end a reply, beside the run's own.
        seed: makes the replies reproducible where the engine can; None lets the run choose.
        stream: whether the answer is server-sent events.
        include_usage: whether a stream ends with the numbers of tokens.
        logprobs: whether the answer has the log-probability of each token.
        top_logprobs: number of likeliest tokens of each position in the answer, as far as they were recorded.
        return_token_ids: whether the answer has the tokens' ids and the versions that sampled them.
        messages: conversation, for a chat; checked by `AgentEpisode.complete`.
        prompts: texts or token ids, for completions.
        tools: JSON schemas, for a chat.
        calls_tools: whether calls are parsed.
        chat_template_kwargs: arguments of the chat template.
        rule: that replies of a chat must keep; None without.
        request: fields that the response repeats; None for completions.
    """

    model: str
    n: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    return_token_ids: bool = False
    messages: tuple[Mapping[str, Any], ...] = ()
    prompts: tuple[str | tuple[int, ...], ...] = ()
    tools: Sequence[Mapping[str, Any]] = ()
    calls_tools: bool = True
    chat_template_kwargs: Mapping[str, Any] | None = None
    rule: ReplyRule | None = None
    request: Mapping[str, Any] | None = None

    @property
    def param(self) -> str:
        """Name of the parameter that the policy reads."""
        if not self.messages:
            return "prompt"
        return "messages" if self.request is None else "input"


def checked_options(names: Sequence[str], setting: str) -> tuple[str, ...]:
    """Options that calls may have without effect.

    Raises:
        ValueError: they are no list, or every answer depends on one.
    """
    if isinstance(names, str):
        raise ValueError(f"{setting} must be a list of names, got {names!r}")
    needed = sorted({*ANSWERED, *UNSERVED}.intersection(names))
    if needed:
        raise ValueError(
            f"{setting} must not contain {', '.join(needed)}: an answer that ignored such an option would be wrong"
        )
    return tuple(names)


# -- JSON -------------------------------------------------------------------------------------------------------------


def parse_body(data: bytes) -> dict[str, Any]:
    """The JSON object of a body.

    Raises:
        AgentCallError: it is none.
    """
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise AgentCallError(f"the body is not UTF-8: {error}", "invalid_body") from None
    try:
        body = json.loads(text, parse_constant=refuse_constant)
        if "\\u" in text:  # half a surrogate pair is JSON, but no text
            json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise AgentCallError("the body has half a surrogate pair, which is not text", "invalid_body") from None
    except (ValueError, RecursionError) as error:
        raise AgentCallError(f"the body is not JSON: {str(error)[:200]}", "invalid_body") from None
    if not isinstance(body, dict):
        raise AgentCallError(f"the body must be a JSON object, got {quoted(body)}", "invalid_body")
    return {name: value for name, value in body.items() if value is not None}


# -- Calls ------------------------------------------------------------------------------------------------------------


def chat_call(body: Mapping[str, Any], sampling: SamplingParams, limits: CallLimits) -> Call:
    """The call of a body of `/v1/chat/completions`.

    Args:
        body: JSON object, without the keys that are null.
        sampling: the run's own parameters for this episode.
        limits: limits.

    Raises:
        AgentCallError: a parameter is unknown, malformed, or would change the distribution.
    """
    check_options(body, ChatBody, sampling)
    check_number_of_messages(body.get("messages"), limits.max_messages)
    chat = shaped(ChatBody, body)
    if chat.top_logprobs and not chat.logprobs:
        raise invalid("top_logprobs", "top_logprobs needs logprobs: true")
    for number, message in enumerate(chat.messages):
        for name in ("function_call", "audio"):
            if message.get(name) is not None:  # which the policy would never read
                raise invalid(f"messages[{number}].{name}", f"messages[{number}].{name} is not supported")
    tools = checked_tools(chat.tools)
    lengths = [length for length in (chat.max_tokens, chat.max_completion_tokens) if length is not None]
    functions = forced_functions(chat.tool_choice, tools)
    return Call(
        model=chat.model,
        messages=tuple(chat.messages),
        tools=tools,
        calls_tools=chat.tool_choice != "none",
        rule=reply_rule(functions, is_parallel=chat.parallel_tool_calls, content=_chat_content(chat)),
        chat_template_kwargs=chat.chat_template_kwargs,
        n=chat.n,
        max_tokens=min(lengths, default=None),
        stop=tuple(chat.stop),
        seed=engine_seed(chat.seed),
        stream=chat.stream,
        include_usage=_includes_usage(chat),
        logprobs=chat.logprobs,
        top_logprobs=chat.top_logprobs,
        return_token_ids=chat.return_token_ids,
    )


def text_call(body: Mapping[str, Any], sampling: SamplingParams, limits: CallLimits) -> Call:
    """The call of a body of `/v1/completions`; see `chat_call`.

    Raises:
        AgentCallError: a parameter is unknown, malformed, or would change the distribution.
    """
    check_options(body, TextBody, sampling)
    text = shaped(TextBody, body)
    prompts = _prompts(text.prompt)
    if text.n * len(prompts) > MAX_CHOICES:
        raise invalid("n", f"n={text.n} replies to each of {len(prompts)} prompts are more than {MAX_CHOICES}")
    return Call(
        model=text.model,
        prompts=prompts,
        n=text.n,
        max_tokens=text.max_tokens,
        stop=tuple(text.stop),
        seed=engine_seed(text.seed),
        stream=text.stream,
        include_usage=_includes_usage(text),
        logprobs=text.logprobs is not None,
        top_logprobs=text.logprobs or 0,
        return_token_ids=text.return_token_ids,
    )


def check_options(body: Mapping[str, Any], shape: type[Shape], sampling: SamplingParams) -> None:
    """Refuses options that are unknown or would change the distribution.

    Args:
        body: JSON object, without the keys that are null.
        shape: its shape, whose fields are known.
        sampling: the run's own parameters.

    Raises:
        AgentCallError: names the option, its value, and what it may be.
    """
    known = shape.model_fields.keys() | DISTRIBUTION
    for name in body.keys() - known - ACCEPTED_AND_UNUSED:
        neutral = NEUTRAL.get(name)
        if neutral is None:
            raise AgentCallError(
                f"Unrecognized request argument supplied: {quoted(name)[1:-1]} (to accept and ignore it, name it in "
                "ignored_options of the agent's engine)",
                "unknown_parameter",
                param=name,
            )
        value = body[name]
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral):
            raise not_sampled(
                name,
                f"{name}={quoted(value)} would change what the policy samples in a way that the trainer does not know: "
                f"leave it out or set it to {json.dumps(neutral[0])}, or name it in ignored_options of the agent's "
                "engine",
            )
    own = sampling.distribution
    for name in DISTRIBUTION:
        if name not in body:
            continue
        value = body[name]
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise invalid(name, f"{name} must be a number, got {quoted(value)}", code="invalid_type")
        if name == "top_k" and value == -1:  # vLLM's name for all
            value = 0
        if value != own[name]:
            raise not_sampled(
                name,
                f"{name}={quoted(value)}, but this run samples with {name}={own[name]:g}, under which the trainer "
                f"computes its log-probabilities: leave it out, set data.sampling.{name}={quoted(value)}, or name it "
                "in ignored_options of the agent's engine",
            )


# -- Rules ------------------------------------------------------------------------------------------------------------


def engine_seed(seed: int | None) -> int | None:
    """The seed of a body as engines take it, which is at least 0."""
    return None if seed is None else seed % 2**31


def _includes_usage(body: Body) -> bool:
    if body.stream_options is None:
        return False
    if not body.stream:
        raise invalid("stream_options", "stream_options needs stream: true")
    return body.stream_options.include_usage


def _prompts(prompt: Any) -> tuple[str | tuple[int, ...], ...]:
    """Prompts of a completion: a text, token ids, or a list of either."""
    prompts = [prompt] if isinstance(prompt, str) or _is_ids(prompt) else prompt
    if not isinstance(prompts, list) or not prompts or not all(isinstance(one, str) or _is_ids(one) for one in prompts):
        raise invalid("prompt", f"prompt must be a string, token ids, or a list of either, got {quoted(prompt)}")
    if len(prompts) > MAX_PROMPTS:
        raise invalid(
            "prompt", f"prompt must be at most {MAX_PROMPTS}, got {len(prompts)}", code="array_above_max_length"
        )
    return tuple(one if isinstance(one, str) else tuple(one) for one in prompts)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int and token >= 0 for token in value)


def check_number_of_messages(messages: Any, max_messages: int, param: str = "messages") -> None:
    """Refuses too long a conversation, before its messages are read.

    Raises:
        AgentCallError: it is.
    """
    if isinstance(messages, list) and len(messages) > max_messages:
        raise invalid(
            param,
            f"{param} must be at most {max_messages} (max_messages of the agent's engine), got {len(messages)}",
            code="array_above_max_length",
        )


def _chat_content(chat: ChatBody) -> ContentCheck | None:
    wanted = chat.response_format or ContentFormat()
    if wanted.type != "json_schema":
        return content_check(wanted.type)
    if wanted.json_schema is None:
        raise invalid("response_format.json_schema", "response_format.json_schema is needed for the type json_schema")
    return content_check(wanted.type, wanted.json_schema.schema_, param="response_format.json_schema.schema")


def forced_functions(choice: Any, tools: Sequence[Mapping[str, Any]]) -> frozenset[str] | None:
    """Tools of which a reply must call at least one; None leaves the choice to the policy.

    Args:
        choice: field `tool_choice` of a body.
        tools: of the call, see `checked_tools`.

    Raises:
        AgentCallError: the choice is unknown, or needs tools that the call does not have.
    """
    if choice is None or choice == "none":
        return None
    if not tools:
        raise invalid("tool_choice", "tool_choice needs tools")
    names = [tool.get("function", tool)["name"] for tool in tools]
    if choice == "auto":
        return None
    if choice == "required":
        return frozenset(names)
    named = choice.get("function", choice) if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = named.get("name") if isinstance(named, dict) else None
    if name is None or name not in names:
        raise invalid(
            "tool_choice",
            f"tool_choice must be auto, none, required or a function of tools, got {quoted(choice)}",
        )
    return frozenset((name,))


def reply_rule(
    functions: frozenset[str] | None, *, is_parallel: bool, content: ContentCheck | None
) -> ReplyRule | None:
    """The rule that replies must keep; None if every reply keeps it."""
    if functions is None and is_parallel and content is None:
        return None
    return ReplyRule(functions=functions, max_tool_calls=None if is_parallel else 1, content=content)
