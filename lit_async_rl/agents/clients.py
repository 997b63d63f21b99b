"""Clients that agents get: objects to call the policy with.

`InProcessClients` gives an object with those methods of `openai.AsyncOpenAI` that agents use, without a server.
Subclasses of `ClientFactory` may give anything else, such as a client of an endpoint.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any, ClassVar

from lit_async_rl.agents.calls import CallSampling, Reply
from lit_async_rl.agents.episode import AgentEpisode

_IGNORED = frozenset(
    {"model", "timeout", "stream_options", "user", "extra_headers", "metadata", "store", "tool_choice"}
)


class ClientFactory(ABC):
    """Makes the client of each episode. All methods run in the event loop of the episodes.

    Attributes:
        has_address: whether its clients have `base_url` and `api_key` as those of the `openai` package, for agents that
            run in another process.
    """

    has_address: ClassVar[bool] = False

    @abstractmethod
    async def open(self, episode: AgentEpisode) -> Any:
        """A client whose calls are those of the episode."""

    async def close(self, client: Any, episode: AgentEpisode) -> None:  # noqa: B027  (most have nothing to free)
        """Frees a client, when its agent has ended."""

    async def end(self) -> None:  # noqa: B027
        """Frees what clients share, at the end of a run; another run may open clients again."""


class InProcessClients(ClientFactory):
    """Clients in the process of the trainer, see `InProcessClient`."""

    async def open(self, episode: AgentEpisode) -> InProcessClient:
        return InProcessClient(episode)


# -- Responses in the form of OpenAI's, as far as agents read them ----------------------------------------------------


@dataclass(frozen=True)
class Function:
    """Name and arguments (JSON text) of a tool call."""

    name: str
    arguments: str


@dataclass(frozen=True)
class MessageToolCall:
    """A tool call of a message."""

    id: str
    function: Function
    type: str = "function"


@dataclass(frozen=True)
class ChatMessage:
    """A message of the policy; may be sent back in the messages of the next call as it is."""

    content: str
    tool_calls: list[MessageToolCall] | None = None
    reasoning_content: str | None = None
    role: str = "assistant"

    def model_dump(self, exclude_none: bool = True) -> dict[str, Any]:
        """The message as a dictionary."""
        return {key: value for key, value in asdict(self).items() if value is not None or not exclude_none}


@dataclass(frozen=True)
class Choice:
    """One reply to a chat call."""

    index: int
    message: ChatMessage
    finish_reason: str
    reply: Reply


@dataclass(frozen=True)
class TextChoice:
    """One completion of a text."""

    index: int
    text: str
    finish_reason: str
    reply: Reply


@dataclass(frozen=True)
class Usage:
    """Tokens of a call."""

    prompt_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        """Both."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class ChatResponse:
    """Answer to a chat call."""

    choices: list[Choice]
    usage: Usage


@dataclass(frozen=True)
class TextResponse:
    """Answer to a call with a text."""

    choices: list[TextChoice]
    usage: Usage


def _usage(replies: Sequence[Reply]) -> Usage:
    return Usage(replies[0].prompt_token_count, sum(len(reply.token_ids) for reply in replies))


def _plain(message: Any) -> Any:
    """A message as a mapping: `ChatMessage`, an object of pydantic, or a mapping as it is."""
    if isinstance(message, Mapping):
        return message
    dump = getattr(message, "model_dump", None)
    if dump is not None:
        return dump(exclude_none=True)
    return asdict(message) if is_dataclass(message) and not isinstance(message, type) else message


class InProcessClient:
    """A client like `openai.AsyncOpenAI`: `await client.chat.completions.create(messages=..., tools=...)`.

    Arguments that only matter to a server are ignored. Streams are not offered.

    Attributes:
        episode: for calls with all that the library knows of a reply: `client.episode.complete(messages)`.
    """

    def __init__(self, episode: AgentEpisode) -> None:
        self.episode = episode
        self.chat = _Chat(episode)
        self.completions = _TextCompletions(episode)


class _Chat:
    def __init__(self, episode: AgentEpisode) -> None:
        self.completions = _ChatCompletions(episode)


class _ChatCompletions:
    def __init__(self, episode: AgentEpisode) -> None:
        self._episode = episode

    async def create(
        self,
        *,
        messages: Sequence[Any],
        tools: Sequence[Mapping[str, Any]] | None = None,
        n: int = 1,
        extra_body: Mapping[str, Any] | None = None,
        **arguments: Any,
    ) -> ChatResponse:
        """Replies to a conversation; arguments as in OpenAI's chat API.

        Raises:
            AgentCallError: the call cannot be answered.
            TypeError: an argument is unknown.
        """
        replies = await self._episode.complete(
            [_plain(message) for message in messages],
            tools=tools,
            sampling=sampling_of(arguments),
            n=n,
            chat_template_kwargs=(extra_body or {}).get("chat_template_kwargs"),
        )
        return ChatResponse([_choice(number, reply) for number, reply in enumerate(replies)], _usage(replies))


class _TextCompletions:
    def __init__(self, episode: AgentEpisode) -> None:
        self._episode = episode

    async def create(self, *, prompt: str | Sequence[int], n: int = 1, **arguments: Any) -> TextResponse:
        """Completions of a text or of token ids.

        Raises:
            AgentCallError: the call cannot be answered.
            TypeError: an argument is unknown.
        """
        replies = await self._episode.complete_text(prompt, sampling=sampling_of(arguments), n=n)
        choices = [TextChoice(k, reply.text, reply.finish_reason, reply=reply) for k, reply in enumerate(replies)]
        return TextResponse(choices, _usage(replies))


def _choice(number: int, reply: Reply) -> Choice:
    calls = [MessageToolCall(call.id, Function(call.name, call.arguments)) for call in reply.message.tool_calls]
    message = ChatMessage(reply.message.content, calls or None, reply.message.reasoning)
    return Choice(number, message, reply.finish_reason, reply=reply)


def sampling_of(arguments: dict[str, Any]) -> CallSampling:
    """What a chat call asks of sampling, by the names of the API.

    Raises:
        TypeError: an argument is unknown.
    """
    known = {key: value for key, value in arguments.items() if key not in _IGNORED and value is not None}
    extra = known.pop("max_completion_tokens", None)
    stop = known.pop("stop", ())
    if extra is not None:
        known["max_tokens"] = extra
    return CallSampling(stop=(stop,) if isinstance(stop, str) else tuple(stop), **known)
