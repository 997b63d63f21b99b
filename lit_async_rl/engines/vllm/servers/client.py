"""HTTP client of one vLLM server. Every call has a timeout; the caller decides what a failure means."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterable
from typing import Any, TypeVar

try:
    import aiohttp
except ModuleNotFoundError as error:
    reason = "vLLM servers are spoken to with aiohttp: pip install 'lit-async-rl[servers]'"
    raise ModuleNotFoundError(reason, name="aiohttp") from error

from lit_async_rl.engines.base import Completion, GenerationRequest
from lit_async_rl.engines.vllm.requests import end_at_stop, end_fault, sampling_arguments
from lit_async_rl.engines.vllm.servers.answers import (
    GENERATED,
    LOADED,
    LOADING,
    SCORED,
    WEIGHT_INFO,
    MalformedAnswer,
    Schema,
    completions_of,
    excerpt,
    prompt_logprobs,
)
from lit_async_rl.models.stop_strings import StopStrings

LOOK_S = 0.02  # between two looks at whether a server has loaded weights
T = TypeVar("T")
GENERATE = "/inference/v1/generate"
MIB = 2**20
TOKEN_BYTES = 1024  # at most, of a sampled token in an answer
LIKELY_TOKENS = 8  # that fit into as many, with their log-probabilities


class ServerFailure(Exception):
    """The server is unreachable, hung or broken, possibly temporarily; another server can take over."""


class ServerRefusal(Exception):
    """The server answers but cannot be used as configured: wrong key, other model, missing flags."""


class ServerClient:
    """Client of one server.

    Args:
        url: `http://host:port`.
        api_key: sent with every request.
        health_timeout_s: timeout of a health check, which the engine answers, however busy.
        request_timeout_s: timeout of a completion.
        update_timeout_s: timeout of loading weights.
    """

    def __init__(
        self, url: str, api_key: str | None, health_timeout_s: float, request_timeout_s: float, update_timeout_s: float
    ) -> None:
        self.url = url
        self.health_timeout_s, self.request_timeout_s = health_timeout_s, request_timeout_s
        self.update_timeout_s = update_timeout_s
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None
        self.stop_strings: StopStrings | None = None

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
        if self._session is None:  # belongs to the loop that it was made in
            # One connection for each request: uvicorn closes those that were idle, or that brought an error, and may do
            # so just when the next request is under way; on a busy machine it does.
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            self._session = aiohttp.ClientSession(self.url, connector=connector, headers=self._headers)
        options: dict[str, Any] = {"timeout": aiohttp.ClientTimeout(total=timeout_s), "allow_redirects": False}
        found = bytearray()
        try:
            async with self._session.request(method, path, json=body, **options) as answer:
                async for piece in answer.content.iter_any():
                    found += piece
                    if len(found) > max_bytes:
                        raise ServerFailure(f"{_name(path)}: the answer has more than {max_bytes} bytes")
                status = answer.status
        except asyncio.TimeoutError as error:
            raise ServerFailure(f"no answer to {_name(path)} within {timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise ServerFailure(f"cannot be reached ({_reason(error)})") from error
        if status == 401:
            raise ServerRefusal("refuses our API key: see data.engine.api_key_variable")
        return status, bytes(found)

    async def done(self, method: str, path: str, timeout_s: float, body: Any = None, max_bytes: int = MIB) -> bytes:
        """Body of a successful response."""
        status, found = await self.ask(method, path, timeout_s, body, max_bytes)
        if status != 200:
            raise ServerFailure(f"{_name(path)}: {message(status, found)}")
        return found

    async def read(
        self, schema: Schema[T], method: str, path: str, timeout_s: float, body: Any = None, max_bytes: int = MIB
    ) -> T:
        """Validated body of a successful response."""
        found = await self.done(method, path, timeout_s, body, max_bytes)
        try:
            return schema.parse(found)
        except MalformedAnswer as error:
            raise ServerFailure(f"{_name(path)}: malformed answer: {error}") from error

    # -- is it alive --------------------------------------------------------------------------------------------------

    async def probe(self) -> str:
        """Version tag of the server's weights; answered by the engine, not only by the HTTP process.

        Raises:
            ServerFailure: the server is unreachable or hangs.
        """
        return (await self.read(WEIGHT_INFO, "GET", "/weight_info", self.health_timeout_s))["weight_version"]

    # -- work ---------------------------------------------------------------------------------------------------------

    async def generate(
        self, request: GenerationRequest, eos_token_ids: Iterable[int], salt: str, run: str
    ) -> list[Completion]:
        """All samples of a request. Prompts share their KV cache only under the same `salt`.

        Raises:
            ServerFailure: the samples were not finished, are not what was asked for, or come from weights that another
                client loaded.
            ServerRefusal: the server does not support the request.
        """
        eos_token_ids = tuple(eos_token_ids)
        body = {
            "token_ids": list(request.prompt_ids),
            "sampling_params": sampling_arguments(request, eos_token_ids) | {"ignore_eos": True},  # the server's own
            "cache_salt": salt,
        }
        num_tokens = request.num_samples * request.sampling.max_tokens
        limit = MIB + num_tokens * TOKEN_BYTES * (1 + (request.sampling.head or 0) // LIKELY_TOKENS)
        status, answer = await self.ask("POST", GENERATE, self.request_timeout_s, body, limit)
        if 400 <= status < 500:
            raise ServerRefusal(f"cannot do request {request.id}: {message(status, answer)}")
        if status != 200:
            raise ServerFailure(f"{GENERATE}: {message(status, answer)}")
        try:
            completions = completions_of(GENERATED.parse(answer), request, run)
        except MalformedAnswer as error:
            raise ServerFailure(f"{GENERATE}: malformed answer to request {request.id}: {error}") from error
        for completion in completions:  # before an end is cut off
            if fault := end_fault(completion, request, eos_token_ids):
                raise ServerFailure(f"sample {completion.sample_index} of request {request.id} {fault}")
        return [end_at_stop(completion, request, self.stop_strings) for completion in completions]

    async def preload(self, folder: str) -> None:
        """Loads the weights in `folder` while the server generates with the old ones, for `load(folder=None)`.

        Raises:
            ServerFailure: loading failed; the server still generates with the old weights.
        """
        await self._call_workers(LOADED, "begin_policy_weights", folder=folder)
        deadline = asyncio.get_running_loop().time() + self.update_timeout_s
        while True:
            states = await self._call_workers(LOADING, "policy_weights_state")
            if all(state["loaded"] for state in states["results"]):
                return
            if asyncio.get_running_loop().time() > deadline:
                raise ServerFailure(f"did not load weights within {self.update_timeout_s:g} s")
            await asyncio.sleep(LOOK_S)

    async def _call_workers(self, schema: Schema[T], method: str, **kwargs: Any) -> T:
        """The answers of the server's workers to a call."""
        body = {"method": method, "kwargs": kwargs}
        call = self.read(schema, "POST", "/collective_rpc", self.update_timeout_s, body)
        found: T = await self._while_listening(call)
        return found

    async def score(self, token_ids: tuple[int, ...], salt: str) -> list[float]:
        """Log-probabilities of a token sequence, of all tokens but the first, at temperature 1.

        Raises:
            ServerFailure: it did not answer, or not with log-probabilities.
        """
        params = {"n": 1, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, "detokenize": False}
        body = {"token_ids": list(token_ids), "sampling_params": params, "cache_salt": salt}
        limit = MIB + len(token_ids) * TOKEN_BYTES
        answer = await self.read(SCORED, "POST", GENERATE, self.health_timeout_s, body, limit)
        try:
            return prompt_logprobs(answer, token_ids)
        except MalformedAnswer as error:
            raise ServerFailure(f"{GENERATE}: malformed answer: {error}") from error

    async def load(self, folder: str | None, tag: str, clear_cache: bool, abort: bool) -> float:
        """Loads the weights in `folder` on the server; returns the seconds without generation.

        After an error the weights may be mixed and must not be used; the next call loads all of them again.

        Args:
            folder: safetensors files, as seen by the server's machine; None: those that were loaded by `preload`.
            tag: version tag of tokens sampled from then on.
            clear_cache: running requests recompute their KV cache.
            abort: aborts all running requests, of other clients too.

        Raises:
            ServerFailure: loading failed.
        """
        clock, began = asyncio.get_running_loop().time, asyncio.get_running_loop().time()
        query = f"mode={'abort' if abort else 'keep'}&clear_cache={str(clear_cache or abort).lower()}"
        await self.done("POST", f"/pause?{query}", self.health_timeout_s)
        if folder is None:
            await self._call_workers(LOADED, "swap_policy_weights")
        else:
            await self._call_workers(LOADED, "load_policy_weights", folder=folder)
        await self.done("POST", "/update_weight_version", self.health_timeout_s, {"new_version": tag})
        await self.done("POST", "/resume", self.health_timeout_s)
        return clock() - began

    async def _while_listening(self, work: Any) -> Any:
        """Result of `work`, awaited as long as the server accepts connections; loading may take minutes."""
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait({task}, timeout=self.health_timeout_s))[0]:
                await self.done("GET", "/health", self.health_timeout_s)
            return task.result()
        finally:
            task.cancel()


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
    """Why a connection failed, without the address, which messages name anyway."""
    cause: Any = getattr(error, "os_error", error)
    number = getattr(cause, "errno", None)
    known = os.strerror(number) if isinstance(number, int) and number > 0 else getattr(cause, "strerror", None)
    return known or str(error) or type(error).__name__
