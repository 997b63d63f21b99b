"""Models of published shapes with random weights, and tiny ones of the same families: nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

# distributions that are neither flat nor certain, and no end of text
COMMON: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0, "initializer_range": 0.04}
QWEN25 = {  # hidden size, that of the MLP, layers, heads, key-value heads, vocabulary, whether embeddings are tied
    "0.5B": (896, 4864, 24, 14, 2, 151_936, True),
    "1.5B": (1536, 8960, 28, 12, 2, 151_936, True),
    "7B": (3584, 18_944, 28, 28, 4, 152_064, False),
    "32B": (5120, 27_648, 64, 40, 8, 152_064, False),
}


def qwen25(size: str) -> PreTrainedConfig:
    """Configuration of Qwen2.5 by its size."""
    hidden, inner, layers, heads, key_heads, vocabulary, tied = QWEN25[size]
    return Qwen2Config(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
        max_position_embeddings=4096,
        **COMMON,
    )


def qwen3() -> PreTrainedConfig:
    """Configuration of Qwen3-0.6B."""
    return Qwen3Config(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151_936,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        **COMMON,
    )


def llama32() -> PreTrainedConfig:
    """Configuration of Llama-3.2-1B."""
    return LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        vocab_size=128_256,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        **COMMON,
    )


def tiny(config: PreTrainedConfig) -> PreTrainedConfig:
    """The same family at a size for a CPU."""
    small: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096}
    return type(config)(tie_word_embeddings=config.tie_word_embeddings, **small, **COMMON)


def built(config: PreTrainedConfig, device: str, dtype: torch.dtype) -> Any:
    """Random weights, made on the device: filling them takes a minute on a CPU."""
    torch.manual_seed(0)
    with torch.device(device):
        lm = AutoModelForCausalLM.from_config(config, dtype=dtype)
    lm.generation_config.eos_token_id = None
    return lm
