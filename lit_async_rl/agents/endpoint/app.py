"""Routes of the endpoint, and their server. The only file that imports Starlette and uvicorn."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from lit_async_rl.agents.endpoint.bodies import CHAT, TEXT
from lit_async_rl.agents.endpoint.errors import INVALID_REQUEST, ApiError
from lit_async_rl.errors import describe

KEEP_ALIVE_S = 75  # longer than clients keep their connections, so that none is closed as it is used
SERVER_ERROR = "server_error"
TOO_MANY = 429
CLIENT_GONE = 499  # nobody reads it
log = logging.getLogger(__name__)


@runtime_checkable
class Answering(Protocol):
    """What the routes ask of an endpoint. All methods raise `ApiError`."""

    async def answer(self, request: Request) -> tuple[bytes, bool] | None:
        """Answer to a call, and whether it is a stream; None if the client has gone."""

    def session(self, authorization: str | None) -> object:
        """Checks the key of a request."""

    def models(self) -> list[dict[str, Any]]:
        """The models."""


def make_app(endpoint: Answering) -> Starlette:
    """The routes of an endpoint."""

    async def complete(request: Request) -> Response:
        try:
            answer = await endpoint.answer(request)
        except ApiError:
            raise
        except Exception as error:
            return await _failed(request, error)
        if answer is None:
            return Response(status_code=CLIENT_GONE)
        body, is_stream = answer
        if is_stream:
            return Response(body, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        return Response(body, media_type="application/json")

    async def models(request: Request) -> Response:
        endpoint.session(request.headers.get("authorization"))
        return JSONResponse({"object": "list", "data": endpoint.models()})

    async def model(request: Request) -> Response:
        endpoint.session(request.headers.get("authorization"))
        name = request.path_params["name"]
        for known in endpoint.models():
            if known["id"] == name:
                return JSONResponse(known)
        raise ApiError(404, f"The model {name[:200]!r} does not exist", param="model", code="model_not_found")

    routes = [
        Route(CHAT, complete, methods=["POST"]),
        Route(TEXT, complete, methods=["POST"]),
        Route("/v1/models", models, methods=["GET"]),
        Route("/v1/models/{name:path}", model, methods=["GET"]),
    ]
    return Starlette(routes=routes, exception_handlers={ApiError: _refuse, HTTPException: _not_found})


# coroutines, although they wait for nothing: other handlers would run in a thread, and be cancelled with the server
async def _refuse(request: Request, error: Exception) -> Response:
    if not isinstance(error, ApiError):
        raise error
    # the official client tries 429 again, which would be refused again
    headers = {"x-should-retry": "false"} if error.status == TOO_MANY else None
    return JSONResponse(error.body, status_code=error.status, headers=headers)


async def _not_found(request: Request, error: Exception) -> Response:
    """404 and 405, which Starlette raises."""
    status = error.status_code if isinstance(error, HTTPException) else 404
    found = ApiError(
        status,
        f"Unknown request URL: {request.method} {request.url.path[:200]}; the endpoint has POST {CHAT}, POST {TEXT} "
        "and GET /v1/models",
        code="unknown_url",
        kind=INVALID_REQUEST,
    )
    return await _refuse(request, found)


async def _failed(request: Request, error: Exception) -> Response:
    """500, which clients try again."""
    log.warning("the agents' endpoint failed to answer %s: %s", request.url.path, describe(error))
    return await _refuse(request, ApiError(500, describe(error)[:500], code=SERVER_ERROR, kind=SERVER_ERROR))


class EndpointServer(uvicorn.Server):
    """A server that can be cancelled.

    Args:
        config: of uvicorn.
        report: called when the server listens.
    """

    def __init__(self, config: uvicorn.Config, report: Callable[[], None]) -> None:
        super().__init__(config)
        self._report = report

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started:
            self._report()

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serves until it is cancelled; then no socket is left open, and no client waits."""
        try:
            await super().serve(sockets=sockets)
        finally:
            for server in getattr(self, "servers", ()):
                server.close()
            for open_socket in sockets or ():
                open_socket.close()
            for connection in list(self.server_state.connections):
                if connection.transport is not None:
                    connection.transport.abort()


def make_server(endpoint: Answering, report: Callable[[], None]) -> EndpointServer:
    """A server of the routes, not started."""
    config = uvicorn.Config(
        make_app(endpoint),
        lifespan="off",
        log_config=None,
        log_level="error",  # not of what clients send
        access_log=False,
        server_header=False,
        proxy_headers=False,  # nobody stands in between
        timeout_keep_alive=KEEP_ALIVE_S,
        ws="none",
    )
    return EndpointServer(config, report)
