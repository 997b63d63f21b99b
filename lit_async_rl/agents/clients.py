"""Clients that agents get: objects to call the policy with.

`InProcessClients` gives an `openai.AsyncOpenAI` that needs no server; other subclasses of `ClientFactory` may give
anything else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from lit_async_rl.agents.api.bodies import CallLimits, checked_options
from lit_async_rl.agents.api.exchange import ApiRequest, ApiResponse
from lit_async_rl.agents.api.openai_clients import EndpointAddress, OpenAIClients, import_openai
from lit_async_rl.agents.api.service import ENDED, CallService
from lit_async_rl.agents.api.transport import transport_to
from lit_async_rl.agents.episode import AgentEpisode
from lit_async_rl.models.tokenizer import TextCodec

NOWHERE = "http://no-address.invalid/v1"  # a name that is never found: agents that need an address have EndpointClients


class ClientFactory(ABC):
    """Makes the client of each episode. Coroutines run in the event loop of the episodes.

    Attributes:
        has_address: whether its clients have `base_url` and `api_key`, like those of the `openai` package, for agents
            in another process.
    """

    has_address: ClassVar[bool] = False

    def prepare(self) -> None:  # noqa: B027  (most need nothing)
        """Imports what the clients need, which takes a second, while the engine is set up.

        Raises:
            ImportError: a package is not installed; names the extra that has it.
        """

    @abstractmethod
    async def open(self, episode: AgentEpisode) -> Any:
        """A client whose calls are those of the episode."""

    async def close(self, client: Any, episode: AgentEpisode) -> None:  # noqa: B027
        """Frees a client whose agent has ended."""

    async def end(self) -> None:  # noqa: B027
        """Frees what clients share, at the end of a run; another run may open clients again."""


class InProcessClients(ClientFactory):
    """Gives each agent an `openai.AsyncOpenAI` whose calls are answered in this process, without a connection.

    It serves and refuses what the endpoint does; `model` may be left out of a call. `client.episode.complete(messages)`
    returns all that the library knows of a reply. Other clients cannot reach it, and its calls have no time-out but the
    episode's.

    Args:
        ignored_options: see `EndpointClients`.

    Attributes:
        timeout_s: time-out of a call of its clients; None has none.

    Raises:
        ValueError: every answer depends on one of the options.
    """

    timeout_s: float | None = None

    def __init__(self, ignored_options: Sequence[str] = ()) -> None:
        self.ignored_options = checked_options(ignored_options, f"{type(self).__name__}.ignored_options")
        self._service: CallService | None = None
        self._base_url = NOWHERE
        self._openai = OpenAIClients(lambda: transport_to(self.respond))

    @property
    def limits(self) -> CallLimits:
        """Limits of a call."""
        return CallLimits(ignored_options=frozenset(self.ignored_options))

    def prepare(self) -> None:
        import_openai()

    async def open(self, episode: AgentEpisode) -> Any:
        self._serve(episode.codec).open(episode)
        return self._openai.make(EndpointAddress(self._base_url, api_key=episode.key, timeout=self.timeout_s), episode)

    def _serve(self, codec: TextCodec) -> CallService:
        """The service, made before the first episode."""
        if self._service is None:
            self._service = CallService(self.limits, codec)
        return self._service

    async def respond(self, request: ApiRequest) -> ApiResponse:
        """The answer to a request of one of its clients."""
        return ENDED if self._service is None else await self._service.respond(request)

    async def close(self, client: Any, episode: AgentEpisode) -> None:
        if self._service is not None:
            self._service.end(episode.key)

    async def end(self) -> None:
        self._service = None
        await self._openai.aclose()
