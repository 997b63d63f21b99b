"""Architecture from a model's configuration and modules: context length, kinds of layers, buffers."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

# settings of configurations that limit the number of tokens some layers attend to
WINDOW_SETTINGS = (
    "sliding_window",
    "attention_window_size",
    "sliding_window_size",
    "attention_chunk_size",
    "index_topk",
)


def body(lm: PreTrainedModel) -> nn.Module:
    """The model below the output head, also if `base_model_prefix` names no submodule (Llama 4, Mllama)."""
    base: nn.Module = lm.base_model
    return getattr(lm, "model", lm) if base is lm else base


def is_transformer_block(module: nn.Module) -> bool:
    """Whether the module is a transformer block of a transformers model."""
    return isinstance(module, GradientCheckpointingLayer)


def context_length(lm: PreTrainedModel) -> int:
    """Context length of a model, see `configured_length`."""
    return configured_length(lm.config)


def configured_length(of_model: PreTrainedConfig) -> int:
    """Context length in tokens: the least of positions, attention windows and `rotary_length`."""
    config = of_model.get_text_config()
    length = min(getattr(config, "max_position_embeddings", None) or 2**20, rotary_length(config) or 2**20)
    names = WINDOW_SETTINGS if getattr(config, "use_sliding_window", True) else ()
    windows = [getattr(config, name, None) for name in names]
    if "local" in getattr(config, "attention_layers", ()):  # GPT-Neo; `window_size` means something else elsewhere
        windows.append(config.window_size)
    return min(length, *(window or length for window in windows), length)


def rotary_length(of_model: PreTrainedConfig) -> int | None:
    """Number of tokens beyond which the rotary frequencies of all positions change; None if they never do.

    transformers chooses the frequencies by the longest row of a forward pass (`longrope` of Phi-3 and Phi-4-mini,
    `dynamic`). A row beyond this length would change the shorter rows beside it, and make keys in a cache wrong.
    """
    config = of_model.get_text_config()
    parameters = getattr(config, "rope_parameters", None) or {}
    limits = []
    # one set of parameters, or one for each kind of layer
    for rope in [parameters] if "rope_type" in parameters else parameters.values():
        kind = rope.get("rope_type") if isinstance(rope, dict) else None
        if kind == "longrope":
            limits.append(rope["original_max_position_embeddings"])
        elif kind == "dynamic":
            limits.append(config.max_position_embeddings)
    return min(limits, default=None)


def other_layers(lm: PreTrainedModel) -> str:
    """Names in the configuration of layers other than full and sliding attention; empty if none."""
    kinds = set(getattr(lm.config.get_text_config(), "layer_types", None) or ())
    others = sorted(kinds - {"full_attention", "sliding_attention"})
    return ", ".join(others) or ("recurrent" if lm._is_stateful else "")


def stored_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, buffer) of persistent buffers: weights in the model's files that receive no gradient.

    Such as scales of Gemma 4's layers, and router biases of DeepSeek and GLM.
    """
    for prefix, part in module.named_modules():
        for name, buffer in part.named_buffers(recurse=False):
            if name not in part._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer
