"""The endpoint over HTTP. The only file that imports Starlette and uvicorn."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, TypeVar

import uvicorn
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from lit_async_rl.agents.api.errors import response_of
from lit_async_rl.agents.api.exchange import ApiRequest, ApiResponse
from lit_async_rl.agents.api.service import CallService
from lit_async_rl.agents.calls import AgentCallError

KEEP_ALIVE_S = 75  # longer than clients keep their connections, so that none is closed as it is used
HEAD_TIMEOUT_S = 60.0  # from a connection, or the first byte of a request, to the end of its head
MAX_HEAD_BYTES = 2**16
TCP_CLOSE = 7  # linux/tcp.h, state of a connection that was reset
BODY_TIMEOUT_S = 60.0  # from the head of a request to the end of its body
CLIENT_GONE = 499  # nobody reads it
T = TypeVar("T")


def make_app(service: CallService) -> ASGIApp:
    """ASGI application that serves a service over HTTP."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            answer = await _answer(request, service)
        except AgentCallError as error:
            answer = response_of(error)
        connection = scope.get("extensions", {}).get(CONNECTION)
        if connection is not None and answer is not None:
            connection.lose = answer.lose
        await _sent(answer)(scope, receive, send)

    return app


async def _answer(request: Request, service: CallService) -> ApiResponse | None:
    """The answer to a request; None if the client has gone."""
    call = ApiRequest(method=request.method, path=request.scope["path"], body=b"", headers=request.headers)
    service.session(call)  # before its body is read
    try:
        body = await asyncio.wait_for(_read_body(request, service), BODY_TIMEOUT_S)
    except ClientDisconnect:
        return None
    except asyncio.TimeoutError:
        raise AgentCallError(f"the body did not arrive within {BODY_TIMEOUT_S:g} s", "timeout", status=408) from None
    call = replace(call, body=body)
    return await _unless_gone(lambda has_gone: service.respond(call, has_gone), request)


def _sent(answer: ApiResponse | None) -> Response:
    if answer is None:
        return Response(status_code=CLIENT_GONE)
    return Response(
        answer.body, status_code=answer.status, media_type=answer.media_type, headers=dict(answer.headers) or None
    )


async def _read_body(request: Request, service: CallService) -> bytes:
    """The body, refused if it is too long."""
    parts: list[bytes] = []
    length = 0
    async for part in request.stream():
        length += len(part)
        if length > service.limits.max_body_bytes:
            raise service.too_long
        parts.append(part)
    return b"".join(parts)


async def _unless_gone(work: Callable[[Callable[[], bool]], Awaitable[T]], request: Request) -> T | None:
    """Result of the work, which may ask whether the client has gone; None if it goes first, cancelling the work."""
    gone = asyncio.ensure_future(request.receive())  # after the body there is but the client's end to receive
    task = asyncio.ensure_future(work(gone.done))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return None if gone.done() else task.result()
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
        elif not task.cancelled():
            task.exception()  # was raised above, or nobody waits for it


CONNECTION = "lit_async_rl.connection"  # in a request's extensions
HttpProtocol: Any = AutoHTTPProtocol  # httptools', or h11's where that is missing, which has limits of its own


class Connection(HttpProtocol):
    """A connection of uvicorn with limits of a request's head; its parser, httptools, has none.

    Attributes:
        lose: of the last answer, see `ApiResponse`; called when the client resets the connection before it says more,
            as the kernel does for one that closes it with an unread answer.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.lose: Callable[[], None] | None = None
        self._is_in_head = False
        self._num_bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_in_head:
            self._num_bytes += len(data)
            if self._num_bytes > MAX_HEAD_BYTES:
                self.send_400_response(f"The head of a request must have at most {MAX_HEAD_BYTES} bytes.")
        if self._is_in_head or self.cycle is None or self.cycle.response_complete:
            self._await_head()

    def on_message_begin(self) -> None:  # by httptools, likewise the next
        super().on_message_begin()
        self.scope["extensions"] = {CONNECTION: self}
        self.lose = None  # a client that goes on has its answer
        self._is_in_head = True
        self._num_bytes = 0

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._end_timer()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_timer()
        if self.lose is not None and (exc is not None or _is_reset(self.transport)):
            self.lose()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.abort)

    def _end_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _is_reset(transport: asyncio.Transport) -> bool:
    """Whether the other side has reset a connection, even if only its end was read."""
    if not sys.platform.startswith("linux"):
        return False
    with contextlib.suppress(OSError):
        found: bytes = transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
        return found[0] == TCP_CLOSE
    return False


def make_server(service: CallService) -> uvicorn.Server:
    """A server of the routes, not started."""
    config = uvicorn.Config(
        make_app(service),
        http=Connection,
        lifespan="off",
        log_config=None,
        log_level="error",  # not of what clients send
        access_log=False,
        server_header=False,
        proxy_headers=False,  # nobody stands in between
        timeout_keep_alive=KEEP_ALIVE_S,
        ws="none",
    )
    return uvicorn.Server(config)
