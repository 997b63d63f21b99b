"""How a client of the official package reaches an endpoint without a socket.

HTTP takes more processor time, on both sides, than all else that a short call takes. A client that an agent is given
therefore has a transport of the package's own HTTP library that hands requests on as they are: to the endpoint of this
process, or through the pipe of a process of agents. Whatever else it is asked for goes over HTTP.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

from lit_async_rl.agents.api.bodies import CHAT, TEXT
from lit_async_rl.agents.api.exchange import ATTEMPT, IDEMPOTENCY_KEY, ApiRequest, ApiResponse
from lit_async_rl.agents.endpoint.openai_clients import EndpointAddress, import_openai

MAX_HEADER_CHARS = 1000  # what is longer is refused anyhow, and need not be a line for the pipe


def transport_to(is_there: Callable[[str], bool], ask: Callable[[str, ApiRequest], Awaitable[ApiResponse]]) -> Any:
    """A transport for the HTTP client of the `openai` package.

    Args:
        is_there: whether an address, the base URL of an endpoint, can be asked without a socket.
        ask: gets the answer to a call at such an address; cancelled when the client does not wait any more.
    """
    # httpx, or what has followed it
    httpx = importlib.import_module(import_openai().DefaultAsyncHttpxClient.__mro__[1].__module__.partition(".")[0])

    class Transport(httpx.AsyncBaseTransport):  # type: ignore[misc, name-defined]
        """See `transport_to`."""

        def __init__(self) -> None:
            self._http = httpx.AsyncHTTPTransport(verify=False, trust_env=False)

        async def handle_async_request(self, request: Any) -> Any:
            """Sends a request, and waits for its response."""
            url = request.url
            at = f"{url.scheme}://{url.netloc.decode()}/v1"
            if request.method != "POST" or url.path not in (CHAT, TEXT) or not is_there(at):
                return await self._http.handle_async_request(request)
            call = ApiRequest(
                path=url.path,
                body=await request.aread(),
                authorization=_header(request, "authorization"),
                attempt=_header(request, ATTEMPT),
                idempotency_key=_header(request, IDEMPOTENCY_KEY),
            )
            task = asyncio.ensure_future(ask(at, call))
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

        async def aclose(self) -> None:
            """Closes what goes over HTTP."""
            await self._http.aclose()

    return Transport()


def _lose(task: asyncio.Future[ApiResponse]) -> None:
    lose = None if task.cancelled() or task.exception() is not None else task.result().lose
    if lose is not None:
        lose()


def _header(request: Any, name: str) -> str | None:
    value = request.headers.get(name)
    return None if value is None else str(value)[:MAX_HEADER_CHARS]


# -- the pipe of a process of agents -----------------------------------------------------------------------------------

HEADER_BYTES = 8  # the length of a message of the trainer


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


class PipeCalls:
    """Calls through the pipe, from the side of the agents. Used by one event loop.

    Args:
        say: says something to the trainer: a line of JSON, and a body.

    Attributes:
        addresses: base URLs of endpoints in the trainer.
    """

    def __init__(self, say: Callable[[dict[str, Any], bytes], None]) -> None:
        self.addresses: set[str] = set()
        self._say = say
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[ApiResponse]] = {}

    def take(self, answer: Answered) -> None:
        """Files an answer."""
        waiting = self._waiting.pop(answer.number, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer.response)

    async def ask(self, at: str, call: ApiRequest) -> ApiResponse:
        """The trainer's answer; cancelled, it tells the trainer."""
        number = next(self._numbers)

        def lose() -> None:
            self._say({"gone": number}, b"")

        answer = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        said = {
            "call": number,
            "at": at,
            "path": call.path,
            "authorization": call.authorization,
            "attempt": call.attempt,
            "idempotency_key": call.idempotency_key,
            "length": len(call.body),
        }
        self._say(said, call.body)
        try:
            return replace(await answer, lose=lose)
        except asyncio.CancelledError:
            lose()
            raise
        finally:
            self._waiting.pop(number, None)
