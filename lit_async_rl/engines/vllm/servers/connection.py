"""HTTP connection to one vLLM server. Every call has a timeout; what it answers is validated."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import aiohttp
elif importlib.util.find_spec("aiohttp") is None:
    raise ModuleNotFoundError(
        "vLLM servers are spoken to with aiohttp: pip install 'lit-async-rl[servers]'", name="aiohttp"
    )

from lit_async_rl.engines.vllm.servers.schema import MalformedAnswer, Schema, excerpt

T = TypeVar("T")
MIB = 2**20


class ServerFailure(Exception):
    """The server is unreachable, hung or broken, possibly temporarily; another server can take over."""


class ServerRefusal(Exception):
    """The server answers but cannot be used as configured: wrong key, other model, missing flags."""


class ServerConnection:
    """Connection to one server.

    Args:
        url: `http://host:port`.
        api_key: sent with every request.
    """

    def __init__(self, url: str, api_key: str | None) -> None:
        self.url = url
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Closes the connections, which makes the server abort our requests."""
        if self._session is not None:
            await self._session.close()

    async def ask(
        self, method: str, path: str, timeout_s: float, body: Any = None, max_bytes: int = MIB
    ) -> tuple[int, bytes]:
        """Status and body of a response.

        Raises:
            ServerFailure: there was no response, or one of more than `max_bytes`.
            ServerRefusal: the key is wrong.
        """
        import aiohttp  # a tenth of a second, which runs without servers need not wait

        if self._session is None:  # belongs to the loop that it was made in
            # One connection for each request: uvicorn closes those that were idle, or that brought an error, and may do
            # so just when the next request is under way; on a busy machine it does.
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            self._session = aiohttp.ClientSession(self.url, connector=connector, headers=self._headers)
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        found = bytearray()
        try:
            async with self._session.request(method, path, json=body, timeout=timeout, allow_redirects=False) as answer:
                async for piece in answer.content.iter_any():
                    found += piece
                    if len(found) > max_bytes:
                        raise ServerFailure(f"{_name(path)}: the answer has more than {max_bytes} bytes")
                status = answer.status
        except asyncio.TimeoutError as error:
            raise ServerFailure(f"no answer to {_name(path)} within {timeout_s:g} s") from error
        except (aiohttp.ClientResponseError, aiohttp.ClientPayloadError, ValueError) as error:
            raise ServerFailure(f"{_name(path)}: the answer is broken HTTP ({_reason(error)})") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ServerFailure(f"cannot be reached ({_reason(error)})") from error
        if status == 401:
            raise ServerRefusal("refuses our API key: see data.engine.api_key_variable")
        return status, bytes(found)

    async def done(self, method: str, path: str, timeout_s: float, body: Any = None, max_bytes: int = MIB) -> bytes:
        """Body of a successful response."""
        status, found = await self.ask(method, path, timeout_s, body=body, max_bytes=max_bytes)
        if status != 200:
            raise ServerFailure(f"{_name(path)}: {message(status, found)}")
        return found

    async def read(
        self, schema: Schema[T], method: str, path: str, timeout_s: float, body: Any = None, max_bytes: int = MIB
    ) -> T:
        """Validated body of a successful response."""
        found = await self.done(method, path, timeout_s, body=body, max_bytes=max_bytes)
        try:
            return schema.parse(found)
        except MalformedAnswer as error:
            raise ServerFailure(f"{_name(path)}: malformed answer: {error}") from error


def message(status: int, body: bytes) -> str:
    """Error message of a response, on one line: vLLM's own, or the beginning of what came instead."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        found = None
    for name in ("error", "detail", "message"):
        found = found.get(name, found) if isinstance(found, dict) else found
    text = " ".join(found.split())[:300] if isinstance(found, str) else excerpt(body)
    return f"HTTP {status} {text}"


def _name(path: str) -> str:
    return path.partition("?")[0]


def _reason(error: Exception) -> str:
    """Why a connection failed, on one line, without the address, which messages name anyway."""
    cause: Any = getattr(error, "os_error", error)
    number = getattr(cause, "errno", None)
    known = os.strerror(number) if isinstance(number, int) and number > 0 else getattr(cause, "strerror", None)
    text = known or getattr(error, "message", None) or str(error)
    return " ".join(str(text).split())[:200] or type(error).__name__
