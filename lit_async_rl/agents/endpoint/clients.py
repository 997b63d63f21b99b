"""Clients of the official `openai` package, one for each episode, at an endpoint in this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from lit_async_rl.agents.api.bodies import CallLimits
from lit_async_rl.agents.api.openai_clients import CALL_TIMEOUT_S
from lit_async_rl.agents.api.service import CallService
from lit_async_rl.agents.clients import InProcessClients
from lit_async_rl.agents.endpoint.server import Endpoint, import_server
from lit_async_rl.agents.episode import AgentEpisode
from lit_async_rl.models.tokenizer import TextCodec
from lit_async_rl.utils.checks import check_range


class EndpointClients(InProcessClients):
    """Gives each agent an `openai.AsyncOpenAI` whose base URL is a server on the loopback interface.

    Calls of that client need no connection. Any other works as well, over HTTP with `client.base_url` and
    `client.api_key`: a synchronous one in a thread, a framework's, or one in another process, see `CommandAgent`.

    Args:
        host: address to listen on. At any other than loopback, whoever has the key of a running episode can sample from
            the policy from other machines, and texts are not encrypted.
        port: port; 0 chooses a free one.
        max_body_mb: largest body of a request, in MiB.
        max_messages: largest number of messages in a call.
        ignored_options: options of a call that are accepted without effect. Others are refused if they change the
            sampling distribution, such as `temperature`, or have replies sampled again, such as `response_format` or
            `tool_choice`.
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
        check_range("EndpointClients", "positive", max_body_mb=max_body_mb)
        check_range("EndpointClients", "integer >= 1", max_messages=max_messages)
        check_range("EndpointClients", "integer in [0, 65535]", port=port)
        super().__init__(ignored_options)
        self.host = host
        self.port = port
        self.max_body_mb = max_body_mb
        self.max_messages = max_messages
        self.timeout_s = timeout_s
        self._endpoint: Endpoint | None = None

    @property
    def limits(self) -> CallLimits:
        """Limits of a call."""
        return CallLimits(
            max_body_bytes=int(self.max_body_mb * 2**20),
            max_messages=self.max_messages,
            ignored_options=frozenset(self.ignored_options),
        )

    def prepare(self) -> None:
        super().prepare()
        import_server()

    async def open(self, episode: AgentEpisode) -> Any:
        """An `openai.AsyncOpenAI` for an episode. Starts the server before the first, and after it has failed.

        Raises:
            ImportError: Starlette or uvicorn is not installed.
            OSError: the server cannot listen.
            StalledError: the server does not start.
            EngineError: it ended at once.
        """
        client = await super().open(episode)
        if self._endpoint is not None and self._endpoint.failure is not None:  # before it knew of this episode
            raise self._endpoint.failure
        return client

    def _serve(self, codec: TextCodec) -> CallService:
        if self._endpoint is not None and self._endpoint.failure is not None:
            self._endpoint.close()
            self._endpoint = self._service = None
        if self._endpoint is None:
            endpoint = Endpoint(self.host, port=self.port, limits=self.limits, codec=codec)
            try:
                endpoint.start()
            except BaseException:
                endpoint.close()
                raise
            self._endpoint = endpoint
            self._service = endpoint.service
            self._base_url = endpoint.base_url
        return self._endpoint.service

    async def end(self) -> None:
        endpoint = self._endpoint
        self._endpoint = None
        await super().end()
        if endpoint is not None:
            endpoint.close()
