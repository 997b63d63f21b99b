"""KV cache with one row per slot, behind the cache interface of transformers.

n active rows in slots 0..n-1, S slots, M positions, Hk key-value heads, D head size.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from lit_async_rl.errors import InvariantError
from lit_async_rl.models.architecture import body


class SlotCache:
    """KV cache of S slots, left-aligned.

    Attention reads M positions of every row: the length of the longest, rounded up to whole blocks. An implementation
    that supports `ranges` reads fewer positions of the rows behind the long ones. Memory is allocated for more
    positions, so that M changes without copies, which would take a quarter of the time if a few long rows come and go.

    In prefill mode (`begin_prefill`) new keys and values are returned unchanged, and stored for the slots of all
    samples of a prompt; otherwise each call appends one position to every active row.

    Args:
        num_slots: S.
        device: of keys and values.
        max_positions: upper limit of the rounding of M; GPT-Neo's local layers count positions from M.

    Attributes:
        rewinds: whether a slot still has its prompt when its completion is finished.
        max_len: M.
        block_positions: M is a multiple of it.
        growth_percent: new size of the memory, in percent of the old, when it must grow, unless M needs more.
        ranges: (first row, end row, number of positions that attention must read) of consecutive rows.
    """

    is_compileable = False  # read by transformers
    layers = ()  # read by transformers
    rewinds = True

    def __init__(self, num_slots: int, device: torch.device, max_positions: int = sys.maxsize) -> None:
        self.num_slots = num_slots
        self.max_positions = max_positions
        self.max_len = 0
        self.block_positions = 32
        self.growth_percent = 125
        self.ranges: list[tuple[int, int, int]] = []
        self._capacity = 0  # positions of each slot in memory
        self._buffers: list[Tensor] = []  # per layer [2, S, Hk, capacity, D]: keys and values
        self._prefill: list[tuple[Tensor, Tensor]] | None = None
        self._slots = torch.arange(num_slots, device=device)
        self._positions = self._slots[:0]
        self._flat_rows: dict[int, Tensor] = {}  # by Hk: [n 2 Hk], rows of a flattened buffer to write

    # -- called by transformers ---------------------------------------------------------------------------------------

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Always 0: positions are passed explicitly."""
        return 0

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Appends the new keys and values, and returns all keys and values of the layer."""
        if self._prefill is not None:
            self._prefill.append((key, value))
            return key, value
        key_size = key.shape[-1]
        value_size = value.shape[-1]
        size = max(key_size, value_size)  # one buffer for both, also where head sizes differ
        padded_key = F.pad(key, (0, size - key_size))
        padded_value = F.pad(value, (0, size - value_size))
        keys, values = self.write(torch.cat([padded_key, padded_value], 1)[:, :, 0], layer_idx)
        return keys[..., :key_size], values[..., :value_size]

    def write(self, new: Float[Tensor, "n both D"], layer: int) -> tuple[Tensor, Tensor]:
        """Appends one position to every row; `new` has the key heads before the value heads."""
        buffer = self._buffers[layer]
        num_rows = len(new)
        num_heads = buffer.shape[2]
        size = buffer.shape[4]
        if num_heads not in self._flat_rows:  # the same in all layers of this step
            kinds = torch.arange(2, device=new.device)
            heads = torch.arange(num_heads, device=new.device)
            slots = kinds[:, None] * self.num_slots + self._slots[:num_rows, None, None]  # [n, 2, 1]
            places = (slots * num_heads + heads) * self._capacity + self._positions[:, None, None]
            self._flat_rows[num_heads] = places.flatten()
        rows = new.reshape(-1, size).to(buffer.dtype)
        buffer.view(-1, size).index_copy_(0, self._flat_rows[num_heads], rows)
        keys, values = buffer[:, :num_rows, :, : self.max_len].unbind()
        return keys, values

    @property
    def memory(self) -> list[Tensor]:
        """Keys and values of all layers; they move as the cache grows."""
        return self._buffers

    # -- called by the engine -----------------------------------------------------------------------------------------

    def begin_prefill(self, lengths: Sequence[int]) -> None:
        """Switches the next forward pass to prefill; needs no `lengths`, as padding is behind the prompts."""
        self._prefill = []

    def end_prefill(self, source: Tensor, slots: Tensor) -> None:
        """Copies row `source[j]` of the prefill to slot `slots[j]`; call `fit` first."""
        if self._prefill is None:
            raise InvariantError("SlotCache.end_prefill was called, but no prefill had begun")
        fresh = self._prefill
        self._prefill = None
        if not self._buffers:
            shapes = [(k.shape[1], self._capacity, max(k.shape[3], v.shape[3])) for k, v in fresh]
            self._buffers = [  # under autocast values may be half precision while rotated keys are float32
                k.new_zeros(2, self.num_slots, *shape, dtype=torch.promote_types(k.dtype, v.dtype))
                for shape, (k, v) in zip(shapes, fresh, strict=True)
            ]
        for buffer, pair in zip(self._buffers, fresh, strict=True):
            for part, new in zip(buffer, pair, strict=True):
                part[slots, :, : new.shape[2], : new.shape[3]] = new.index_select(0, source).to(part.dtype)

    def begin_decode(self, positions: Int[Tensor, " n"], num_long: int, short_len: int) -> None:
        """Switches the next forward pass to decoding, with one token per active row.

        Args:
            positions: position of each token.
            num_long: number of leading rows that may be longer than `short_len`.
            short_len: upper limit of the lengths of the other rows.
        """
        self._positions = positions
        self._flat_rows = {}
        ranges = [(0, num_long, self.max_len), (num_long, len(positions), min(short_len, self.max_len))]
        self.ranges = [part for part in ranges if part[0] < part[1]]

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copies slots to other slots in one operation."""
        for buffer in self._buffers:
            buffer[:, targets, :, : self.max_len] = buffer[:, sources, :, : self.max_len]

    def free(self, slots: Sequence[int]) -> None:
        """Does nothing: finished rows stay, for copies of their prompts, until they are overwritten."""

    def clear(self) -> None:
        """Drops all keys and values."""
        self._buffers = []
        self.max_len = 0
        self._capacity = 0

    def fit(self, length: int) -> bool:
        """Sets M for rows of `length` positions; returns whether M shrank: longer slots are then overwritten."""
        previous = self.max_len
        self.max_len = min(-(-length // self.block_positions) * self.block_positions, self.max_positions)
        if self.max_len <= self._capacity:
            return self.max_len < previous
        before = self._capacity
        self._capacity = max(self.max_len, min(self._capacity * self.growth_percent // 100, self.max_positions))
        for layer, old in enumerate(self._buffers):
            self._buffers[layer] = old.new_zeros(*old.shape[:3], self._capacity, old.shape[4])
            self._buffers[layer][:, :, :, :before] = old
        return False


# -- Decoding row by row with the caches of transformers, for layers with other state than keys and values ------------
# Recurrent, convolutional and sparse layers (Mamba, Qwen3-Next, LFM2, Jamba, DeepSeek-V3.2 and others) have state of
# other kinds, which only transformers' cache classes support. Rows of different lengths cannot share such a cache, so
# each row has its own, and decoding takes one forward pass per row and token.


_ARGUMENTS = ("past_key_values", "cache_params")

# transformers clamps dt in scans of whole sequences but not in single steps: a difference of up to 1e-3 nats
INEXACT_MODEL_TYPES = frozenset({"nemotron_h", "zamba2"})


def cache_argument(lm: PreTrainedModel) -> str | None:
    """Cache argument of the model's forward pass; None if there is none, or decoding with it is inexact."""
    if lm.config.get_text_config().model_type in INEXACT_MODEL_TYPES:
        return None
    known = inspect.signature(body(lm).forward).parameters
    return next((name for name in _ARGUMENTS if name in known), None)


class RowCaches:
    """A cache of transformers for each slot, with the interface of `SlotCache`.

    Attributes:
        rewinds: False, because recurrent state cannot return to the end of its prompt.
        max_len: positions of the longest row.
        caches: cache of each slot; None if it is free.
        prompt_lengths: lengths of the prompts in the next forward pass; None for a decode step.
        prompts: caches of the prompts of the last prefill.
    """

    rewinds = False

    def __init__(self, num_slots: int) -> None:
        self.max_len = 0
        self.caches: list[Any] = [None] * num_slots
        self.prompt_lengths: Sequence[int] | None = None
        self.prompts: list[Any] = []

    def begin_prefill(self, lengths: Sequence[int]) -> None:
        """Switches the next forward pass to prompts of these lengths."""
        self.prompt_lengths = lengths
        self.prompts = []

    def end_prefill(self, source: Tensor, slots: Tensor) -> None:
        """Gives slot `slots[j]` the cache of prompt `source[j]`, or a copy if other slots need it."""
        num_remaining = Counter(source.tolist())
        for number, slot in zip(source.tolist(), slots.tolist(), strict=True):
            num_remaining[number] -= 1
            self.caches[slot] = copy.deepcopy(self.prompts[number]) if num_remaining[number] else self.prompts[number]
        self.prompts = []
        self.prompt_lengths = None

    def begin_decode(self, positions: Int[Tensor, " n"], num_long: int, short_len: int) -> None:
        """Does nothing: `end_prefill` switches to decoding, and each cache knows its position."""

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Moves the caches of slots to other slots."""
        moved = [self.caches[slot] for slot in sources.tolist()]
        self.free(sources.tolist())
        for slot, cache in zip(targets.tolist(), moved, strict=True):
            self.caches[slot] = cache

    def free(self, slots: Sequence[int]) -> None:
        """Drops the caches of finished rows."""
        for slot in slots:
            self.caches[slot] = None

    def clear(self) -> None:
        """Drops all caches."""
        self.caches = [None] * len(self.caches)
        self.max_len = 0

    def fit(self, length: int) -> bool:
        """Sets the length of the longest row; the caches grow on their own."""
        self.max_len = length
        return False
