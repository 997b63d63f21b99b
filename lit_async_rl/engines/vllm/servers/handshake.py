"""Handshake with a vLLM server: checks model, flags and version tags before it gets requests."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from lit_async_rl.engines.base import GenerationRequest, SamplingParams
from lit_async_rl.engines.vllm.servers.client import ServerClient, ServerFailure, ServerRefusal, message
from lit_async_rl.errors import EngineError

RETRY_S = 1.0  # between two looks at a server that has not started yet
STARTED_BY = "start it with scripts/serve.py"


async def wait_for_server(client: ServerClient, expected: Mapping[str, Any], timeout_s: float) -> int:
    """Result of `check_server` as soon as the server is reachable.

    Raises:
        EngineError: it was not reachable in time, or cannot be used.
    """
    deadline = asyncio.get_running_loop().time() + timeout_s
    while True:
        try:
            return await check_server(client, expected)
        except ServerRefusal as error:
            raise EngineError(f"vLLM server {client.url} {error}") from error
        except ServerFailure as error:
            if asyncio.get_running_loop().time() + RETRY_S > deadline:
                waited = f"waited data.engine.startup_timeout_s={timeout_s:g} for it"
                raise EngineError(f"vLLM server {client.url} {error}; {waited}") from error
        await asyncio.sleep(RETRY_S)


async def check_server(client: ServerClient, expected: Mapping[str, Any]) -> int:
    """Checks a server and returns its limit on prompt and completion tokens.

    Args:
        client: the server.
        expected: fields of the transformers configuration that its model must have.

    Raises:
        ServerFailure: it is unreachable, or its engine is dead.
        ServerRefusal: it cannot serve this policy.
    """
    limit = client.health_timeout_s
    status, models = await client.ask("GET", "/v1/models", limit)
    if status != 200 or not isinstance(models, dict) or not models.get("data"):
        raise ServerRefusal(f"is not a vLLM server (/v1/models: {message(status, models)})")
    await client.done("GET", "/health", limit)
    if (await client.ask("POST", "/inference/v1/generate", limit, {}))[0] in (403, 404):  # disabled, or too old
        raise ServerRefusal(
            "has no /inference/v1/generate, and nothing else says which weights sampled which token: "
            f"needs vLLM >= 0.32 and --enable-scale-out; {STARTED_BY}"
        )
    if (await client.ask("GET", "/is_paused", limit))[0] == 404:
        raise ServerRefusal(f"takes no new weights: needs VLLM_SERVER_DEV_MODE=1; {STARTED_BY}")
    status, answer = await client.ask("POST", "/collective_rpc", limit, {"method": "describe_policy"})
    if status != 200:
        raise ServerRefusal(
            "cannot load a policy's weights: needs --worker-extension-cls "
            f"lit_async_rl.engines.vllm.worker.WorkerExtension ({message(status, answer)}); {STARTED_BY}"
        )
    _check_policy(answer["results"][0], expected)
    return int(models["data"][0]["max_model_len"])


def _check_policy(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    for name, value in expected.items():
        if found["model"][name] != value:
            raise ServerRefusal(f"serves another model: its {name} is {found['model'][name]!r}, ours {value!r}")
    if found["logprobs_mode"] != "processed_logprobs":
        raise ServerRefusal(
            f"reports {found['logprobs_mode']}, not the log-probabilities that were sampled from: needs "
            f"--logprobs-mode processed_logprobs; {STARTED_BY}"
        )


async def prove_version(client: ServerClient, run: str, version: int) -> None:
    """Samples a token and checks that it is tagged with this version.

    Raises:
        ServerFailure: no token was sampled.
        ServerRefusal: it has another tag, or none.
    """
    request = GenerationRequest(id=-1, prompt_ids=(0,), num_samples=1, sampling=SamplingParams(max_tokens=1))
    try:
        sampling = client.generate(request, (), f"{run}-{version}-proof", run)
        (completion,) = await asyncio.wait_for(sampling, client.health_timeout_s)
    except asyncio.TimeoutError as error:
        raise ServerFailure(f"generated nothing within {client.health_timeout_s:g} s") from error
    if completion.versions != (version,):
        raise ServerRefusal(f"tags new tokens with versions {completion.versions}, not {version}")
