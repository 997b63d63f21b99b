"""Fields of vLLM's `AsyncEngineArgs` that the engine sets itself, and those that would break what it promises."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lit_async_rl.engines.vllm.scheduler import SCHEDULER

FIXED_ARGUMENTS = {
    "logprobs_mode": "processed_logprobs",  # those that were sampled from, not those of temperature 1
    "max_logprobs": -1,  # as many tokens as data.sampling.head asks for
    "skip_tokenizer_init": True,  # prompts and completions are token ids
    "load_format": "dummy",  # the trainer's weights come before the first request
    "stream_interval": 32,  # tokens after which a sample says how far it is
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
    """Refuses fields that the engine has as settings, and those that break a promise.

    Args:
        engine_args: given by the user.
        settings: fields set by the engine's own settings.

    Raises:
        ValueError: names the field and says why.
    """
    for name, value in engine_args.items():
        why = REFUSED.get(name) or (f"see data.engine.{name}" if name in settings else "")
        if why:
            raise ValueError(f"data.engine.engine_args.{name}={value!r} cannot be set: {why}")


def unusable_settings(config: Any) -> list[str]:
    """Settings of a running vLLM that break a promise, with reasons.

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
