"""Clients of the official `openai` package, one for each episode, at an endpoint in this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from lit_async_rl.agents.clients import ClientFactory
from lit_async_rl.agents.endpoint.openai_clients import CALL_TIMEOUT_S, EndpointAddress, OpenAIClients, import_openai
from lit_async_rl.agents.endpoint.server import Endpoint, EndpointSettings, endpoint_at, respond_at
from lit_async_rl.agents.endpoint.transport import transport_to
from lit_async_rl.agents.episode import AgentEpisode


class EndpointClients(ClientFactory):
    """Gives each agent an `openai.AsyncOpenAI` whose base URL is a server on the loopback interface.

    Calls of that client reach the endpoint without a connection. Any other client works as well, over HTTP with
    `client.base_url` and `client.api_key`: a synchronous one in a thread, a framework's, or one in another process, see
    `CommandAgent`.

    Args:
        host: see `EndpointSettings`; likewise all others.
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
        self.settings = EndpointSettings(
            host=host,
            port=port,
            max_body_mb=max_body_mb,
            max_messages=max_messages,
            ignored_options=ignored_options,
        )
        self.timeout_s = timeout_s
        self._endpoint: Endpoint | None = None
        self._openai = OpenAIClients(lambda: transport_to(lambda at: endpoint_at(at) is not None, respond_at))

    async def open(self, episode: AgentEpisode) -> Any:
        """An `openai.AsyncOpenAI` for an episode; starts the server before the first.

        Raises:
            ImportError: `openai`, Starlette or uvicorn is not installed.
            EngineError: the server has ended for good.
        """
        import_openai()
        return self._openai.make(self.address(episode))

    def address(self, episode: AgentEpisode) -> EndpointAddress:
        """Accepts calls of an episode; returns where. Starts the server before the first.

        Raises:
            ImportError: Starlette or uvicorn is not installed.
            EngineError: the server has ended for good.
        """
        if self._endpoint is None:
            endpoint = Endpoint(self.settings, episode.codec)
            try:
                endpoint.start()
            except BaseException:
                endpoint.close()
                raise
            self._endpoint = endpoint
        self._endpoint.open(episode)
        return EndpointAddress(self._endpoint.base_url, api_key=episode.key, timeout=self.timeout_s)

    async def close(self, client: Any, episode: AgentEpisode) -> None:
        if self._endpoint is not None:
            self._endpoint.end(episode.key)

    async def end(self) -> None:
        endpoint = self._endpoint
        self._endpoint = None
        await self._openai.aclose()
        if endpoint is not None:
            endpoint.close()


class EndpointAddresses(EndpointClients):
    """`EndpointClients` for agents that make their clients themselves, such as those in other processes."""

    async def open(self, episode: AgentEpisode) -> EndpointAddress:
        return self.address(episode)
