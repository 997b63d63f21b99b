"""Random causal LMs of every cache-related kind, small enough to build in milliseconds."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    Gemma2Config,
    Gemma4TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OlmoeConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from lit_async_rl.models.attention import choose_attention

EOS = 1


def _build(config: PreTrainedConfig, seed: int, noise: float = 0.2) -> PreTrainedModel:
    """Weights large enough that distributions are far from uniform; leaves the default generator as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        lm = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        choose_attention(lm, None)  # as `load_policy` does
        with torch.no_grad():
            for parameter in lm.parameters():
                parameter.add_(torch.randn_like(parameter) * (noise if parameter.dim() > 1 else 0.1))
    return lm.eval()


def _sizes(vocab: int, hidden: int, layers: int, tied: bool) -> dict:
    return dict(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        bos_token_id=0,
        eos_token_id=EOS,
        pad_token_id=0,
    )


def tiny_llama(vocab: int = 64, hidden: int = 32, layers: int = 2, tied: bool = False, seed: int = 0):
    return _build(LlamaConfig(**_sizes(vocab, hidden, layers, tied=tied)), seed)


def tiny_for_vllm(tied: bool, seed: int = 0):
    """Heads as large as vLLM's CPU kernels want them, no end-of-text token, and less noise: sums round differently."""
    sizes = _sizes(64, 32, 2, tied=tied) | dict(eos_token_id=[], max_position_embeddings=512)
    return _build(LlamaConfig(**sizes, head_dim=32), seed, noise=0.1)


def tiny_qwen2(vocab: int = 64, hidden: int = 32, layers: int = 2, tied: bool = False, seed: int = 0):
    return _build(Qwen2Config(**_sizes(vocab, hidden, layers, tied=tied)), seed)


def tiny_qwen3(vocab: int = 64, hidden: int = 32, layers: int = 2, tied: bool = False, seed: int = 0):
    return _build(Qwen3Config(**_sizes(vocab, hidden, layers, tied=tied), head_dim=16), seed)


def tiny_mistral(vocab: int = 64, hidden: int = 32, layers: int = 2, tied: bool = False, seed: int = 0):
    return _build(MistralConfig(**_sizes(vocab, hidden, layers, tied=tied), sliding_window=200), seed)


_EXPERTS = dict(num_experts=8, num_experts_per_tok=2)


def tiny_qwen3_moe(vocab: int = 64, hidden: int = 32, layers: int = 2, tied: bool = False, seed: int = 0):
    sizes = _sizes(vocab, hidden, layers, tied=tied) | dict(head_dim=16, moe_intermediate_size=32, norm_topk_prob=True)
    return _build(Qwen3MoeConfig(**sizes, **_EXPERTS), seed)


def tiny_olmoe(vocab: int = 64, hidden: int = 32, layers: int = 2, tied: bool = False, seed: int = 0):
    return _build(OlmoeConfig(**_sizes(vocab, hidden, layers, tied=tied), **_EXPERTS), seed)  # weights do not sum to 1


def tiny_mixtral(vocab: int = 64, hidden: int = 32, layers: int = 2, tied: bool = False, seed: int = 0):
    return _build(
        MixtralConfig(**_sizes(vocab, hidden, layers, tied=tied), num_local_experts=8, sliding_window=None), seed
    )


SPARSE = {"qwen3-moe": tiny_qwen3_moe, "olmoe": tiny_olmoe, "mixtral": tiny_mixtral}


def tiny_gemma2(vocab: int = 64, hidden: int = 32, layers: int = 2, tied: bool = True, seed: int = 0):
    return _build(Gemma2Config(**_sizes(vocab, hidden, layers, tied=tied), head_dim=8, sliding_window=200), seed)


def tiny_gemma4(vocab: int = 64, hidden: int = 32, layers: int = 2, seed: int = 0):
    """Its layers are scaled by buffers, which are not 1 here, as in a trained model."""
    sizes = _sizes(vocab, hidden, layers, tied=True) | dict(head_dim=8, global_head_dim=8, sliding_window=200)
    lm = _build(Gemma4TextConfig(**sizes, hidden_size_per_layer_input=0, vocab_size_per_layer_input=vocab), seed)
    for number, layer in enumerate(lm.model.layers):
        layer.layer_scalar.fill_(0.5 + number)
    return lm


def tiny_phi3(vocab: int = 64, hidden: int = 32, layers: int = 2, tied: bool = False, seed: int = 0):
    return _build(Phi3Config(**_sizes(vocab, hidden, layers, tied=tied)), seed)


def tiny_neox(vocab: int = 64, hidden: int = 32, layers: int = 2, tied: bool = False, seed: int = 0):
    sizes = _sizes(vocab, hidden, layers, tied=tied)
    del sizes["num_key_value_heads"]
    return _build(GPTNeoXConfig(**sizes), seed)


def tiny_gpt2(vocab: int = 64, hidden: int = 32, layers: int = 2, tied: bool = True, seed: int = 0):
    config = GPT2Config(
        vocab_size=vocab,
        n_embd=hidden,
        n_layer=layers,
        n_head=4,
        n_positions=256,
        tie_word_embeddings=tied,
        bos_token_id=0,
        eos_token_id=EOS,
    )
    return _build(config, seed)


ALL = {
    "llama": tiny_llama,
    "llama-tied": lambda **kwargs: tiny_llama(tied=True, **kwargs),
    "qwen2": tiny_qwen2,
    "qwen3": tiny_qwen3,
    "qwen3-tied": lambda **kwargs: tiny_qwen3(tied=True, **kwargs),
    "mistral": tiny_mistral,
    "gemma2": tiny_gemma2,
    "phi3": tiny_phi3,
    "gpt-neox": tiny_neox,
    "gpt2": tiny_gpt2,
}


def tiny_tokenizer(vocab: int = 64) -> PreTrainedTokenizerFast:
    """One token for each character from chr(40) on; 0 is padding and 1 ends a text."""
    symbols = {"<pad>": 0, "<eos>": EOS} | {chr(38 + token): token for token in range(2, vocab)}
    tokenizer = Tokenizer(models.WordLevel(symbols, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def save(lm: PreTrainedModel, folder: Path, tokenizer: PreTrainedTokenizerFast | None = None) -> str:
    """A folder that `from_pretrained` loads, with the tokenizer."""
    lm.save_pretrained(folder)
    (tokenizer or tiny_tokenizer(lm.config.vocab_size)).save_pretrained(folder)
    return str(folder)
