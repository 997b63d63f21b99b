"""Forward passes of the embedded engine: our own of Llama-like models, and those of transformers.

Ours is the arithmetic of transformers with a quarter of the operations. Python and kernel launches dominate the time
per token of a small model, so it omits all that a decoder does not need (mask construction, repeated heads, output
objects, hooks). It uses the module's own parameters: weight updates need no copy.

n rows, T tokens each, H hidden size, Hq query heads, Hk key-value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import (
    LlamaForCausalLM,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

from lit_async_rl.engines.embedded.kv_cache import RowCaches, SlotCache, cache_argument
from lit_async_rl.engines.embedded.packed_linear import PackedLinear
from lit_async_rl.models.architecture import body, context_length, other_layers
from lit_async_rl.models.attention import ignored_setting
from lit_async_rl.models.policy import CausalPolicy

# -- Matrix products of one decoder layer of a Llama-like model: n rows, T tokens each, H hidden size -----------------


PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


class PlainProducts:
    """All linear layers of a decoder layer, by torch; layers with the same input share one product.

    Args:
        layer: decoder layer of transformers.
        owns_weights: True makes such parameters adjacent in memory, for one product; they remain parameters of their
            layers. False only concatenates the outputs.
    """

    def __init__(self, layer: Any, owns_weights: bool) -> None:
        self._attention = layer.self_attn
        self._mlp = layer.mlp
        self._qkv = _JoinedLinear([getattr(layer.self_attn, name) for name in PROJECTIONS[:3]], owns_weights)
        self._gate_up = _JoinedLinear([layer.mlp.gate_proj, layer.mlp.up_proj], owns_weights)
        if owns_weights:
            _make_adjacent([layer.self_attn.o_proj.weight])
            _make_adjacent([layer.mlp.down_proj.weight])

    def qkv(self, x: Float[Tensor, "n T H"]) -> Float[Tensor, "n T K"]:
        """Queries, keys and values of all heads, in order."""
        return self._qkv(x)

    def add_out(self, x: Float[Tensor, "n T H"], heads: Float[Tensor, "n T D"]) -> Float[Tensor, "n T H"]:
        """Sum of x and the output projection of attention; may overwrite x."""
        return _add_linear(x, self._attention.o_proj, heads)

    def add_mlp(self, x: Float[Tensor, "n T H"], normed: Float[Tensor, "n T H"]) -> Float[Tensor, "n T H"]:
        """Sum of x and down(silu(gate) * up); may overwrite x."""
        gate, up = self._gate_up(normed).chunk(2, -1)
        return _add_linear(x, self._mlp.down_proj, F.silu(gate).mul_(up))


class PackedProducts:
    """The same by oneDNN with packed weights, fused with additions, multiplications and activations.

    Args:
        layer: decoder layer of transformers.
        packed: packed layer of each linear layer.
    """

    def __init__(self, layer: Any, packed: dict[nn.Linear, PackedLinear]) -> None:
        attention = layer.self_attn
        mlp = layer.mlp
        self._qkv = [packed[getattr(attention, name)] for name in PROJECTIONS[:3]]
        self._out = packed[attention.o_proj]
        self._gate = packed[mlp.gate_proj]
        self._up = packed[mlp.up_proj]
        self._down = packed[mlp.down_proj]

    def qkv(self, x: Tensor) -> Tensor:
        return torch.cat([linear(x) for linear in self._qkv], -1)

    def add_out(self, x: Tensor, heads: Tensor) -> Tensor:
        return self._out.combine(heads, "add", x)

    def add_mlp(self, x: Tensor, normed: Tensor) -> Tensor:
        return self._down.combine(self._up.combine(normed, "mul", self._gate(normed, "swish")), "add", x)


class _JoinedLinear:
    """Linear layers with the same input, computed as one matrix product."""

    def __init__(self, linears: list[nn.Linear], owns_weights: bool) -> None:
        self._linears = linears
        self._weight = _make_adjacent([linear.weight for linear in linears]) if owns_weights else None
        biases = [linear.bias for linear in linears if linear.bias is not None]
        self._bias = _make_adjacent(biases) if owns_weights and biases else None

    def __call__(self, x: Float[Tensor, "n T H"]) -> Float[Tensor, "n T K"]:
        if self._weight is None:
            return torch.cat([_linear(linear, x) for linear in self._linears], -1)
        return F.linear(x, self._weight, self._bias)


def _make_adjacent(parameters: Sequence[Tensor]) -> Tensor:
    """Moves parameters into one tensor, as views of it; returns it."""
    whole = torch.cat([p.detach() for p in parameters])
    if whole.dim() == 2 and whole.device.type == "cpu":  # column-major: products take 10 % less time
        whole = whole.t().contiguous().t()
    for parameter, part in zip(parameters, whole.split([len(p) for p in parameters]), strict=True):
        parameter.data = part
    return whole


def _add_linear(x: Tensor, module: Any, y: Tensor) -> Tensor:
    """Returns x + module(y), in place if no cast is needed."""
    if torch.is_autocast_enabled(x.device.type) or module.bias is not None:
        return x + _linear(module, y)
    x.flatten(0, 1).addmm_(y.flatten(0, 1), module.weight.t())
    return x


def _linear(module: Any, x: Tensor) -> Tensor:
    return F.linear(x, module.weight, module.bias)


# -- Forward passes of any model over its cache -----------------------------------------------------------------------


class _Forward:
    """Base class of the forward passes of a model: its output head.

    Attributes:
        packed: packed linear layers by the names of the parameters they replace.
        head: packed output head; None if the model's own is used.
        reads_ranges: whether attention reads fewer positions of some rows, see `SlotCache.ranges`.
    """

    head: PackedLinear | None = None
    reads_ranges = False

    def __init__(self, lm: PreTrainedModel) -> None:
        self._lm = lm
        self._policy = CausalPolicy(lm)
        self.packed: dict[str, PackedLinear] = {}

    def logits(self, features: Float[Tensor, "n H"]) -> Float[Tensor, "n V"]:
        """Applies the output head."""
        return self._policy.logits(features) if self.head is None else self.head(features)


class CachedForward(_Forward):
    """Hidden states of new tokens, by transformers.

    Args:
        lm: the model.
        cache: KV cache; updated by the forward passes.

    Raises:
        ValueError: the attention implementation takes no mask, or ignores a setting of the configuration.
    """

    def __init__(self, lm: PreTrainedModel, cache: SlotCache) -> None:
        if lm.config._attn_implementation not in ("sdpa", "eager"):
            raise ValueError(
                f"model.attn_implementation must be sdpa or eager, got {lm.config._attn_implementation!r}: the "
                "embedded engine, which also samples for validation, cannot build attention masks for other "
                "implementations"
            )
        if setting := ignored_setting(lm):
            raise ValueError(
                f"model type {lm.config.model_type!r}: attn_implementation={lm.config._attn_implementation!r} ignores "
                f"the setting {setting}, so the embedded engine would not sample from the model's distribution: set "
                "model.attn_implementation=eager"
            )
        super().__init__(lm)
        self._cache = cache
        self._zero = torch.zeros((), dtype=lm.dtype, device=next(lm.parameters()).device)

    def __call__(
        self, input_ids: Int[Tensor, "n t"], position_ids: Int[Tensor, "m t"], mask: Bool[Tensor, "k 1 1 p"] | None
    ) -> Float[Tensor, "n t H"]:
        """Last hidden states; positions and mask broadcast over the rows.

        Args:
            input_ids: new tokens.
            position_ids: their positions.
            mask: True where a token attends; None for prompts, which are causal.
        """
        added = None if mask is None else self._additive(mask)
        return self._states(input_ids, position_ids.expand(len(input_ids), -1), added)

    def _additive(self, mask: Tensor) -> Tensor:
        """The mask as eager attention needs it; other kernels would convert a boolean one in every layer."""
        return torch.where(mask, self._zero, -torch.inf)

    def _states(self, input_ids: Tensor, position_ids: Tensor, mask: Tensor | None) -> Tensor:
        if mask is None:
            width = input_ids.shape[1]
            causal = torch.ones(width, width, dtype=torch.bool, device=input_ids.device).tril()
            mask = self._additive(causal[None, None])
        output = body(self._lm)(
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=mask.expand(len(input_ids), -1, -1, -1),
            past_key_values=self._cache,
            use_cache=True,
        )
        states: Tensor = output.last_hidden_state
        return states


# -- Forward passes of our own, of Llama-like models ------------------------------------------------------------------


_FAMILIES = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
_FAST_DTYPES = (torch.float32, torch.bfloat16)


class LlamaForward(CachedForward):
    """Hidden states of new tokens, for models that it `supports`.

    Args:
        lm: the model.
        cache: KV cache; updated by the forward passes.
        owns_weights: whether its parameters may be moved in memory, because no other object refers to them.
    """

    reads_ranges = True

    def __init__(self, lm: PreTrainedModel, cache: SlotCache, owns_weights: bool) -> None:
        super().__init__(lm, cache)
        model: Any = lm.base_model
        config = lm.config
        self._model = model
        self._head_size = model.layers[0].self_attn.head_dim
        self._num_queries = config.num_attention_heads
        self._num_keys = config.num_key_value_heads
        linears = _linears(model)
        head = lm.get_output_embeddings()
        packed = {m: PackedLinear(m) for m in linears} if owns_weights and PackedLinear.supports(linears) else {}
        self._products = [
            PackedProducts(layer, packed) if packed else PlainProducts(layer, owns_weights) for layer in model.layers
        ]
        self.head = PackedLinear(head) if packed and type(head) is nn.Linear else None
        # a tied head keeps its parameter, too: rows of embeddings cannot be read from packed weights
        if self.head is not None and head.weight is not model.embed_tokens.weight:
            packed[head] = self.head
        names = {module: f"{name}.weight" for name, module in lm.named_modules()}
        self.packed = {names[module]: linear for module, linear in packed.items()}
        self._epsilon = torch.tensor(config.rms_norm_eps)
        self._cos = self._sin = torch.empty(0)  # [positions, 1, D]; the first half of sin is negated

    @staticmethod
    def supports(lm: PreTrainedModel) -> bool:
        """Whether the class is known, with plain linear layers (no LoRA), SwiGLU and static rotary embedding."""
        if type(lm) not in _FAMILIES or lm.config.hidden_act != "silu":
            return False
        model: Any = lm.base_model
        length_dependent = model.rotary_emb.rope_type in ("dynamic", "longrope")
        return not length_dependent and all(type(linear) is nn.Linear for linear in _linears(model))

    def _states(
        self, input_ids: Int[Tensor, "n T"], position_ids: Int[Tensor, "n T"], mask: Tensor | None
    ) -> Float[Tensor, "n T H"]:
        """Last hidden states.

        Args:
            input_ids: new tokens.
            position_ids: their positions.
            mask: of one token per row, added to the scores, broadcastable to [n, 1, 1, keys]; None for prompts, which
                are causal: padding is behind them.
        """
        x = F.embedding(input_ids, self._model.embed_tokens.weight)
        self._reserve(x, max(self._cache.max_len, input_ids.shape[1]))
        cos = self._cos[position_ids]  # [n, T, 1, D]
        sin = self._sin[position_ids]
        if mask is not None:
            mask = mask.expand(-1, self._num_keys, 1, -1).flatten(0, 1)  # [n Hk, 1, M]
        for index, (layer, products) in enumerate(zip(self._model.layers, self._products, strict=True)):
            heads = products.qkv(self._norm(layer.input_layernorm, x))
            x = products.add_out(x, self._attention(layer.self_attn, heads, cos, sin=sin, mask=mask, index=index))
            x = products.add_mlp(x, self._norm(layer.post_attention_layernorm, x))
        return self._norm(self._model.norm, x)

    @property
    def memory(self) -> list[Tensor]:
        """Rotary embeddings, which move to other memory as rows grow."""
        return [self._cos, self._sin]

    def _reserve(self, like: Tensor, num_positions: int) -> None:
        """Computes the rotary embeddings of twice `num_positions`, unless there are enough."""
        if len(self._cos) >= num_positions and self._cos.dtype == like.dtype:
            return
        num_positions *= 2
        cos, sin = self._model.rotary_emb(like, torch.arange(num_positions, device=like.device)[None])  # [1, M, D]
        half = self._head_size // 2
        self._cos = cos[0, :, None]
        self._sin = torch.cat([-sin[..., :half], sin[..., half:]], -1)[0, :, None]

    def _attention(
        self, module: Any, heads: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, index: int
    ) -> Tensor:
        n, num_tokens = heads.shape[:2]
        size = self._head_size
        heads = heads.view(n, num_tokens, -1, size)
        both = self._num_queries + self._num_keys
        rotated = heads[:, :, :both]
        if "q_norm" in module._modules:  # Qwen3
            query, key = rotated.split([self._num_queries, self._num_keys], 2)
            rotated = torch.cat([self._norm(module.q_norm, query), self._norm(module.k_norm, key)], 2)
        torch.addcmul(rotated * cos, rotated.roll(size // 2, -1), sin, out=heads[:, :, :both])
        query = heads[:, :, : self._num_queries]
        if mask is not None:  # queries that share a key-value head are one matrix, instead of repeated keys and values
            keys, values = self._cache.write(heads[:, 0, self._num_queries :], index)
            query = query.reshape(n, self._num_keys, -1, size)
            h = self._num_keys
            parts = [
                _attend(query[a:b], keys[a:b, :, :m], values[a:b, :, :m], mask=mask[a * h : b * h, :, :m])
                for a, b, m in self._cache.ranges
            ]
            out = parts[0] if len(parts) == 1 else torch.cat(parts)
        else:
            key, value = heads[:, :, self._num_queries :].transpose(1, 2).chunk(2, 1)
            self._cache.update(key, value, index)
            out = _attend_causally(query.transpose(1, 2), key, value).transpose(1, 2)
        return out.reshape(n, num_tokens, -1)

    def _norm(self, module: Any, x: Tensor) -> Tensor:
        if not _is_fast_on_cpu(x):
            return F.rms_norm(x, module.weight.shape, module.weight, module.variance_epsilon)
        wide = x.float()  # written out with few operations, because the CPU has no fused kernel
        squares = torch.linalg.vecdot(wide, wide)[..., None]
        scale = torch.add(self._epsilon, squares, alpha=1 / x.shape[-1]).rsqrt_()
        return (wide * scale).to(x.dtype).mul_(module.weight)


def _attend_causally(
    query: Float[Tensor, "n Hq T D"], key: Float[Tensor, "n Hk T D"], value: Float[Tensor, "n Hk T D"]
) -> Float[Tensor, "n Hq T D"]:
    """Attention of whole prompts, by a kernel that does not hold all scores in memory.

    On CUDA, kernels with groups of heads (`enable_gqa`) take no mask, and none of them takes float32; torch would fall
    back to products that write n Hq T T scores. Hence no mask, and repeated heads where groups are impossible.
    """
    if not _takes_groups(query):
        repeats = query.shape[1] // key.shape[1]
        key = key.repeat_interleave(repeats, 1)
        value = value.repeat_interleave(repeats, 1)
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=query.shape[1] != key.shape[1])


def _takes_groups(x: Tensor) -> bool:
    """Whether attention has a kernel in which several queries share keys and values."""
    return x.device.type == "cpu" or x.dtype in (torch.bfloat16, torch.float16)


def _attend(
    query: Float[Tensor, "n Hk G D"],
    keys: Float[Tensor, "n Hk M D"],
    values: Float[Tensor, "n Hk M D"],
    mask: Float[Tensor, "rows 1 M"],
) -> Float[Tensor, "n Hk G D"]:
    """Attention of one new token per row; on a CPU two batched products are faster than the fused kernel."""
    if not _is_fast_on_cpu(query):
        mask = mask.view(*query.shape[:2], 1, -1)
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
    rows = query.shape[0] * query.shape[1]
    size = query.shape[3]
    keys = keys.view(rows, -1, size)
    if keys.dtype != torch.float32:  # otherwise torch copies the transposed keys, which takes longer than the product
        keys = keys.contiguous()
    scores = torch.baddbmm(mask, query.reshape(rows, -1, size), keys.mT, alpha=size**-0.5)
    return torch.bmm(scores.softmax(-1), values.view(rows, -1, size)).view(query.shape)


def _linears(model: Any) -> list[nn.Linear]:
    attention = [getattr(layer.self_attn, name) for layer in model.layers for name in PROJECTIONS]
    mlps = [layer.mlp for layer in model.layers]
    return attention + [linear for mlp in mlps for linear in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)]


def _is_fast_on_cpu(x: Tensor) -> bool:
    """Whether our own sequences of operations are faster than torch's kernels."""
    return x.device.type == "cpu" and x.dtype in _FAST_DTYPES and not torch.is_autocast_enabled("cpu")


# -- Forward passes row by row, and the choice ------------------------------------------------------------------------


class RowwiseForward(_Forward):
    """Hidden states of new tokens, with one forward pass of transformers per row.

    Args:
        lm: the model.
        caches: caches of the rows; updated by the forward passes.
        argument: cache argument of the model's forward pass.
    """

    def __init__(self, lm: PreTrainedModel, caches: RowCaches, argument: str) -> None:
        super().__init__(lm)
        self._caches = caches
        self._argument = argument

    def __call__(
        self, input_ids: Int[Tensor, "n t"], position_ids: Tensor, mask: Tensor | None
    ) -> Float[Tensor, "n t H"]:
        """Last hidden states; 0 for padding and free rows. Positions and mask follow from the caches."""
        lengths = self._caches.prompt_lengths
        caches = self._caches.caches
        states_of: dict[int, Tensor] = {}  # by row
        for row, ids in enumerate(input_ids):
            if lengths is None and caches[row] is None:
                continue
            cache = None if lengths is not None else caches[row]
            new = ids[None] if lengths is None else ids[None, : lengths[row]]
            output = body(self._lm)(input_ids=new, use_cache=True, **{self._argument: cache})
            if output.get(self._argument) is None:
                raise ValueError(f"its forward pass returns no {self._argument}")
            states_of[row] = output.last_hidden_state[0]
            if lengths is not None:
                self._caches.prompts.append(output[self._argument])
        first = next(iter(states_of.values()))
        hidden = first.new_zeros(*input_ids.shape, first.shape[-1])
        for row, states in states_of.items():
            hidden[row, : len(states)] = states
        return hidden


def cache_and_forward(
    lm: PreTrainedModel, num_slots: int, owns_weights: bool, cache_class: type[SlotCache]
) -> tuple[SlotCache | RowCaches, CachedForward | RowwiseForward]:
    """KV cache and forward pass; one of each per row for models with layers other than attention."""
    device = next(lm.parameters()).device
    if other_layers(lm) and (argument := cache_argument(lm)) is not None:
        rows = RowCaches(num_slots)
        return rows, RowwiseForward(lm, rows, argument)
    cache = cache_class(num_slots, device, context_length(lm))
    fast = LlamaForward.supports(lm)
    return cache, LlamaForward(lm, cache, owns_weights) if fast else CachedForward(lm, cache)
