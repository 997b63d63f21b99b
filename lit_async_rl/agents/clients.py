"""Clients that agents get: objects to call the policy with.

`InProcessClients` gives an object with those methods of `openai.AsyncOpenAI` that agents use, without a server: it
answers, and refuses, what the endpoint does. Subclasses of `ClientFactory` may give anything else, such as a client of
an endpoint.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

from lit_async_rl.agents.api.answers import DONE, Answer, TokenTexts
from lit_async_rl.agents.api.bodies import (
    Call,
    CallLimits,
    chat_call,
    check_length,
    checked_options,
    parse_body,
    text_call,
)
from lit_async_rl.agents.api.errors import ApiError
from lit_async_rl.agents.calls import AgentCallError, CallSampling, Reply
from lit_async_rl.agents.episode import AgentEpisode

OF_CLIENTS = ("timeout", "extra_headers", "extra_query")  # arguments that are no part of a call
_texts = functools.lru_cache(maxsize=4)(TokenTexts)


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
    """Clients in the process of the trainer, see `InProcessClient`.

    Args:
        ignored_options: see `EndpointClients`.

    Raises:
        ValueError: every answer depends on one of the options.
    """

    def __init__(self, ignored_options: Sequence[str] = ()) -> None:
        self.ignored_options = checked_options(ignored_options, "InProcessClients.ignored_options")
        self._limits = CallLimits(ignored_options=frozenset(self.ignored_options))

    async def open(self, episode: AgentEpisode) -> InProcessClient:
        return InProcessClient(episode, self._limits)


# -- calls as the API has them -----------------------------------------------------------------------------------------


def call_ids(call: Call, call_id: str) -> list[str]:
    """Names of a call's parts for the episode: one for each prompt."""
    return [call_id] if call.messages else [f"{call_id}-{number}" for number in range(len(call.prompts))]


async def sample(episode: AgentEpisode, call: Call, names: Sequence[str] = ()) -> list[Reply]:
    """The policy's replies to a call.

    Args:
        episode: that the call belongs to.
        call: what is asked.
        names: of the call's parts, see `call_ids`; without any nobody can ask for it again.

    Raises:
        AgentCallError: the call cannot be answered.
    """
    sampling = CallSampling(max_tokens=call.max_tokens, stop=call.stop, seed=call.seed)
    if call.messages:
        return await episode.complete(
            call.messages,
            tools=call.tools,
            sampling=sampling,
            n=call.n,
            call_id=next(iter(names), None),
            chat_template_kwargs=call.chat_template_kwargs,
            parses_tools=call.calls_tools,
        )
    tasks = [
        asyncio.ensure_future(episode.complete_text(prompt, sampling=sampling, n=call.n, call_id=name))
        for prompt, name in itertools.zip_longest(call.prompts, names)
    ]
    try:
        return [reply for replies in await asyncio.gather(*tasks) for reply in replies]
    except BaseException:  # the agent gets an error, and none of the replies to the other prompts
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for name in names:
            episode.withdraw(name)
        raise


class ApiObject(SimpleNamespace):
    """A part of an answer, with the attributes of OpenAI's; those that it leaves out are None.

    A message may be sent back in the messages of the next call as it is.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return None

    def model_dump(self, exclude_none: bool = True) -> dict[str, Any]:
        """As a dictionary."""
        return {key: _plain(value) for key, value in vars(self).items() if value is not None or not exclude_none}


def _object(found: dict[str, Any]) -> Any:
    """An object of JSON; the likeliest tokens of a text, by their own names, stay a dictionary."""
    is_by_token = bool(found) and all(isinstance(value, float) for value in found.values())
    return found if is_by_token else ApiObject(**found)


def _plain(value: Any) -> Any:
    """JSON values of an argument or answer of a client."""
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    dump = getattr(value, "model_dump", None)
    return value if dump is None else dump(exclude_none=True)


class InProcessClient:
    """A client like `openai.AsyncOpenAI`: `await client.chat.completions.create(messages=..., tools=...)`.

    It serves, and refuses, what the endpoint does; a refusal is an `AgentCallError`. `model` may be left out.

    Args:
        episode: the running agent.
        limits: of its calls.

    Attributes:
        episode: for calls with all that the library knows of a reply: `client.episode.complete(messages)`.
    """

    def __init__(self, episode: AgentEpisode, limits: CallLimits | None = None) -> None:
        self.episode = episode
        limits = (limits or CallLimits()).of_episode(episode.trains)
        self.chat = SimpleNamespace(completions=_Completions(episode, limits, read=chat_call))
        self.completions = _Completions(episode, limits, read=text_call)


class _Completions:
    def __init__(self, episode: AgentEpisode, limits: CallLimits, read: Callable[..., Call]) -> None:
        self._episode = episode
        self._limits = limits
        self._read = read

    async def create(self, *, extra_body: Mapping[str, Any] | None = None, **arguments: Any) -> Any:
        """The policy's replies; arguments as in OpenAI's API. With `stream` an iterator of their parts.

        Raises:
            AgentCallError: the call cannot be answered, or an argument is not served.
        """
        named = {name: value for name, value in arguments.items() if name not in OF_CLIENTS}
        body = json.dumps(_plain({"model": "policy"} | named | dict(extra_body or {})), ensure_ascii=False)
        texts = _texts(self._episode.codec)
        try:
            call = self._read(parse_body(body.encode()), self._episode.request.sampling, self._limits)
            check_length(call, self._episode.max_model_len, longest_token=texts.longest)
        except ApiError as error:
            raise AgentCallError(error.message, error.code or "", error.status, param=error.param) from None
        replies = await sample(self._episode, call)
        answer = Answer(call, replies, texts, number=secrets.token_hex(12), created=int(time.time()))
        if call.stream:
            return _parts(answer)
        found = json.loads(answer.whole, object_hook=_object)
        for choice, reply in zip(found.choices, replies, strict=True):
            choice.reply = reply
        return found


async def _parts(answer: Answer) -> AsyncIterator[Any]:
    for event in answer.events.decode().removesuffix(DONE).split("\n\n")[:-1]:
        yield json.loads(event.removeprefix("data: "), object_hook=_object)
