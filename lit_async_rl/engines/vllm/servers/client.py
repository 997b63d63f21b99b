"""HTTP client of one vLLM server. Every call has a timeout; the caller decides what a failure means."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from typing import Any

try:
    import aiohttp
except ModuleNotFoundError as error:
    reason = "vLLM servers are spoken to with aiohttp: pip install 'lit-async-rl[servers]'"
    raise ModuleNotFoundError(reason, name="aiohttp") from error

from lit_async_rl.engines.base import Completion, GenerationRequest
from lit_async_rl.engines.vllm.requests import end_at_stop, sampling_arguments
from lit_async_rl.errors import InvariantError
from lit_async_rl.models.stop_strings import StopStrings

LOOK_S = 0.02  # between two looks at whether a server has loaded weights


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

    async def ask(self, method: str, path: str, timeout_s: float, body: Any = None) -> tuple[int, Any]:
        """Status and decoded body of a response.

        Raises:
            ServerFailure: there was no response.
            ServerRefusal: the key is wrong.
        """
        if self._session is None:  # belongs to the loop that it was made in
            # One connection for each request: uvicorn closes those that were idle, or that brought an error, and may do
            # so just when the next request is under way; on a busy machine it does.
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            self._session = aiohttp.ClientSession(self.url, connector=connector, headers=self._headers)
        try:
            timeout = aiohttp.ClientTimeout(total=timeout_s)
            async with self._session.request(method, path, json=body, timeout=timeout) as answer:
                status, text = answer.status, await answer.text()
        except asyncio.TimeoutError as error:
            raise ServerFailure(f"no answer to {path.partition('?')[0]} within {timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ServerFailure(f"cannot be reached ({error or type(error).__name__})") from error
        if status == 401:
            raise ServerRefusal("refuses our API key: see data.engine.api_key_variable")
        try:
            return status, json.loads(text) if text else None
        except ValueError:
            return status, text

    async def done(self, method: str, path: str, timeout_s: float, body: Any = None) -> Any:
        """Body of a successful response."""
        status, found = await self.ask(method, path, timeout_s, body)
        if status != 200:
            raise ServerFailure(f"{path.partition('?')[0]}: {message(status, found)}")
        return found

    # -- is it alive --------------------------------------------------------------------------------------------------

    async def probe(self) -> str:
        """Version tag of the server's weights; answered by the engine, not only by the HTTP process.

        Raises:
            ServerFailure: the server is unreachable or hangs.
        """
        return str((await self.done("GET", "/weight_info", self.health_timeout_s))["weight_version"])

    # -- work ---------------------------------------------------------------------------------------------------------

    async def generate(
        self, request: GenerationRequest, eos_token_ids: Iterable[int], salt: str, run: str
    ) -> list[Completion]:
        """All samples of a request. Prompts share their KV cache only under the same `salt`.

        Raises:
            ServerFailure: the samples were not finished, or another client changed the weights.
            ServerRefusal: the server does not support the request, or does not tag tokens.
        """
        body = {
            "token_ids": list(request.prompt_ids),
            "sampling_params": sampling_arguments(request, eos_token_ids) | {"ignore_eos": True},  # the server's own
            "cache_salt": salt,
        }
        status, answer = await self.ask("POST", "/inference/v1/generate", self.request_timeout_s, body)
        if 400 <= status < 500:
            raise ServerRefusal(f"cannot do request {request.id}: {message(status, answer)}")
        if status != 200:
            raise ServerFailure(f"/inference/v1/generate: {message(status, answer)}")
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        if request.sampling.temperature == 0:  # sampled once: see `sampling_arguments`
            choices = choices * request.num_samples
        completions = [_completion(request, index, choice, run) for index, choice in enumerate(choices)]
        return [end_at_stop(completion, request, self.stop_strings) for completion in completions]

    async def preload(self, folder: str) -> None:
        """Loads the weights in `folder` while the server generates with the old ones, for `load(folder=None)`.

        Raises:
            ServerFailure: loading failed; the server still generates with the old weights.
        """
        await self._rpc("begin_policy_weights", folder=folder)
        deadline = asyncio.get_running_loop().time() + self.update_timeout_s
        while not all(state["loaded"] for state in await self._rpc("policy_weights_state")):
            if asyncio.get_running_loop().time() > deadline:
                raise ServerFailure(f"did not load weights within {self.update_timeout_s:g} s")
            await asyncio.sleep(LOOK_S)

    async def _rpc(self, method: str, **kwargs: Any) -> Any:
        """What the server's workers answer to a call."""
        body = {"method": method, "kwargs": kwargs}
        call = self.done("POST", "/collective_rpc", self.update_timeout_s, body)
        return (await self._while_listening(call))["results"]

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
        await (self._rpc("load_policy_weights", folder=folder) if folder else self._rpc("swap_policy_weights"))
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


def _completion(request: GenerationRequest, index: int, choice: Mapping[str, Any], run: str) -> Completion:
    if choice["finish_reason"] not in ("stop", "length"):
        raise ServerFailure(f"ended request {request.id} with {choice['finish_reason']!r}")
    if not choice.get("weight_versions"):
        raise ServerRefusal("does not say which weights sampled which token: needs vLLM >= 0.32")
    versions: list[int] = []
    for span in choice["weight_versions"]:
        owner, _, version = span["version"].rpartition("-")
        if owner != run:
            raise ServerFailure(f"sampled from weights tagged {span['version']!r}: does another trainer use it, too?")
        versions += [int(version)] * (span["end"] - span["start"])
    token_ids = choice["token_ids"]
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    if not len(token_ids) == len(logprobs) == len(versions):
        raise InvariantError(f"{len(token_ids)} tokens, {len(logprobs)} log-probabilities, {len(versions)} versions")
    return Completion(
        request_id=request.id,
        sample_index=index,
        token_ids=tuple(token_ids),
        logprobs=tuple(logprobs),
        versions=tuple(versions),
        finish_reason=choice["finish_reason"],
    )


def message(status: int, body: Any) -> str:
    """Error message of a response, on one line."""
    detail = body.get("error", body.get("detail", body)) if isinstance(body, dict) else body
    if isinstance(detail, dict):
        detail = detail.get("message", detail)
    return f"HTTP {status} {' '.join(str(detail).split())[:300]}"
