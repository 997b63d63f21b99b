"""The forward pass of Llama-like models for decoding: the arithmetic of transformers in a third of the operations.

A small model's token costs more Python and kernel launches than arithmetic, so everything that a decoder does not need
(mask building, head repetition, outputs, hooks) is left out. Reads the module's own parameters, so it is always up to
date. n rows, T tokens each, H hidden size, Hq query heads, Hk key-value heads, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import (
    LlamaForCausalLM,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

from lit_async_rl.slot_cache import SlotCache

_FAMILIES = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


class LlamaForward:
    """Hidden states of a supported model, with keys and values in a `SlotCache`."""

    def __init__(self, lm: PreTrainedModel) -> None:
        assert self.supports(lm)
        model: Any = lm.base_model
        config = lm.config
        self._model = model
        self._head_size = model.layers[0].self_attn.head_dim
        self._num_queries, self._num_keys = config.num_attention_heads, config.num_key_value_heads

    @staticmethod
    def supports(lm: PreTrainedModel) -> bool:
        """These classes with plain linear layers (no LoRA), SwiGLU, and rotations that do not depend on length."""
        if type(lm) not in _FAMILIES or lm.config.hidden_act != "silu":
            return False
        model: Any = lm.base_model
        linears = [getattr(layer.self_attn, name) for layer in model.layers for name in _PROJECTIONS]
        linears += [m for layer in model.layers for m in (layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj)]
        length_dependent = model.rotary_emb.rope_type in ("dynamic", "longrope")
        return not length_dependent and all(type(linear) is nn.Linear for linear in linears)

    def __call__(
        self, input_ids: Int[Tensor, "n T"], position_ids: Int[Tensor, "n T"], mask: Tensor, cache: SlotCache
    ) -> Float[Tensor, "n T H"]:
        """`mask` is added to the scores, broadcastable to [n, 1, T, keys]."""
        x = F.embedding(input_ids, self._model.embed_tokens.weight)
        cos, sin = self._model.rotary_emb(x, position_ids)  # [n, T, D], the halves of D alike
        half = self._head_size // 2
        sin = torch.cat([-sin[..., :half], sin[..., half:]], -1)
        cos, sin = cos[:, :, None], sin[:, :, None]
        for index, layer in enumerate(self._model.layers):
            x = x + self._attention(layer.self_attn, _norm(layer.input_layernorm, x), cos, sin, mask, cache, index)
            y, mlp = _norm(layer.post_attention_layernorm, x), layer.mlp
            x = x + _linear(mlp.down_proj, F.silu(_linear(mlp.gate_proj, y)) * _linear(mlp.up_proj, y))
        return _norm(self._model.norm, x)

    def _attention(
        self, module: Any, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, cache: SlotCache, index: int
    ) -> Tensor:
        n, num_tokens, size = *x.shape[:2], self._head_size
        query = _linear(module.q_proj, x).view(n, num_tokens, self._num_queries, size)
        key = _linear(module.k_proj, x).view(n, num_tokens, self._num_keys, size)
        value = _linear(module.v_proj, x).view(n, num_tokens, self._num_keys, size).transpose(1, 2)
        if "q_norm" in module._modules:  # Qwen3
            query, key = _norm(module.q_norm, query), _norm(module.k_norm, key)
        rotated = torch.cat([query, key], 2)
        rotated = torch.addcmul(rotated * cos, rotated.roll(size // 2, -1), sin)
        query, key = rotated[:, :, : self._num_queries], rotated[:, :, self._num_queries :].transpose(1, 2)
        keys, values = cache.update(key, value, index)
        if num_tokens == 1:  # queries that share a key-value head are one matrix, instead of repeated keys and values
            query = query.reshape(n, self._num_keys, -1, size)
            out = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
        else:
            query = query.transpose(1, 2)
            out = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True).transpose(1, 2)
        return _linear(module.o_proj, out.reshape(n, num_tokens, -1))


def _linear(module: Any, x: Tensor) -> Tensor:
    return F.linear(x, module.weight, module.bias)


def _norm(module: Any, x: Tensor) -> Tensor:
    return F.rms_norm(x, module.weight.shape, module.weight, module.variance_epsilon)
