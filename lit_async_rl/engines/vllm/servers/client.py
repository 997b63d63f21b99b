"""Calls to one vLLM server. Every call has a timeout; the caller decides what a failure means."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, TypeVar

from lit_async_rl.engines.base import Completion, GenerationRequest
from lit_async_rl.engines.vllm.requests import end_at_stop, end_fault, sampling_arguments
from lit_async_rl.engines.vllm.servers.answers import completions_of, prompt_logprobs
from lit_async_rl.engines.vllm.servers.connection import MIB, ServerConnection, ServerFailure, ServerRefusal, message
from lit_async_rl.engines.vllm.servers.schema import (
    GENERATED,
    LOADED,
    LOADING,
    SCORED,
    SLEEPING,
    WEIGHT_INFO,
    MalformedAnswer,
    Schema,
)
from lit_async_rl.models.tokenizer import StopStrings

LOOK_S = 0.02  # between two looks at whether a server has loaded weights
T = TypeVar("T")
GENERATE = "/inference/v1/generate"
TOKEN_BYTES = 1024  # at most, of a sampled token in an answer
LIKELY_TOKENS = 8  # that fit into as many, with their log-probabilities


class ServerClient(ServerConnection):
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
        super().__init__(url, api_key)
        self.health_timeout_s = health_timeout_s
        self.request_timeout_s = request_timeout_s
        self.update_timeout_s = update_timeout_s
        self.stop_strings: StopStrings | None = None
        self._is_asleep = False

    # -- is it alive --------------------------------------------------------------------------------------------------

    async def probe(self) -> str:
        """Version tag of the server's weights; answered by the engine, not only by the HTTP process.

        Raises:
            ServerFailure: the server is unreachable or hangs.
        """
        return (await self.read(WEIGHT_INFO, "GET", "/weight_info", timeout_s=self.health_timeout_s))["weight_version"]

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
            "sampling_params": sampling_arguments(request, eos_token_ids),
            "cache_salt": salt,
        }
        num_tokens = request.num_samples * request.sampling.max_tokens
        limit = MIB + num_tokens * TOKEN_BYTES * (1 + (request.sampling.head or 0) // LIKELY_TOKENS)
        status, answer = await self.ask("POST", GENERATE, self.request_timeout_s, body=body, max_bytes=limit)
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
        call = self.read(schema, "POST", "/collective_rpc", timeout_s=self.update_timeout_s, body=body)
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
        answer = await self.read(SCORED, "POST", GENERATE, timeout_s=self.health_timeout_s, body=body, max_bytes=limit)
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
        clock = asyncio.get_running_loop().time
        began = asyncio.get_running_loop().time()
        query = f"mode={'abort' if abort else 'keep'}&clear_cache={str(clear_cache or abort).lower()}"
        if abort:  # it was away: nobody knows what has been done to it
            self._is_asleep = await self._ask_if_asleep()
        await self.wake("weights")
        await self.done("POST", f"/pause?{query}", self.health_timeout_s)
        if folder is None:
            await self._call_workers(LOADED, "swap_policy_weights")
        else:
            await self._call_workers(LOADED, "load_policy_weights", folder=folder)
        await self.done("POST", "/update_weight_version", self.health_timeout_s, body={"new_version": tag})
        await self.wake("kv_cache")
        await self.done("POST", "/resume", self.health_timeout_s)
        return clock() - began

    async def sleep(self, level: int) -> None:
        """Has the server, which must have no requests, free the memory of its KV cache and weights.

        Raises:
            ServerFailure: it did not.
        """
        self._is_asleep = True
        await self.done("POST", f"/sleep?level={level}&mode=keep", self.update_timeout_s)

    async def wake(self, *tags: str) -> None:
        """Gives a server that sleeps its memory back, or the part named: `weights`, `kv_cache`. It resumes with all.

        Raises:
            ServerFailure: it did not wake up.
        """
        if self._is_asleep:
            query = "&".join(f"tags={tag}" for tag in tags)
            await self.done("POST", "/wake_up" + (f"?{query}" if query else ""), self.update_timeout_s)
            self._is_asleep = tags == ("weights",)

    async def _ask_if_asleep(self) -> bool:
        return (await self.read(SLEEPING, "GET", "/is_sleeping", timeout_s=self.health_timeout_s))["is_sleeping"]

    async def _while_listening(self, work: Any) -> Any:
        """Result of `work`, awaited as long as the server accepts connections; loading may take minutes."""
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait({task}, timeout=self.health_timeout_s))[0]:
                await self.done("GET", "/health", self.health_timeout_s)
            return task.result()
        finally:
            task.cancel()
