"""What the trainer and a process of agents say to each other, and how clients there reach the endpoint through it."""

from __future__ import annotations

import asyncio
import importlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lit_async_rl.agents.endpoint.bodies import CHAT, TEXT
from lit_async_rl.agents.endpoint.exchange import ApiResponse
from lit_async_rl.agents.endpoint.openai_clients import EndpointAddress, import_openai

HEADER_BYTES = 8  # the length of a message of the trainer
IDEMPOTENCY_KEY = "idempotency-key"
ATTEMPT = "x-stainless-retry-count"


@dataclass(frozen=True)
class Play:
    """The trainer's message that an episode begins.

    Attributes:
        number: of the episode.
        prompt: pickled, to fail alone.
        address: of its endpoint.
        has_pipe: whether calls to that address may go through the pipe.
    """

    number: int
    prompt: bytes
    address: EndpointAddress
    has_pipe: bool


@dataclass(frozen=True)
class Cancel:
    """The trainer's message that an episode is to be cancelled."""

    number: int


@dataclass(frozen=True)
class Answered:
    """The trainer's answer to a call."""

    number: int
    response: ApiResponse


def pipe_transport(reply: Callable[..., None]) -> Any:
    """A transport of the HTTP library of the `openai` package, whose calls to the endpoint go through the pipe.

    Args:
        reply: says something to the trainer.
    """
    # httpx, or what has followed it
    httpx = importlib.import_module(import_openai().DefaultAsyncHttpxClient.__mro__[1].__module__.partition(".")[0])

    class PipeTransport(httpx.AsyncBaseTransport):  # type: ignore[misc, name-defined]
        """See `pipe_transport`. What is no call to the endpoint goes over HTTP.

        Attributes:
            addresses: base URLs of endpoints in the trainer.
        """

        def __init__(self) -> None:
            self.addresses: set[str] = set()
            self._http = httpx.AsyncHTTPTransport(verify=False, trust_env=False)
            self._numbers = itertools.count()
            self._waiting: dict[int, asyncio.Future[ApiResponse]] = {}

        def take(self, answer: Answered) -> None:
            """Files an answer."""
            waiting = self._waiting.get(answer.number)
            if waiting is not None and not waiting.done():
                waiting.set_result(answer.response)

        async def handle_async_request(self, request: Any) -> Any:
            """Sends a request, and waits for its response."""
            at = f"{request.url.scheme}://{request.url.netloc.decode()}/v1"
            if request.method != "POST" or request.url.path not in (CHAT, TEXT) or at not in self.addresses:
                return await self._http.handle_async_request(request)
            body = await request.aread()
            headers = request.headers
            number = next(self._numbers)
            answer = asyncio.get_running_loop().create_future()
            self._waiting[number] = answer
            reply(
                {
                    "call": number,
                    "at": at,
                    "path": request.url.path,
                    "authorization": headers.get("authorization"),
                    "attempt": headers.get(ATTEMPT),
                    "idempotency_key": headers.get(IDEMPOTENCY_KEY),
                    "length": len(body),
                },
                body,
            )
            try:
                await asyncio.wait({answer}, timeout=request.extensions.get("timeout", {}).get("read"))
                if not answer.done():
                    raise httpx.ReadTimeout("no answer of the trainer", request=request)
                found = answer.result()
            finally:
                del self._waiting[number]
                if not answer.done():
                    reply({"gone": number})
            headers = {"content-type": found.media_type, **found.headers}
            return httpx.Response(found.status, headers=headers, content=found.body, request=request)

        async def aclose(self) -> None:
            """Closes what goes over HTTP."""
            await self._http.aclose()

    return PipeTransport()
