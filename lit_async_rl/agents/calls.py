"""A call of an agent to the policy: its sampling, its replies, and the errors that it may get."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from lit_async_rl.sampler_records import SamplerHead
from lit_async_rl.utils.checks import check_range

ReplyReason = Literal["stop", "length", "tool_calls"]
MAX_STOPS = 4  # as in OpenAI's API; the engine of all agents looks for each of them
MAX_STOP_CHARS = 256
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")  # names of the reasoning in a message


class AgentCallError(RuntimeError):
    """A call that cannot be answered; an agent may catch it and go on.

    Attributes:
        code: reason, as OpenAI's API names it, such as `context_length_exceeded`.
        status: HTTP status that belongs to it.
        param: argument at fault; None if no single one is.
    """

    def __init__(self, message: str, code: str, status: int = 400, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.status = status
        self.param = param


@dataclass(frozen=True, kw_only=True)
class CallSampling:
    """Sampling parameters of a call; None leaves the run's own setting.

    Temperature and truncation are those of the run: tokens that train must be sampled as `data.sampling` says.

    Args:
        max_tokens: at most this many tokens; never more than `data.sampling.max_tokens`.
        stop: strings that end the reply, beside those of the run: at most `MAX_STOPS` of `MAX_STOP_CHARS` characters.
        seed: makes the reply repeatable with the embedded engine. Samples of a group differ nevertheless.

    Raises:
        ValueError: a value is out of range.
    """

    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str) or not all(isinstance(text, str) and text for text in self.stop):
            raise ValueError(f"stop must be a list of non-empty strings, got {self.stop!r}")
        object.__setattr__(self, "stop", tuple(self.stop))
        if len(self.stop) > MAX_STOPS or any(len(text) > MAX_STOP_CHARS for text in self.stop):
            raise ValueError(
                f"stop takes at most {MAX_STOPS} strings of at most {MAX_STOP_CHARS} characters, got {len(self.stop)} "
                f"strings, the longest of {max(map(len, self.stop))} characters"
            )
        check_range("call", "integer >= 1", max_tokens=self.max_tokens)
        check_range("call", "integer", seed=self.seed)


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """A tool call in a reply.

    Attributes:
        id: unique within its episode.
        name: of the tool.
        arguments: JSON text, as the policy wrote it.
    """

    id: str
    name: str
    arguments: str

    def as_message(self) -> dict[str, Any]:
        """In the form of OpenAI's chat messages."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True, kw_only=True)
class ReplyMessage:
    """Parsed reply.

    Attributes:
        content: text for the user, without reasoning and tool calls.
        tool_calls: tool calls, in order.
        reasoning: text of the reasoning; None without any.
    """

    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str | None = None

    def as_message(self) -> dict[str, Any]:
        """The assistant's message, as in OpenAI's chat API."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [call.as_message() for call in self.tool_calls]
        return message


@dataclass(frozen=True, kw_only=True)
class Reply:
    """One reply of the policy to a call. Fields of tokens have one entry for each of `token_ids`.

    Attributes:
        text: decoded reply, before the first stop string.
        message: the same in parts; of a text completion its `content` is the text.
        token_ids: token ids, stop token included.
        logprobs: log-probability of each token under the sampling distribution.
        versions: policy version that sampled each token.
        finish_reason: why it ended.
        prompt_token_count: tokens that it follows.
        head: recorded sampling distributions, if `sampling.head` is set.
        token_texts: text of each token.
    """

    text: str
    message: ReplyMessage
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: ReplyReason
    prompt_token_count: int
    head: SamplerHead | None = None
    token_texts: tuple[str, ...] = ()
