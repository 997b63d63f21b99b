"""Properties of a loaded model's architecture: its context length, layers other than attention, and stored buffers."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

# settings of configurations beyond whose number of tokens some layers do not attend to all of them
WINDOWS = ("sliding_window", "attention_window_size", "sliding_window_size", "attention_chunk_size", "index_topk")


def body(lm: PreTrainedModel) -> nn.Module:
    """The model below the output head, also where `base_model_prefix` names no part of it (Llama 4, Mllama)."""
    base: nn.Module = lm.base_model
    return getattr(lm, "model", lm) if base is lm else base


def context_length(lm: PreTrainedModel) -> int:
    """Context length of a model, see `configured_length`."""
    return configured_length(lm.config)


def configured_length(of_model: PreTrainedConfig) -> int:
    """Context length in tokens: positions, the shortest attention window, or `rotary_length`, whichever is least."""
    config = of_model.get_text_config()
    length = min(getattr(config, "max_position_embeddings", None) or 2**20, rotary_length(config) or 2**20)
    names = WINDOWS if getattr(config, "use_sliding_window", True) else ()
    windows = [getattr(config, name, None) for name in names]
    if "local" in getattr(config, "attention_layers", ()):  # GPT-Neo; other families have a window of another kind
        windows.append(config.window_size)
    return min(length, *(window or length for window in windows), length)


def rotary_length(of_model: PreTrainedConfig) -> int | None:
    """Tokens from which on all positions are rotated by other frequencies; None if they are the same at any length.

    transformers chooses them by the longest row of a forward pass (`longrope` of Phi-3 and Phi-4-mini, `dynamic`).
    Beyond this number, short rows beside a long one would change, and so would keys that a cache holds.
    """
    config = of_model.get_text_config()
    parameters = getattr(config, "rope_parameters", None) or {}
    limits = []
    for each in [parameters] if "rope_type" in parameters else parameters.values():  # or of each kind of layer
        kind = each.get("rope_type") if isinstance(each, dict) else None
        if kind == "longrope":
            limits.append(each["original_max_position_embeddings"])
        elif kind == "dynamic":
            limits.append(config.max_position_embeddings)
    return min(limits, default=None)


def other_layers(lm: PreTrainedModel) -> str:
    """Kinds of layers that are neither full nor sliding attention, as the configuration calls them; empty if none."""
    kinds = set(getattr(lm.config.get_text_config(), "layer_types", None) or ())
    others = sorted(kinds - {"full_attention", "sliding_attention"})
    return ", ".join(others) or ("recurrent" if lm._is_stateful else "")


def stored_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, buffer) of buffers that belong to a model's weights: files hold them, and no gradient changes them.

    Scales of Gemma 4's layers, biases of the routers of DeepSeek, GLM and others.
    """
    for prefix, part in module.named_modules():
        for name, buffer in part.named_buffers(recurse=False):
            if name not in part._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer
