"""Clients of the official `openai` package, one for each episode, at an endpoint in this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lit_async_rl.agents.clients import ClientFactory
from lit_async_rl.agents.endpoint.server import MISSING, Endpoint, EndpointSettings
from lit_async_rl.agents.episode import AgentEpisode

CALL_TIMEOUT_S = 600.0  # as the official client
# Each call looks at every connection of its pool, twice: with hundreds of episodes in one that takes as long as the rest.
NUM_POOLS = 32


class EndpointClients(ClientFactory):
    """Gives each agent an `openai.AsyncOpenAI` whose base URL is a server on the loopback interface.

    Any other client works as well with `client.base_url` and `client.api_key`: a synchronous one in a thread, a
    framework's, or one in another process, see `CommandAgent`.

    Args:
        host: see `EndpointSettings`; likewise all others.
        timeout_s: time-out of a call of the client.

    Raises:
        ValueError: a setting is out of range.
    """

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
        self._pools: list[Any] = []  # of connections, which clients share
        self._num_opened = 0

    async def open(self, episode: AgentEpisode) -> Any:
        """An `openai.AsyncOpenAI` for an episode; starts the server before the first.

        Raises:
            ImportError: `openai`, Starlette or uvicorn is not installed.
            EngineError: the server has ended for good.
        """
        try:
            import openai
        except ImportError as error:
            raise ImportError(f"{MISSING} ({error})") from error
        if self._endpoint is None:
            endpoint = Endpoint(self.settings, episode.codec)
            try:
                endpoint.start()
            except BaseException:
                endpoint.close()
                raise
            self._endpoint = endpoint
        if len(self._pools) < NUM_POOLS:
            # without the environment's proxies, which do not lead to this process, and without certificates to read:
            # the base URL is plain HTTP
            self._pools.append(openai.DefaultAsyncHttpxClient(trust_env=False, verify=False, timeout=self.timeout_s))
        pool = self._pools[self._num_opened % len(self._pools)]
        self._num_opened += 1
        self._endpoint.open(episode)
        return openai.AsyncOpenAI(
            base_url=self._endpoint.base_url, api_key=episode.key, http_client=pool, timeout=self.timeout_s
        )

    async def close(self, client: Any, episode: AgentEpisode) -> None:
        if self._endpoint is not None:
            self._endpoint.end(episode.key)

    async def end(self) -> None:
        pools = self._pools
        endpoint = self._endpoint
        self._pools = []
        self._endpoint = None
        for pool in pools:
            await pool.aclose()
        if endpoint is not None:
            endpoint.close()
