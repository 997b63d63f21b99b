"""The server of the endpoint: where clients reach running episodes over HTTP.

| who | waits for | woken by |
|---|---|---|
| the server's thread | requests, and replies of episodes | sockets, and the engine's thread |
| `Endpoint.start` | the server to listen, at most `START_TIMEOUT_S` | the server's thread |
| a client | its answer, at most its own time-out | the server's thread, also when the server ends |

A server that ends by an error is not started again: its clients are cut off, and the engines that it serves have failed
(`data.limits.engine_restarts`).
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable
from typing import Any

from lit_async_rl.agents.api.bodies import CallLimits
from lit_async_rl.agents.api.openai_clients import MISSING
from lit_async_rl.agents.api.service import CallService
from lit_async_rl.errors import EngineError, describe
from lit_async_rl.models.tokenizer import TextCodec
from lit_async_rl.runtime.loop import LoopThread
from lit_async_rl.runtime.ports import listening

START_TIMEOUT_S = 30.0
START_POLL_S = 0.005
STOP_TIMEOUT_S = 5.0
CUT_OFF_TIMEOUT_S = 1.0
NAME = "agent endpoint"  # of the thread
log = logging.getLogger(__name__)


class Endpoint:
    """A server of running episodes for OpenAI clients. Thread-safe.

    Args:
        host: address to listen on.
        port: port; 0 chooses a free one.
        limits: limits of calls.
        codec: of the model.

    Attributes:
        service: answers the calls.
        base_url: address for clients, as `OPENAI_BASE_URL` has it; empty before `start`.
        failure: why the server ended by itself; None while it has not.
    """

    def __init__(self, host: str, port: int, limits: CallLimits, codec: TextCodec) -> None:
        self.host = host
        self.port = port
        self.service = CallService(limits, codec)
        self.base_url = ""
        self.failure: EngineError | None = None
        self._socket: socket.socket | None = None
        self._thread: LoopThread | None = None
        self._serving: asyncio.Task[None] | None = None
        self._is_closing = False
        self._has_ended = threading.Event()

    def start(self) -> None:
        """Starts to listen.

        Raises:
            ImportError: Starlette or uvicorn is not installed.
            OSError: the address cannot be used; names it.
            StalledError: the server does not start.
            EngineError: it ended at once.
        """
        make_server = import_server()
        self._socket = self._listen()
        shown = f"[{self.host}]" if ":" in self.host else self.host
        self.base_url = f"http://{shown}:{self._socket.getsockname()[1]}/v1"
        self._thread = LoopThread(NAME)
        start = self._start(make_server(self.service), self._socket)
        self._thread.call(start, START_TIMEOUT_S, "the start of the agents' endpoint")
        if self.failure is not None:
            raise self.failure

    def _listen(self) -> socket.socket:
        try:
            return listening(self.host, self.port)
        except OSError as error:
            raise OSError(
                f"the agents' endpoint cannot listen on EndpointClients.host={self.host!r}, "
                f"EndpointClients.port={self.port}: {error}"
            ) from error

    async def _start(self, server: Any, listening: socket.socket) -> None:
        self._serving = asyncio.ensure_future(self._serve(server, listening))
        while not (server.started or self.failure):
            await asyncio.sleep(START_POLL_S)

    async def _serve(self, server: Any, listening: socket.socket) -> None:
        """Serves until `close` cancels it; any other end is the failure of the engines."""
        reason = "its server has stopped"
        try:
            await server.serve(sockets=[listening])
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            reason = describe(error)
        if not self._is_closing:  # first, so that no agent fails for a connection that is cut off below
            self._fail(EngineError(f"the agents' endpoint has ended: {reason}"))
        try:
            await _cut_off(server, listening)
        finally:
            self._has_ended.set()

    def _fail(self, failure: EngineError) -> None:
        log.error("%s", failure)
        self.failure = failure
        for episode in self.service.episodes:
            episode.fail(failure)

    def close(self) -> None:
        """Ends the server; clients that wait are cut off. Safe to call twice and from any thread but the server's."""
        self._is_closing = True
        if self._thread is not None:
            if self._serving is not None:
                if self.failure is None:
                    self._thread.soon(self._serving.cancel)
                self._has_ended.wait(STOP_TIMEOUT_S)
            self._thread.close()
        if self._socket is not None:
            self._socket.close()


def import_server() -> Callable[[CallService], Any]:
    """Factory of servers, imported when it is needed.

    Raises:
        ImportError: Starlette or uvicorn is not installed.
    """
    try:
        from lit_async_rl.agents.endpoint.app import make_server
    except ImportError as error:
        raise ImportError(f"{MISSING} ({error})") from error
    return make_server


async def _cut_off(server: Any, listening: socket.socket) -> None:
    """Closes the listening socket and all connections, also those accepted but not yet served."""
    if listening.fileno() >= 0:  # else closed by the server itself
        asyncio.get_running_loop().remove_reader(listening)  # accepts no more
    for _ in range(2):
        for connection in list(server.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}  # requests, and connections in the making
        if tasks:
            await asyncio.wait(tasks, timeout=CUT_OFF_TIMEOUT_S)
    # last: a connection in the making whose server is closed stays open, and nobody reads it
    listening.close()
