"""Clients of the official `openai` package, one for each episode, at an endpoint in this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from lit_async_rl.agents.api.bodies import CallLimits, checked_options
from lit_async_rl.agents.api.exchange import ApiRequest, ApiResponse
from lit_async_rl.agents.api.openai_clients import CALL_TIMEOUT_S, EndpointAddress, OpenAIClients, import_openai
from lit_async_rl.agents.api.service import ENDED
from lit_async_rl.agents.api.transport import transport_to
from lit_async_rl.agents.clients import ClientFactory
from lit_async_rl.agents.endpoint.server import Endpoint, import_server
from lit_async_rl.agents.episode import AgentEpisode
from lit_async_rl.utils.checks import check_range


class EndpointClients(ClientFactory):
    """Gives each agent an `openai.AsyncOpenAI` whose base URL is a server on the loopback interface.

    Calls of that client reach the endpoint without a connection. Any other client works as well, over HTTP with
    `client.base_url` and `client.api_key`: a synchronous one in a thread, a framework's, or one in another process, see
    `CommandAgent`.

    Args:
        host: address to listen on. Others than loopback are reached from other machines: whoever has the key of a
            running episode can sample from the policy, and texts are not encrypted.
        port: port; 0 chooses a free one.
        max_body_mb: largest body of a request, in MiB.
        max_messages: largest number of messages in a call.
        ignored_options: options of a call that are accepted and have no effect, where they would be refused because
            they change the distribution that tokens are sampled from, such as `temperature`, or would have replies
            sampled again, such as `response_format` or `tool_choice`.
        timeout_s: time-out of a call of the client.

    Raises:
        ValueError: a setting is out of range.
    """

    has_address: ClassVar[bool] = True

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        max_body_mb: float = 8.0,
        max_messages: int = 2000,
        ignored_options: Sequence[str] = (),
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> None:
        check_range("endpoint", "positive", max_body_mb=max_body_mb)
        check_range("endpoint", "integer >= 1", max_messages=max_messages)
        check_range("endpoint", "integer in [0, 65535]", port=port)
        self.host = host
        self.port = port
        self.max_body_mb = max_body_mb
        self.max_messages = max_messages
        self.ignored_options = checked_options(ignored_options, "endpoint.ignored_options")
        self.timeout_s = timeout_s
        self._endpoint: Endpoint | None = None
        self._openai = OpenAIClients(lambda: transport_to(self._is_here, self.respond))

    @property
    def limits(self) -> CallLimits:
        """Limits of a call."""
        return CallLimits(
            max_body_bytes=int(self.max_body_mb * 2**20),
            max_messages=self.max_messages,
            ignored_options=frozenset(self.ignored_options),
        )

    def prepare(self) -> None:
        import_openai()
        import_server()

    async def open(self, episode: AgentEpisode) -> Any:
        """An `openai.AsyncOpenAI` for an episode, see `address`."""
        return self._openai.make(self.address(episode), episode)

    def address(self, episode: AgentEpisode) -> EndpointAddress:
        """Accepts calls of an episode; returns where. Starts the server before the first, and after it has failed.

        Raises:
            ImportError: Starlette or uvicorn is not installed.
            OSError: the server cannot listen.
            StalledError: the server does not start.
            EngineError: it has ended at once.
        """
        if self._endpoint is not None and self._endpoint.failure is not None:
            self._endpoint.close()
            self._endpoint = None
        if self._endpoint is None:
            endpoint = Endpoint(self.host, port=self.port, limits=self.limits, codec=episode.codec)
            try:
                endpoint.start()
            except BaseException:
                endpoint.close()
                raise
            self._endpoint = endpoint
        self._endpoint.service.open(episode)
        if self._endpoint.failure is not None:  # before it knew of this episode
            raise self._endpoint.failure
        return EndpointAddress(self._endpoint.base_url, api_key=episode.key, timeout=self.timeout_s)

    def _is_here(self, base_url: str) -> bool:
        return self._endpoint is not None and self._endpoint.base_url == base_url

    async def respond(self, request: ApiRequest) -> ApiResponse:
        """The answer to a request of one of its clients."""
        return ENDED if self._endpoint is None else await self._endpoint.service.respond(request)

    async def close(self, client: Any, episode: AgentEpisode) -> None:
        if self._endpoint is not None:
            self._endpoint.service.end(episode.key)

    async def end(self) -> None:
        endpoint = self._endpoint
        self._endpoint = None
        await self._openai.aclose()
        if endpoint is not None:
            endpoint.close()


class EndpointAddresses(EndpointClients):
    """`EndpointClients` for agents that make their clients themselves, such as those in other processes."""

    def prepare(self) -> None:
        import_server()

    async def open(self, episode: AgentEpisode) -> EndpointAddress:
        return self.address(episode)
