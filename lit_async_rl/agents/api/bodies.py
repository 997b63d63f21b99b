"""Bodies of requests: what may stand in them, and what they ask of the policy.

The trainer recomputes the log-probability of each token under the run's own sampling distribution (`data.sampling`).
An option that changes this distribution for one call is therefore refused, unless it has the run's value or a neutral
one, or is named in `ignored_options`. Options that end a reply sooner (`stop`, `max_tokens`) are free.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lit_async_rl.agents.api.errors import ApiError, invalid, not_sampled, quoted
from lit_async_rl.agents.calls import MAX_STOP_CHARS, MAX_STOPS, REASONING_KEYS
from lit_async_rl.types import ROLES, SamplingParams

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
MAX_CHOICES = 128
MAX_TOOLS = 128
MAX_PROMPTS = 128
MAX_TOP_LOGPROBS = 20
FUNCTION_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
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
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "function_call": ("auto", "none"),
}
DISTRIBUTION = ("temperature", "top_p", "top_k", "min_p")  # as in `SamplingParams.distribution`
COMMON = frozenset(
    ("model", "n", "stop", "seed", "stream", "stream_options", "max_tokens", "return_token_ids", *DISTRIBUTION)
)
CHAT_OPTIONS = frozenset(
    (
        *("messages", "tools", "tool_choice", "parallel_tool_calls", "max_completion_tokens"),
        *("logprobs", "top_logprobs", "chat_template_kwargs"),
    )
)
TEXT_OPTIONS = frozenset(("prompt", "logprobs"))


@dataclass(frozen=True, kw_only=True)
class CallLimits:
    """Limits of a call, beside the context length of the model.

    Attributes:
        max_body_bytes: length of a body.
        max_messages: messages of a conversation.
        ignored_options: options that are accepted and have no effect, whatever their value.
    """

    max_body_bytes: int = 8 * 2**20
    max_messages: int = 2000
    ignored_options: frozenset[str] = frozenset()

    def of_episode(self, trains: bool) -> CallLimits:
        """Limits of an episode's calls: an agent names the distribution of training, which validation may not have."""
        return self if trains else replace(self, ignored_options=self.ignored_options | set(DISTRIBUTION))


@dataclass(frozen=True, kw_only=True)
class Call:
    """Parsed request body.

    Attributes:
        model: name that the agent asks for; every name means the policy.
        n: number of replies.
        max_tokens: limit of each, beside the run's own; None is the run's.
        stop: strings that end a reply, beside the run's own.
        seed: makes the replies reproducible where the engine can; None lets the run choose.
        stream: whether the answer is sent as server-sent events.
        include_usage: whether a stream ends with the numbers of tokens.
        logprobs: whether the answer has the log-probability of each token.
        top_logprobs: likeliest tokens of each position in the answer, as far as they were recorded.
        return_token_ids: whether the answer has the ids of the tokens, and the versions that sampled them.
        messages: conversation, for a chat.
        prompts: texts or token ids, for completions.
        tools: JSON schemas, for a chat.
        calls_tools: whether calls are parsed.
        chat_template_kwargs: arguments of the chat template.
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
    tools: tuple[Mapping[str, Any], ...] | None = None
    calls_tools: bool = True
    chat_template_kwargs: Mapping[str, Any] | None = None


def check_length(call: Call, max_tokens: int, longest_token: int) -> None:
    """Refuses texts that cannot fit into the context, before they are tokenised, which takes seconds for some MB.

    Args:
        call: the call.
        max_tokens: tokens of the context.
        longest_token: characters of the longest token.

    Raises:
        ApiError: the texts are longer than the context, whatever their tokens are.
    """
    lengths = [len(one) if isinstance(one, tuple) else -(-len(one) // longest_token) for one in call.prompts]
    if call.messages:
        chars = sum(len(message["content"] or "") for message in call.messages)
        more = [one for message in call.messages for one in message.get("tool_calls", ())]
        more += [*(call.tools or ()), call.chat_template_kwargs or {}]
        chars += sum(len(json.dumps(one, ensure_ascii=False)) for one in more)
        lengths.append(chars // longest_token)
    longest = max(lengths)
    if longest > max_tokens:
        raise ApiError(
            400,
            f"the model's context is {max_tokens} tokens, and the call has at least {longest}",
            param="messages" if call.messages else "prompt",
            code="context_length_exceeded",
        )


def checked_options(names: Sequence[str], setting: str) -> tuple[str, ...]:
    """Options that calls may have without an effect.

    Raises:
        ValueError: they are no list, or every answer depends on one of them.
    """
    if isinstance(names, str):
        raise ValueError(f"{setting} must be a list of names, got {names!r}")
    needed = sorted({"messages", "prompt", "model", "tools", "n", "stream"}.intersection(names))
    if needed:
        raise ValueError(f"{setting} must not have {', '.join(needed)}: every answer depends on it")
    return tuple(names)


# -- JSON -------------------------------------------------------------------------------------------------------------


def parse_body(data: bytes) -> dict[str, Any]:
    """The JSON object of a body.

    Raises:
        ApiError: it is none.
    """
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8: {error}", code="invalid_body") from None
    try:
        body = json.loads(text, parse_constant=_refuse_constant)
        if "\\u" in text:  # half a surrogate pair is JSON, but no text
            json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ApiError(400, "the body has half a surrogate pair, which is no text", code="invalid_body") from None
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {str(error)[:200]}", code="invalid_body") from None
    if not isinstance(body, dict):
        raise ApiError(400, f"the body must be a JSON object, got {quoted(body)}", code="invalid_body")
    return {name: value for name, value in body.items() if value is not None}


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


# -- Calls ------------------------------------------------------------------------------------------------------------


def chat_call(body: Mapping[str, Any], sampling: SamplingParams, limits: CallLimits) -> Call:
    """The call of a body of `/v1/chat/completions`.

    Args:
        body: JSON object, without the keys that are null.
        sampling: the run's own parameters for this episode.
        limits: limits.

    Raises:
        ApiError: a parameter is unknown, malformed, or would change the distribution.
    """
    check_options(body, CHAT_OPTIONS, sampling, ignored=limits.ignored_options)
    kept = _without(body, limits.ignored_options & NOT_NEEDED)
    tools = _tools(kept)
    kwargs = kept.get("chat_template_kwargs")
    if kwargs is not None and not isinstance(kwargs, dict):
        raise invalid("chat_template_kwargs", f"chat_template_kwargs must be an object, got {quoted(kwargs)}")
    top_logprobs = _integer(kept, "top_logprobs", (0, MAX_TOP_LOGPROBS), default=0)
    logprobs = _boolean(kept, "logprobs")
    if top_logprobs and not logprobs:
        raise invalid("top_logprobs", "top_logprobs needs logprobs: true")
    lengths = [_integer(kept, name, (1, None)) for name in ("max_tokens", "max_completion_tokens") if name in kept]
    stream = _boolean(kept, "stream")
    return Call(
        model=_model(kept),
        messages=_messages(kept, limits.max_messages),
        tools=tools,
        calls_tools=_tool_choice(kept, tools),
        chat_template_kwargs=kwargs,
        n=_integer(kept, "n", (1, MAX_CHOICES), default=1),
        max_tokens=min(lengths, default=None),
        stop=_stop(kept),
        seed=_seed(kept),
        stream=stream,
        include_usage=_include_usage(kept, stream),
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        return_token_ids=_boolean(kept, "return_token_ids"),
    )


def text_call(body: Mapping[str, Any], sampling: SamplingParams, limits: CallLimits) -> Call:
    """The call of a body of `/v1/completions`; see `chat_call`.

    Raises:
        ApiError: a parameter is unknown, malformed, or would change the distribution.
    """
    check_options(body, TEXT_OPTIONS, sampling, ignored=limits.ignored_options)
    kept = _without(body, limits.ignored_options & NOT_NEEDED)
    prompts = _prompts(kept)
    n = _integer(kept, "n", (1, MAX_CHOICES), default=1)
    if n * len(prompts) > MAX_CHOICES:
        raise invalid("n", f"n={n} replies to each of {len(prompts)} prompts are more than {MAX_CHOICES}")
    top_logprobs = _integer(kept, "logprobs", (0, MAX_TOP_LOGPROBS), default=None)
    stream = _boolean(kept, "stream")
    return Call(
        model=_model(kept),
        prompts=prompts,
        n=n,
        max_tokens=_integer(kept, "max_tokens", (1, None), default=None),
        stop=_stop(kept),
        seed=_seed(kept),
        stream=stream,
        include_usage=_include_usage(kept, stream),
        logprobs=top_logprobs is not None,
        top_logprobs=top_logprobs or 0,
        return_token_ids=_boolean(kept, "return_token_ids"),
    )


NOT_NEEDED = frozenset(  # what `ignored_options` may take out of a call
    ("seed", "stop", "max_tokens", "max_completion_tokens", "logprobs", "top_logprobs", "tool_choice", "stream_options")
) | {"parallel_tool_calls", "chat_template_kwargs"}


def _without(body: Mapping[str, Any], names: frozenset[str]) -> Mapping[str, Any]:
    return body if names.isdisjoint(body) else {name: value for name, value in body.items() if name not in names}


def check_options(
    body: Mapping[str, Any], known: frozenset[str], sampling: SamplingParams, *, ignored: frozenset[str]
) -> None:
    """Refuses options that are unknown, or that would change the distribution.

    Raises:
        ApiError: names the option, its value, and what it may be.
    """
    for name in body.keys() - known - COMMON - ACCEPTED_AND_UNUSED - ignored:
        neutral = NEUTRAL.get(name)
        if neutral is None:
            raise ApiError(
                400,
                f"Unrecognized request argument supplied: {quoted(name)[1:-1]} (to accept and ignore it, name it in "
                "ignored_options of the agent's engine)",
                param=name,
                code="unknown_parameter",
            )
        value = body[name]
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral):
            wanted = f"leave it out or set it to {json.dumps(neutral[0])}" if neutral else "leave it out"
            raise not_sampled(
                name,
                f"{name}={quoted(value)} would change what the policy samples in a way that the trainer does not know: "
                f"{wanted}, or name it in ignored_options of the agent's engine",
            )
    own = sampling.distribution
    for name in DISTRIBUTION:
        if name not in body or name in ignored:
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


# -- Single parameters ------------------------------------------------------------------------------------------------


def _model(body: Mapping[str, Any]) -> str:
    model = body.get("model")
    if model is None:
        raise ApiError(400, "you must provide a model parameter", param="model", code="missing_required_parameter")
    if not isinstance(model, str) or not model or len(model) > 500:
        raise invalid("model", f"model must be a name, got {quoted(model)}", code="invalid_type")
    return model


def _boolean(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name, False)
    if not isinstance(value, bool):
        raise invalid(name, f"{name} must be true or false, got {quoted(value)}", code="invalid_type")
    return value


def _integer(body: Mapping[str, Any], name: str, limits: tuple[int, int | None], default: int | None = None) -> Any:
    if name not in body:
        return default
    value = body[name]
    if not isinstance(value, int) or isinstance(value, bool):
        raise invalid(name, f"{name} must be an integer, got {quoted(value)}", code="invalid_type")
    smallest, largest = limits
    if value < smallest:
        raise invalid(name, f"{name} must be >= {smallest}, got {quoted(value)}", code="integer_below_min_value")
    if largest is not None and value > largest:
        raise invalid(name, f"{name} must be <= {largest}, got {quoted(value)}", code="integer_above_max_value")
    return value


def _seed(body: Mapping[str, Any]) -> int | None:
    value: int | None = _integer(body, "seed", (-(2**63), 2**63 - 1))
    return None if value is None else value % 2**31  # engines take seeds >= 0


def _stop(body: Mapping[str, Any]) -> tuple[str, ...]:
    value = body.get("stop", [])
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(text, str) and text for text in stops):
        raise invalid("stop", f"stop must be a string or a list of non-empty strings, got {quoted(value)}")
    if len(stops) > MAX_STOPS:
        raise invalid(
            "stop", f"stop must have at most {MAX_STOPS} strings, got {len(stops)}", code="array_above_max_length"
        )
    if too_long := [len(text) for text in stops if len(text) > MAX_STOP_CHARS]:
        raise invalid(
            "stop",
            f"a string of stop must have at most {MAX_STOP_CHARS} characters, got {too_long[0]}",
            code="string_above_max_length",
        )
    return tuple(stops)


def _include_usage(body: Mapping[str, Any], stream: bool) -> bool:
    options = body.get("stream_options")
    if options is None:
        return False
    if not stream:
        raise invalid("stream_options", "stream_options needs stream: true")
    if not isinstance(options, dict):
        raise invalid("stream_options", f"stream_options must be an object, got {quoted(options)}", code="invalid_type")
    return _boolean(options, "include_usage")


def _prompts(body: Mapping[str, Any]) -> tuple[str | tuple[int, ...], ...]:
    """Prompts of a completion: a text, token ids, or a list of either."""
    prompt = body.get("prompt")
    if prompt is None:
        raise ApiError(400, "you must provide a prompt", param="prompt", code="missing_required_parameter")
    if isinstance(prompt, str) or _is_ids(prompt):
        prompts = [prompt]
    else:
        prompts = prompt
    if not isinstance(prompts, list) or not prompts:
        raise invalid("prompt", f"prompt must be a text, token ids, or a list of either, got {quoted(prompt)}")
    if len(prompts) > MAX_PROMPTS:
        raise invalid(
            "prompt", f"prompt must be at most {MAX_PROMPTS}, got {len(prompts)}", code="array_above_max_length"
        )
    if any(not isinstance(one, str) and not _is_ids(one) for one in prompts):
        raise invalid("prompt", f"prompt must be a text, token ids, or a list of either, got {quoted(prompt)}")
    return tuple(one if isinstance(one, str) else tuple(one) for one in prompts)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int and token >= 0 for token in value)


# -- Messages and tools -----------------------------------------------------------------------------------------------


def _messages(body: Mapping[str, Any], max_messages: int) -> tuple[Mapping[str, Any], ...]:
    messages = body.get("messages")
    if messages is None:
        raise ApiError(400, "you must provide messages", param="messages", code="missing_required_parameter")
    if not isinstance(messages, list) or not messages:
        raise invalid("messages", f"messages must be a list of at least one message, got {quoted(messages)}")
    if len(messages) > max_messages:
        raise invalid(
            "messages",
            f"messages must be at most {max_messages} (max_messages of the agent's engine), got {len(messages)}",
            code="array_above_max_length",
        )
    return tuple(_message(message, f"messages[{number}]") for number, message in enumerate(messages))


def _message(message: Any, where: str) -> dict[str, Any]:
    """A message with what the policy can read: role, text, name, calls, the call that it answers, reasoning."""
    if not isinstance(message, dict):
        raise invalid(where, f"{where} must be an object, got {quoted(message)}", code="invalid_type")
    role = message.get("role")
    if role not in ROLES:
        roles = ", ".join(f"'{name}'" for name in ROLES)
        raise invalid(f"{where}.role", f"{where}.role: invalid value {quoted(role)}, supported values are {roles}")
    for name in ("function_call", "audio"):
        if message.get(name) is not None:
            raise invalid(f"{where}.{name}", f"{where}.{name} is not supported")
    calls = _calls_of_message(message, where)
    if calls and role != "assistant":
        raise invalid(f"{where}.tool_calls", f"{where}.tool_calls: only the assistant calls tools, not {role}")
    content = _content(message.get("content"), f"{where}.content")
    if content is None and not calls:
        if role != "assistant" or message.get("refusal") is None:
            raise invalid(f"{where}.content", f"{where}.content must be text, got null")
        content = _content(message["refusal"], f"{where}.refusal")
    found: dict[str, Any] = {"role": role, "content": content}
    if calls:
        found["tool_calls"] = calls
    for name in ("name", "tool_call_id", "reasoning_content"):
        text = message.get(name)
        if text is not None:
            if not isinstance(text, str):
                raise invalid(
                    f"{where}.{name}", f"{where}.{name} must be text, got {quoted(text)}", code="invalid_type"
                )
            found[name] = text
    found |= {name: message[name] for name in REASONING_KEYS if isinstance(message.get(name), str)}
    if role == "tool" and "tool_call_id" not in found:
        raise invalid(f"{where}.tool_call_id", f"{where}: a message of a tool needs a tool_call_id")
    return found


def _content(content: Any, where: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise invalid(where, f"{where} must be text or a list of parts, got {quoted(content)}", code="invalid_type")
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        name = "refusal" if kind == "refusal" else "text"
        if kind not in ("text", "refusal") or not isinstance(part.get(name), str):
            raise invalid(f"{where}[{number}]", f"{where}[{number}] must be a part of text, got {quoted(part)}")
        texts.append(part[name])
    return "".join(texts)


def _calls_of_message(message: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise invalid(f"{where}.tool_calls", f"{where}.tool_calls must be a list, got {quoted(calls)}")
    found = []
    for number, call in enumerate(calls):
        at = f"{where}.tool_calls[{number}]"
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or call.get("type", "function") != "function":
            raise invalid(at, f"{at} must be a call of a function, got {quoted(call)}")
        texts = (call.get("id"), function.get("name"), function.get("arguments"))
        if not all(isinstance(text, str) for text in texts):
            raise invalid(at, f"{at} must have id, function.name and function.arguments as texts, got {quoted(call)}")
        named = {"name": function["name"], "arguments": function["arguments"]}
        found.append({"id": call["id"], "type": "function", "function": named})
    return found


def _tools(body: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...] | None:
    """Tools of a call; None without."""
    tools = body.get("tools")
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list):
        raise invalid("tools", f"tools must be a list, got {quoted(tools)}", code="invalid_type")
    if len(tools) > MAX_TOOLS:
        raise invalid("tools", f"tools must be at most {MAX_TOOLS}, got {len(tools)}", code="array_above_max_length")
    for number, tool in enumerate(tools):
        at = f"tools[{number}]"
        if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
            raise invalid(at, f"{at} must be a function, {{'type': 'function', 'function': ...}}, got {quoted(tool)}")
        function = tool["function"]
        name = function.get("name")
        if not isinstance(name, str) or not FUNCTION_NAME.fullmatch(name):
            raise invalid(
                f"{at}.function.name",
                f"{at}.function.name must match {FUNCTION_NAME.pattern}, got {quoted(name)}",
            )
        _check_schema(function.get("parameters"), f"{at}.function.parameters")
        description = function.get("description")
        if description is not None and not isinstance(description, str):
            raise invalid(
                f"{at}.function.description", f"{at}.function.description must be text, got {quoted(description)}"
            )
    return tuple(tools)


def _check_schema(schema: Any, where: str) -> None:
    """Refuses what is no schema of an object; keywords within it are the model's to read, and are not checked."""
    if schema is None:
        return
    if not isinstance(schema, dict):
        raise invalid(where, f"{where} must be a JSON schema, got {quoted(schema)}", code="invalid_function_parameters")
    kind = schema.get("type", "object")
    properties = schema.get("properties", {})
    required = schema.get("required", [])
    is_schema = kind == "object" and isinstance(properties, dict) and isinstance(required, list)
    if not is_schema or not all(isinstance(one, dict | bool) for one in properties.values()):
        raise invalid(
            where,
            f"{where} must be the JSON schema of an object, with properties, got {quoted(schema)}",
            code="invalid_function_parameters",
        )


def _tool_choice(body: Mapping[str, Any], tools: Sequence[Any] | None) -> bool:
    """Whether calls are parsed.

    Raises:
        ApiError: a call would have to be forced or prevented, which takes a grammar.
    """
    if body.get("parallel_tool_calls", True) is not True:
        raise not_sampled(
            "parallel_tool_calls",
            f"parallel_tool_calls={quoted(body['parallel_tool_calls'])}: sampling is not constrained, so several calls "
            "in a reply cannot be prevented: leave it out, or name it in ignored_options of the agent's engine",
        )
    choice = body.get("tool_choice", "auto")
    if choice == "none":
        return False
    if choice != "auto":
        raise not_sampled(
            "tool_choice",
            f"tool_choice={quoted(choice)}: sampling is not constrained by a grammar, so a call cannot be forced: set "
            "it to auto or none, or name it in ignored_options of the agent's engine",
        )
    if "tool_choice" in body and tools is None:
        raise invalid("tool_choice", "tool_choice needs tools")
    return True
