"""How a client of the official package reaches an endpoint without a socket.

HTTP takes more processor time than all else in a short call. An agent's client therefore has a transport of the
package's own HTTP library that hands requests on as they are.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Awaitable, Callable
from typing import Any

from lit_async_rl.agents.api.exchange import ApiRequest, ApiResponse
from lit_async_rl.agents.api.openai_clients import import_openai


def transport_to(ask: Callable[[ApiRequest], Awaitable[ApiResponse]]) -> Any:
    """A transport for the HTTP client of the `openai` package.

    Args:
        ask: gets the answer to a request; cancelled when the client no longer waits.
    """
    # httpx, or what has followed it
    httpx = importlib.import_module(import_openai().DefaultAsyncHttpxClient.__mro__[1].__module__.partition(".")[0])

    class Transport(httpx.AsyncBaseTransport):  # type: ignore[misc, name-defined]
        """See `transport_to`."""

        async def handle_async_request(self, request: Any) -> Any:
            """Sends a request, and waits for its response."""
            body = await request.aread()
            call = ApiRequest(method=request.method, path=request.url.path, body=body, headers=request.headers)
            task = asyncio.ensure_future(ask(call))
            try:
                await asyncio.wait({task}, timeout=request.extensions.get("timeout", {}).get("read"))
                if not task.done():
                    raise httpx.ReadTimeout("no answer of the endpoint", request=request)
            except BaseException:
                if not task.cancel():  # the answer came in the moment in which its client went
                    _lose(task)
                raise
            answer = task.result()
            headers = {"content-type": answer.media_type, **answer.headers}
            return httpx.Response(answer.status, headers=headers, content=answer.body, request=request)

    return Transport()


def _lose(task: asyncio.Future[ApiResponse]) -> None:
    lose = None if task.cancelled() or task.exception() is not None else task.result().lose
    if lose is not None:
        lose()
