"""Starts a vLLM server for `VLLMServerEngine`: replaces this process by it, with the flags and variables it needs."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from omegaconf import OmegaConf

from lit_async_rl.engines.vllm.engine_arguments import (
    CPU_VARIABLES,
    DIE_WITH_PARENT,
    VARIABLES,
    check_vllm,
    is_cpu_build,
)
from lit_async_rl.engines.vllm.scheduler import SCHEDULER
from lit_async_rl.engines.vllm.weight_transfer import EXTENSION
from lit_async_rl.errors import SetupError
from lit_async_rl.models.loading import base_of
from lit_async_rl.utils.checks import OneLineParser, check_range
from lit_async_rl.utils.config_files import load_config
from lit_async_rl.utils.processes import die_with_parent

_ON_A_CPU = CPU_VARIABLES | {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}  # GiB
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def main(args: Sequence[str] | None = None) -> None:
    """Checks arguments and installation, then replaces this process by vLLM."""
    parser = OneLineParser(
        prog="lit-async-rl serve",
        description=__doc__,
        epilog="Other options are vLLM's, such as --tensor-parallel-size 2 or --max-num-seqs 512.",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", help="Hugging Face folder or name")
    what.add_argument("--config", help="training configuration: serves its model.model")
    host_help = "address to listen at; any but loopback needs an API key in the environment variable VLLM_API_KEY"
    parser.add_argument("--host", default="127.0.0.1", help=host_help)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--dtype", default="auto", help="of weights and computation")
    parser.add_argument("--die_with_parent", action="store_true", help="end as soon as the parent process is gone")
    known, others = parser.parse_known_args(args)
    try:
        model = base_of(known.model or model_of(known.config))  # an adapter's change comes with the first weights
        has_key = bool(os.environ.get("VLLM_API_KEY"))
        check_address(known.host, known.port, has_key)
        check_vllm(needed_by="scripts/serve.py")
    except (ValueError, OSError, ModuleNotFoundError, SetupError) as error:
        sys.exit(f"error: {error}")
    if known.die_with_parent and not die_with_parent(os.getppid()):
        sys.exit("the parent process is gone")
    command = [
        sys.executable,
        *server_arguments(model, known.host, known.port, dtype=known.dtype, has_key=has_key),
        *others,
    ]
    os.execve(sys.executable, command, server_environment(os.environ, is_cpu_build()))


def model_of(config: str) -> str:
    """`model.model` of a training configuration.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it does not name a model.
    """
    model = OmegaConf.select(OmegaConf.create(load_config(Path(config))), "model.model")
    if not isinstance(model, str):
        raise ValueError(f"--config {config}: model.model is not set")
    return model


def server_arguments(model: str, host: str, port: int, dtype: str, has_key: bool) -> list[str]:
    """Command line of the server, without the interpreter."""
    return [
        *("-m", "vllm.entrypoints.openai.api_server"),  # the command `vllm serve` of the CPU package is broken
        *("--model", model, "--host", host, "--port", str(port), "--dtype", dtype),
        "--enable-scale-out",  # /inference/v1/generate, which tags tokens with versions
        *("--logprobs-mode", "processed_logprobs"),  # those that were sampled from
        *("--max-logprobs", "-1"),  # as many as data.sampling.head asks for
        *("--scheduler-cls", SCHEDULER),  # reads nothing from the KV cache of older weights
        *("--worker-extension-cls", EXTENSION),  # loads the trainer's weights
        *("--load-format", "dummy"),  # which come before the first request
        *("--generation-config", "vllm"),  # the trainer alone says how to sample
        "--disable-uvicorn-access-log",
        *(("--middleware", "lit_async_rl.engines.vllm.api_key.RequireKey") if has_key else ()),
        *(("--enforce-eager",) if is_cpu_build() else ()),
    ]


def server_environment(before: Mapping[str, str], is_cpu: bool) -> dict[str, str]:
    """Environment of the server; variables set by the user are kept."""
    defaults = VARIABLES | (_ON_A_CPU if is_cpu else {})
    needed = {"VLLM_SERVER_DEV_MODE": "1"} | DIE_WITH_PARENT  # weight updates; no orphans
    return {**defaults, **before, **needed}


def check_address(host: str, port: int, has_key: bool) -> None:
    """Refuses an address in use, and one that others can reach without an API key.

    Raises:
        ValueError: names the address and the reason.
    """
    if host not in LOOPBACK and not has_key:
        raise ValueError(
            f"--host {host} can be reached by others, who could read and change everything: set VLLM_API_KEY, here and "
            "for the trainer"
        )
    check_range("", "integer in [1, 65535]", port=port)
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise ValueError(f"--host {host} cannot be used: {error.strerror}") from error
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise ValueError(f"--host {host} --port {port} cannot be used: {error.strerror}") from error
