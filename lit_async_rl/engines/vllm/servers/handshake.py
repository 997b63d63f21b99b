"""Handshake with a vLLM server: checks model, flags, version tags and log-probabilities before it gets requests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import transformers

from lit_async_rl.engines.base import GenerationRequest, Probe, SamplingParams, default_bound
from lit_async_rl.engines.vllm.engine_arguments import difference
from lit_async_rl.engines.vllm.servers.client import GENERATE, ServerClient
from lit_async_rl.engines.vllm.servers.connection import ServerFailure, ServerRefusal, message
from lit_async_rl.engines.vllm.servers.schema import MODELS, WORKER_REPORTS, MalformedAnswer, WorkerReport
from lit_async_rl.errors import EngineError

RETRY_S = 1.0  # between two looks at a server that has not started yet
STARTED_BY = "start it with scripts/serve.py"


@dataclass(frozen=True)
class Expected:
    """Properties that a run asks of every server.

    Attributes:
        model: text configuration that its model must have, see `describe_config`.
        sleeps: whether it will be put to sleep.
    """

    model: Mapping[str, Any]
    sleeps: bool = False


@dataclass(frozen=True)
class Served:
    """Limits and dtype of a server that was accepted.

    Attributes:
        max_model_len: most tokens of prompt and completion.
        dtype: of weights and computation.
    """

    max_model_len: int
    dtype: str


async def wait_for_servers(clients: Iterable[ServerClient], expected: Expected, timeout_s: float) -> Served:
    """Waits until all servers are ready; returns the smallest limit and the coarsest dtype.

    Raises:
        EngineError: a server was not reachable in time, or cannot be used.
    """
    found = await asyncio.gather(*(wait_for_server(client, expected, timeout_s) for client in clients))
    dtype = max((served.dtype for served in found), key=default_bound)
    return Served(min(served.max_model_len for served in found), dtype)


async def wait_for_server(client: ServerClient, expected: Expected, timeout_s: float) -> Served:
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


async def check_server(client: ServerClient, expected: Expected, min_model_len: int = 0) -> Served:
    """Checks a server and returns its limits.

    Args:
        client: the server.
        expected: of it.
        min_model_len: limit that it must have at least: requests of the run may be that long.

    Raises:
        ServerFailure: it is unreachable, or its engine is dead.
        ServerRefusal: it cannot serve this policy.
    """
    limit = client.health_timeout_s
    status, models = await client.ask("GET", "/v1/models", limit)
    try:
        max_model_len = MODELS.parse(models)["data"][0]["max_model_len"] if status == 200 else 0
    except MalformedAnswer as error:
        raise ServerRefusal(f"is not a vLLM server (/v1/models: {error})") from error
    if status != 200:
        raise ServerRefusal(f"is not a vLLM server (/v1/models: {message(status, models)})")
    if max_model_len < min_model_len:
        raise ServerRefusal(
            f"takes only {max_model_len} tokens of prompt and completion, and the run needs {min_model_len}: start it "
            "with the --max-model-len that it had"
        )
    await client.done("GET", "/health", limit)
    if (await client.ask("POST", GENERATE, limit, {}))[0] in (403, 404):  # disabled, or too old
        raise ServerRefusal(
            "has no /inference/v1/generate, and nothing else says which weights sampled which token: "
            f"needs vLLM >= 0.32 and --enable-scale-out; {STARTED_BY}"
        )
    if (await client.ask("GET", "/is_paused", limit))[0] == 404:
        raise ServerRefusal(f"takes no new weights: needs VLLM_SERVER_DEV_MODE=1; {STARTED_BY}")
    reports = await describe_workers(client)
    for report in reports:
        _check_policy(report, expected.model)
        if expected.sleeps and not report["can_sleep"]:
            raise ServerRefusal("cannot sleep, as data.engine.sleep_level asks: needs a GPU and --enable-sleep-mode")
    return Served(max_model_len, reports[0]["dtype"])


async def describe_workers(client: ServerClient) -> list[WorkerReport]:
    """Descriptions of a server's workers.

    Raises:
        ServerFailure: it is unreachable.
        ServerRefusal: they cannot load a policy's weights, or have another version of this package.
    """
    status, answer = await client.ask("POST", "/collective_rpc", client.health_timeout_s, {"method": "describe_policy"})
    if status != 200:
        raise ServerRefusal(
            "cannot load a policy's weights: needs --worker-extension-cls "
            f"lit_async_rl.engines.vllm.worker.WorkerExtension ({message(status, answer)}); {STARTED_BY}"
        )
    try:
        return WORKER_REPORTS.parse(answer)["results"]
    except MalformedAnswer as error:
        raise ServerRefusal(
            f"describes itself otherwise than this version of lit-async-rl does ({error}); install the trainer's there"
        ) from error


def _check_policy(found: WorkerReport, expected: Mapping[str, Any]) -> None:
    is_other_library = found["transformers"] != transformers.__version__
    if problem := difference(found["model"], expected, common_only=is_other_library):
        raise ServerRefusal(f"serves another model: {problem}")
    if found["problems"]:
        raise ServerRefusal(f"was started with {found['problems'][0]}; {STARTED_BY}")


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


async def prove_weights(client: ServerClient, probe: Probe) -> None:
    """Checks that the server gives a fixed token sequence the trainer's log-probabilities.

    Raises:
        ServerFailure: it did not answer.
        ServerRefusal: they differ by more than the precision explains.
    """
    found = await client.score(probe.token_ids, f"{probe.version}-probe")
    dtypes = {report["dtype"] for report in await describe_workers(client)}
    error = probe.error(found)
    bound = default_bound(probe.dtype, *dtypes)
    if not error <= bound:
        raise ServerRefusal(
            f"computes other log-probabilities than the trainer with the weights of version {probe.version}: the mean "
            f"absolute difference over {len(found)} tokens is {error:.2g}, and {'/'.join(sorted(dtypes))} explains "
            f"{bound:g}. Has it another model, or a part that is not computed as in transformers?"
        )
