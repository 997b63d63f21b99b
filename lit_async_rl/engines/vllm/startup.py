"""Starts vLLM inside a trainer: checks of installation and model, and the environment of its processes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lit_async_rl.engines.vllm.engine_arguments import unusable_settings
from lit_async_rl.engines.vllm.installation import CPU_VARIABLES, DIE_WITH_PARENT, LAUNCHER, VARIABLES, check_vllm
from lit_async_rl.engines.vllm.process import VLLMProcess
from lit_async_rl.models.loading import load_config

CPU_KV_CACHE = 2**30  # bytes; its own choice is most of the memory


def start_vllm(
    arguments: dict[str, Any],
    environment: Mapping[str, str],
    num_threads: int,
    startup_timeout_s: float,
    update_timeout_s: float,
) -> VLLMProcess:
    """Starts vLLM and returns when it accepts requests; on a CPU with the settings it needs there.

    Raises:
        ModuleNotFoundError: vLLM is not installed.
        ValueError: it is too old, cannot run this model on this machine, or `arguments` break a promise.
        FileNotFoundError: there is no such model.
        EngineError: it failed to start.
        StalledError: it did not start within `startup_timeout_s`.
    """
    check_vllm()
    with engine_environment(environment, num_threads):
        if not has_gpu():
            check_head_size(arguments["model"])
            cache = arguments["kv_cache_memory_bytes"] or CPU_KV_CACHE
            arguments = {**arguments, "enforce_eager": True, "kv_cache_memory_bytes": cache}
        process = VLLMProcess(arguments, update_timeout_s)
        process.start(startup_timeout_s)
    if problems := unusable_settings(process.llm.vllm_config):  # set by a name that is not refused beforehand
        process.close()
        raise ValueError(f"data.engine.engine_args cannot be used: {problems[0]}")
    return process


def check_head_size(model: str) -> None:
    """Refuses attention head sizes that vLLM's CPU kernels do not support.

    Raises:
        ValueError: lists the supported sizes.
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
    """Sets the environment that the engine's processes inherit; restores that of the trainer afterwards.

    Variables set by the user are kept, except those of a distributed launcher. vLLM itself also sets variables while it
    starts (LD_PRELOAD, LOCAL_WORLD_SIZE), which other children of the trainer must not inherit.
    """
    before = dict(os.environ)
    try:
        for name in LAUNCHER:
            os.environ.pop(name, None)
        _set_defaults(VARIABLES | DIE_WITH_PARENT)  # before vLLM is imported, which is when it reads some of them
        _set_defaults({"OMP_NUM_THREADS": str(num_threads)} | ({} if has_gpu() else CPU_VARIABLES))
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
