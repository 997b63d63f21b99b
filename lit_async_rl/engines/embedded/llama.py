"""Decoding forward pass of Llama-like models: the arithmetic of transformers with a quarter of the operations.

The time of a small model's token is dominated by Python and kernel launches, so everything a decoder does not need
(mask construction, repeated heads, output objects, hooks) is left out. Uses the module's own parameters, so weight
updates need no copy. n rows, T tokens each, H hidden size, Hq query heads, Hk key-value heads, D head size.
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

from lit_async_rl.engines.embedded.kv_cache import SlotCache
from lit_async_rl.engines.embedded.packed import PackedLinear
from lit_async_rl.engines.embedded.products import PROJECTIONS, LayerProducts, PackedProducts, PlainProducts
from lit_async_rl.errors import InvariantError

_FAMILIES = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
_PLAIN = (torch.float32, torch.bfloat16)


class LlamaForward:
    """Hidden states of a supported model, with a `SlotCache`.

    Args:
        lm: the model.
        owns_weights: whether its parameters may be moved in memory, as no other object holds them.

    Attributes:
        packed: linear layers that take the place of the parameters of these names.
        head: the product of the output head; None leaves it to the model's.
    """

    def __init__(self, lm: PreTrainedModel, owns_weights: bool = False) -> None:
        if not self.supports(lm):
            raise InvariantError(f"{type(lm).__name__} has no fast forward pass")
        model: Any = lm.base_model
        config = lm.config
        self._model = model
        self._head_size = model.layers[0].self_attn.head_dim
        self._num_queries, self._num_keys = config.num_attention_heads, config.num_key_value_heads
        linears, head = _linears(model), lm.get_output_embeddings()
        packed = {m: PackedLinear(m) for m in linears} if owns_weights and PackedLinear.supports(linears) else {}
        self._products: list[LayerProducts] = [
            PackedProducts(layer, packed) if packed else PlainProducts(layer, owns_weights) for layer in model.layers
        ]
        self.head = PackedLinear(head) if packed and type(head) is nn.Linear else None
        if (
            self.head is not None and head.weight is not model.embed_tokens.weight
        ):  # rows of embeddings cannot be packed
            packed[head] = self.head
        names = {module: f"{name}.weight" for name, module in lm.named_modules()}
        self.packed = {names[module]: linear for module, linear in packed.items()}
        self._epsilon = torch.tensor(config.rms_norm_eps)
        self._cos = self._sin = torch.empty(0)  # [positions, 1, D], the halves of sin with opposite signs

    @staticmethod
    def supports(lm: PreTrainedModel) -> bool:
        """Whether the model is of a supported class: plain linear layers (no LoRA), SwiGLU, static rotary embedding."""
        if type(lm) not in _FAMILIES or lm.config.hidden_act != "silu":
            return False
        model: Any = lm.base_model
        length_dependent = model.rotary_emb.rope_type in ("dynamic", "longrope")
        return not length_dependent and all(type(linear) is nn.Linear for linear in _linears(model))

    def __call__(
        self, input_ids: Int[Tensor, "n T"], position_ids: Int[Tensor, "n T"], mask: Tensor, cache: SlotCache
    ) -> Float[Tensor, "n T H"]:
        """`mask` is added to the scores, broadcastable to [n, 1, T, keys]."""
        x = F.embedding(input_ids, self._model.embed_tokens.weight)
        self._reserve(x, max(cache.max_len, input_ids.shape[1]))
        cos, sin = self._cos[position_ids], self._sin[position_ids]  # [n, T, 1, D]
        if input_ids.shape[1] == 1:
            mask = mask.expand(-1, self._num_keys, 1, -1).flatten(0, 1)  # [n Hk, 1, M]
        for index, (layer, products) in enumerate(zip(self._model.layers, self._products, strict=True)):
            heads = products.qkv(self._norm(layer.input_layernorm, x))
            x = products.add_out(x, self._attention(layer.self_attn, heads, cos, sin, mask, cache, index))
            x = products.add_mlp(x, self._norm(layer.post_attention_layernorm, x))
        return self._norm(self._model.norm, x)

    def _reserve(self, like: Tensor, num_positions: int) -> None:
        """Computes the rotary embeddings of all positions once."""
        if len(self._cos) >= num_positions and self._cos.dtype == like.dtype:
            return
        num_positions *= 2
        cos, sin = self._model.rotary_emb(like, torch.arange(num_positions, device=like.device)[None])  # [1, M, D]
        half = self._head_size // 2
        self._cos, self._sin = cos[0, :, None], torch.cat([-sin[..., :half], sin[..., half:]], -1)[0, :, None]

    def _attention(
        self, module: Any, heads: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, cache: SlotCache, index: int
    ) -> Tensor:
        n, num_tokens, size = *heads.shape[:2], self._head_size
        heads = heads.view(n, num_tokens, -1, size)
        both = self._num_queries + self._num_keys
        rotated = heads[:, :, :both]
        if "q_norm" in module._modules:  # Qwen3
            query, key = rotated.split([self._num_queries, self._num_keys], 2)
            rotated = torch.cat([self._norm(module.q_norm, query), self._norm(module.k_norm, key)], 2)
        torch.addcmul(rotated * cos, rotated.roll(size // 2, -1), sin, out=heads[:, :, :both])
        query = heads[:, :, : self._num_queries]
        if num_tokens == 1:  # queries that share a key-value head are one matrix, instead of repeated keys and values
            keys, values = cache.write(heads[:, 0, self._num_queries :], index)
            query, h = query.reshape(n, self._num_keys, -1, size), self._num_keys
            parts = [
                _attend(query[a:b], keys[a:b, :, :m], values[a:b, :, :m], mask[a * h : b * h, :, :m])
                for a, b, m in cache.ranges
            ]
            out = parts[0] if len(parts) == 1 else torch.cat(parts)
        else:
            key, value = heads[:, :, self._num_queries :].transpose(1, 2).chunk(2, 1)
            cache.update(key, value, index)
            query = query.transpose(1, 2)
            out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True).transpose(1, 2)
        return out.reshape(n, num_tokens, -1)

    def _norm(self, module: Any, x: Tensor) -> Tensor:
        if not _is_plain(x):
            return F.rms_norm(x, module.weight.shape, module.weight, module.variance_epsilon)
        wide = x.float()  # the CPU has no fused kernel: fewer operations
        squares = torch.linalg.vecdot(wide, wide)[..., None]
        scale = torch.add(self._epsilon, squares, alpha=1 / x.shape[-1]).rsqrt_()
        return (wide * scale).to(x.dtype).mul_(module.weight)


def _attend(
    query: Float[Tensor, "n Hk G D"],
    keys: Float[Tensor, "n Hk M D"],
    values: Float[Tensor, "n Hk M D"],
    mask: Float[Tensor, "rows 1 M"],
) -> Float[Tensor, "n Hk G D"]:
    """Attention of one new token; on CPU two batched products are faster than the fused kernel."""
    if not _is_plain(query):
        mask = mask.view(*query.shape[:2], 1, -1)
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
    rows, size = query.shape[0] * query.shape[1], query.shape[3]
    keys = keys.view(rows, -1, size)
    if keys.dtype != torch.float32:  # torch would copy them transposed, which takes longer than the product
        keys = keys.contiguous()
    scores = torch.baddbmm(mask, query.reshape(rows, -1, size), keys.mT, alpha=size**-0.5)
    return torch.bmm(scores.softmax(-1), values.view(rows, -1, size)).view(query.shape)


def _linears(model: Any) -> list[nn.Linear]:
    found = [getattr(layer.self_attn, name) for layer in model.layers for name in PROJECTIONS]
    return found + [m for layer in model.layers for m in (layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj)]


def _is_plain(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype in _PLAIN and not torch.is_autocast_enabled("cpu")
