"""Forward passes of an embedded engine's model over its KV cache."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from lit_async_rl.engines.embedded.kv_cache import SlotCache
from lit_async_rl.engines.embedded.llama import LlamaForward
from lit_async_rl.engines.embedded.packed import PackedLinear
from lit_async_rl.engines.embedded.row_caches import RowCaches, RowwiseForward, cache_argument
from lit_async_rl.models.architecture import body, context_length, other_layers
from lit_async_rl.models.attention import ignored_setting
from lit_async_rl.models.policy import CausalPolicy


class CachedForward:
    """Hidden states of new tokens, by our own forward pass of Llama where it fits, otherwise by that of transformers.

    Args:
        lm: the model.
        cache: keys and values; written to.
        owns_weights: whether the model's parameters may be moved in memory, as no other object holds them.

    Raises:
        ValueError: the attention implementation takes no mask, or ignores a setting of the configuration.
    """

    def __init__(self, lm: PreTrainedModel, cache: SlotCache, owns_weights: bool) -> None:
        if lm.config._attn_implementation not in ("sdpa", "eager"):
            raise ValueError(
                f"model.attn_implementation={lm.config._attn_implementation!r}: the embedded engine, which validation "
                "uses, too, needs sdpa or eager, whose masks it can give"
            )
        if setting := ignored_setting(lm):
            raise ValueError(
                f"model type {lm.config.model_type!r}: attn_implementation={lm.config._attn_implementation!r} ignores "
                f"{setting}, so that the embedded engine would sample from another distribution; use eager"
            )
        self._lm, self._cache, self._policy = lm, cache, CausalPolicy(lm)
        self._llama = LlamaForward(lm, owns_weights) if LlamaForward.supports(lm) else None
        self._zero = torch.zeros((), dtype=lm.dtype, device=next(lm.parameters()).device)

    def logits(self, features: Float[Tensor, "n H"]) -> Float[Tensor, "n V"]:
        """Applies the output head."""
        head = None if self._llama is None else self._llama.head
        return self._policy.logits(features) if head is None else head(features)

    @property
    def packed(self) -> dict[str, PackedLinear]:
        """Linear layers that take the place of the parameters of these names."""
        return {} if self._llama is None else self._llama.packed

    @property
    def reads_ranges(self) -> bool:
        """Whether attention reads fewer positions of some rows, see `SlotCache.ranges`."""
        return self._llama is not None

    def __call__(
        self, input_ids: Int[Tensor, "n t"], position_ids: Int[Tensor, "m t"], mask: Bool[Tensor, "k 1 q p"]
    ) -> Float[Tensor, "n t H"]:
        """Last hidden states; positions and mask (True where a token attends) broadcast over the rows."""
        position_ids = position_ids.expand(len(input_ids), -1)
        # Added to the scores: eager attention needs it so, the others would make it so in every layer.
        mask = torch.where(mask, self._zero, -torch.inf)
        if self._llama is not None:
            return self._llama(input_ids, position_ids, mask, self._cache)
        output = body(self._lm)(
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=mask.expand(len(input_ids), -1, -1, -1),
            past_key_values=self._cache,
            use_cache=True,
        )
        return output.last_hidden_state


def cache_and_forward(
    lm: PreTrainedModel, num_slots: int, owns_weights: bool, cache_class: type[SlotCache]
) -> tuple[SlotCache | RowCaches, CachedForward | RowwiseForward]:
    """Cache of the rows, and the forward pass over it: row by row where layers have state of another kind."""
    device = next(lm.parameters()).device
    if other_layers(lm) and (argument := cache_argument(lm)) is not None:
        rows = RowCaches(num_slots)
        return rows, RowwiseForward(lm, rows, argument)
    cache = cache_class(num_slots, device, context_length(lm))
    return cache, CachedForward(lm, cache, owns_weights)
