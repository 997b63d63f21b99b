"""Clients of the official `openai` package that share connections. Imports nothing else, for processes of agents."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

MISSING = 'clients of agents need openai, and over HTTP Starlette and uvicorn: pip install "lit-async-rl[agents]"'
CALL_TIMEOUT_S = 600.0  # as the official client
# Each call looks at every connection of its pool, twice: with hundreds of episodes in one pool that takes as long as
# all else.
NUM_POOLS = 32
POLICY = "policy"  # name of the model where a call has none


@dataclass(frozen=True)
class EndpointAddress:
    """Where a client finds the policy, the key of its episode, and the time-out of its calls in seconds; None has none.

    Named as the attributes of an `openai.AsyncOpenAI`, in place of which it stands.
    """

    base_url: str
    api_key: str = field(repr=False)
    timeout: float | None = CALL_TIMEOUT_S


def address_of(client: Any) -> EndpointAddress:
    """The address of a client of the official package, for one in another process."""
    timeout = getattr(client, "timeout", None)
    return EndpointAddress(
        str(client.base_url).rstrip("/"),
        api_key=str(client.api_key),
        # of a client that a user has made it may be several limits, one for each part of a call
        timeout=float(timeout) if isinstance(timeout, int | float) else CALL_TIMEOUT_S,
    )


class OpenAIClients:
    """Makes clients of the official package, which share pools of connections. Used by one event loop.

    Args:
        make_transport: makes the transport of a pool to the address of its clients; None is the package's own, as for
            all other addresses.
    """

    def __init__(self, make_transport: Callable[[], Any] | None = None) -> None:
        self._make_transport = make_transport
        self._pools: defaultdict[str, list[Any]] = defaultdict(list)  # by the base URL of their clients
        self._num_made = 0

    def make(self, address: EndpointAddress, episode: Any = None) -> Any:
        """An `openai.AsyncOpenAI`, see `_client_class`.

        Args:
            address: where its calls go.
            episode: its attribute `episode`; None where the episode is in another process.

        Raises:
            ImportError: `openai` is not installed.
        """
        openai = import_openai()
        pools = self._pools[address.base_url]
        if len(pools) < NUM_POOLS:
            server = address.base_url.removesuffix("/v1")
            own = {} if self._make_transport is None else {"mounts": {server: self._make_transport()}}
            # without the environment's proxies, which do not lead to this machine, and without certificates to read:
            # the base URL is plain HTTP
            pools.append(openai.DefaultAsyncHttpxClient(trust_env=False, verify=False, **own))
        pool = pools[self._num_made % len(pools)]
        self._num_made += 1
        client = _client_class()(
            base_url=address.base_url, api_key=address.api_key, http_client=pool, timeout=address.timeout
        )
        if episode is not None:
            client.episode = episode
        return client

    async def aclose(self) -> None:
        """Closes all connections; a later client has others."""
        pools = [pool for some in self._pools.values() for pool in some]
        self._pools.clear()
        for pool in pools:
            await pool.aclose()


@functools.cache
def _client_class() -> Any:
    """`openai.AsyncOpenAI` whose calls need no `model`, and whose chat calls take less processor time.

    The official client walks through messages and tools to rename keys, of which neither has any; in a profile that was
    half of its time. `extra_body` becomes part of the request as it is.
    """
    openai = import_openai()
    from openai.resources.chat import AsyncChat
    from openai.resources.chat.completions import AsyncCompletions as AsyncChatCompletions
    from openai.resources.completions import AsyncCompletions

    class ChatCompletions(AsyncChatCompletions):
        async def create(
            self, *, messages: Iterable[Any], model: str = POLICY, extra_body: Any = None, **arguments: Any
        ) -> Any:
            plain = {"messages": _plain(list(messages))}
            if isinstance(arguments.get("tools"), list | tuple):
                plain["tools"] = _plain(arguments.pop("tools"))
            body = plain | dict(extra_body or {})
            return await super().create(messages=(), model=model, extra_body=body, **arguments)

    class Client(openai.AsyncOpenAI):
        @functools.cached_property
        def chat(self) -> AsyncChat:
            chat = AsyncChat(self)
            vars(chat)["completions"] = ChatCompletions(self)
            return chat

        @functools.cached_property
        def completions(self) -> AsyncCompletions:
            return _without_model(AsyncCompletions)(self)

        @functools.cached_property
        def responses(self) -> Any:  # imported by their first call, as in the official client
            from openai.resources.responses import AsyncResponses

            return _without_model(AsyncResponses)(self)

        def copy(self, **options: Any) -> Any:
            other: Any = super().copy(**options)
            if hasattr(self, "episode"):
                other.episode = self.episode
            return other

        with_options = copy

    return Client


@functools.cache
def _without_model(kind: Any) -> Any:
    """A kind of calls of the official client that need no `model`."""

    class Calls(kind):  # type: ignore[misc]
        async def create(self, *, model: Any = POLICY, **arguments: Any) -> Any:
            return await super().create(model=model, **arguments)

    return Calls


def _plain(value: Any) -> Any:
    """Mappings and lists with the client's pydantic replies as dictionaries."""
    if isinstance(value, str | int | float | None):
        return value
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    dump = getattr(value, "model_dump", None)
    return value if dump is None else dump(mode="json", exclude_unset=True)


def import_openai() -> Any:
    """The package `openai`.

    Raises:
        ImportError: it is not installed.
    """
    try:
        import openai
    except ImportError as error:
        raise ImportError(f"{MISSING} ({error})") from error
    return openai
