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

from lit_async_rl.engines.embedded.packed_linear import PackedLinear
from lit_async_rl.errors import InvariantError
from lit_async_rl.models.loading import body
from lit_async_rl.models.policy import CausalPolicy

BLOCK = 32  # positions


class SlotCache:
    """KV cache of S slots, left-aligned.

    Attention reads M positions of every row: the length of the longest, rounded up to whole blocks. Where it can
    (`ranges`), it reads fewer of the rows behind the long ones. There is memory for more positions, so that M changes
    without copies, which would take a quarter of the time where few rows are long and come and go.

    In prefill mode (`begin_prefill`) new keys and values are returned as they are and kept, so that those of a prompt
    can be copied to the slots of all its samples; otherwise each call appends one position to every active row.

    Args:
        num_slots: S.
        device: of the keys and values.
        max_positions: largest M that blocks are rounded up to; GPT-Neo's local layers count positions from M.

    Attributes:
        rewinds: a slot still holds its prompt when its completion is finished.
        max_len: M.
        ranges: consecutive rows, from and to, and how many positions attention has to read of each.
    """

    is_compileable = False  # asked by transformers
    layers = ()  # asked by transformers
    rewinds = True

    def __init__(self, num_slots: int, device: torch.device, max_positions: int = sys.maxsize) -> None:
        self.num_slots = num_slots
        self.max_positions = max_positions
        self.max_len = 0
        self.ranges: list[tuple[int, int, int]] = []
        self._capacity = 0  # positions of each slot in memory
        self._buffers: list[Tensor] = []  # per layer [2, S, Hk, capacity, D]: keys and values
        self._prefill: list[tuple[Tensor, Tensor]] | None = None
        self._slots = torch.arange(num_slots, device=device)
        self._positions = self._slots[:0]
        self._places: dict[int, Tensor] = {}  # by Hk: [n 2 Hk], which rows of a flattened buffer are written

    # -- called by transformers ---------------------------------------------------------------------------------------

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Always 0: positions are passed explicitly."""
        return 0

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Appends the new keys and values and returns all that the layer attends to."""
        if self._prefill is not None:
            self._prefill.append((key, value))
            return key, value
        sizes = key.shape[-1], value.shape[-1]
        pair = [F.pad(new, (0, max(sizes) - new.shape[-1])) for new in (key, value)]
        keys, values = self.write(torch.cat(pair, 1)[:, :, 0], layer_idx)
        return keys[..., : sizes[0]], values[..., : sizes[1]]

    def write(self, new: Float[Tensor, "n both D"], layer: int) -> tuple[Tensor, Tensor]:
        """Appends one position to every row; `new` has the key heads before the value heads."""
        buffer = self._buffers[layer]
        num_rows = len(new)
        num_heads = buffer.shape[2]
        size = buffer.shape[4]
        if num_heads not in self._places:
            kinds, heads = (torch.arange(num, device=new.device) for num in (2, num_heads))
            slots = kinds[:, None] * self.num_slots + self._slots[:num_rows, None, None]  # [n, 2, 1]
            places = (slots * num_heads + heads) * self._capacity + self._positions[:, None, None]
            self._places[num_heads] = places.flatten()
        rows = new.reshape(-1, size).to(buffer.dtype)
        buffer.view(-1, size).index_copy_(0, self._places[num_heads], rows)
        keys, values = buffer[:, :num_rows, :, : self.max_len].unbind()
        return keys, values

    # -- called by the engine -----------------------------------------------------------------------------------------

    def begin_prefill(self, lengths: Sequence[int]) -> None:
        """Switches the next forward pass to prefill; whatever their lengths, padding behind prompts changes nothing."""
        self._prefill = []

    def end_prefill(self, source: Tensor, slots: Tensor) -> None:
        """Copies row `source[j]` of the prefill to slot `slots[j]`; call `fit` first."""
        if self._prefill is None:
            raise InvariantError("a prompt was copied before it was read")
        fresh = self._prefill
        self._prefill = None
        if not self._buffers:
            shapes = [(k.shape[1], self._capacity, max(k.shape[3], v.shape[3])) for k, v in fresh]
            self._buffers = [  # under autocast values may be narrower than keys, which went through the rotation
                k.new_zeros(2, self.num_slots, *shape, dtype=torch.promote_types(k.dtype, v.dtype))
                for shape, (k, v) in zip(shapes, fresh, strict=True)
            ]
        for buffer, pair in zip(self._buffers, fresh, strict=True):
            for part, new in zip(buffer, pair, strict=True):
                part[slots, :, : new.shape[2], : new.shape[3]] = new.index_select(0, source).to(part.dtype)

    def begin_decode(self, positions: Int[Tensor, " n"], num_long: int, short_len: int) -> None:
        """Switches the next forward pass to decoding: one token per active row, at `positions`.

        Those of the rows behind the first `num_long` are below `short_len`.
        """
        self._positions = positions
        self._places = {}
        ranges = [(0, num_long, self.max_len), (num_long, len(positions), min(short_len, self.max_len))]
        self.ranges = [part for part in ranges if part[0] < part[1]]

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copies slots to other slots in one operation."""
        for buffer in self._buffers:
            buffer[:, targets, :, : self.max_len] = buffer[:, sources, :, : self.max_len]

    def free(self, slots: Sequence[int]) -> None:
        """Rows are finished: what they hold stays until it is written over."""

    def clear(self) -> None:
        """Drops all keys and values."""
        self._buffers = []
        self.max_len = 0
        self._capacity = 0

    def fit(self, length: int) -> bool:
        """Sets M for rows of `length` positions; returns whether it shrank, so that longer slots are written over."""
        previous = self.max_len
        self.max_len = max(length, min(-(-length // BLOCK) * BLOCK, self.max_positions))
        if self.max_len <= self._capacity:
            return self.max_len < previous
        before = self._capacity
        self._capacity = max(self.max_len, min(self._capacity * 5 // 4, self.max_positions))
        for layer, old in enumerate(self._buffers):
            self._buffers[layer] = old.new_zeros(*old.shape[:3], self._capacity, old.shape[4])
            self._buffers[layer][:, :, :, :before] = old
        return False


# -- Decoding row by row with the caches of transformers, for layers that keep other state than keys and values -------
# Recurrent, convolutional and sparse layers (Mamba, Qwen3-Next, LFM2, Jamba, DeepSeek-V3.2 and others) have state of
# other kinds, which transformers' cache classes know. Rows of different length cannot share such a cache, so each has
# one of its own, and a token takes one forward pass for every row.


_ARGUMENTS = ("past_key_values", "cache_params")

# single steps of transformers leave out the least dt that its scan of a whole sequence has: up to 1e-3 nats
INEXACT = frozenset({"nemotron_h", "zamba2"})


def cache_argument(lm: PreTrainedModel) -> str | None:
    """Argument of the model's forward pass that takes its cache; None if it has none, or decodes inexactly with it."""
    if lm.config.get_text_config().model_type in INEXACT:
        return None
    known = inspect.signature(body(lm).forward).parameters
    return next((name for name in _ARGUMENTS if name in known), None)


class RowCaches:
    """A cache of transformers for each slot, with the interface of `SlotCache`.

    Attributes:
        rewinds: recurrent state does not go back to the end of its prompt, so that it serves one completion.
        max_len: positions of the longest row.
        caches: of each slot; None if it is free.
        prompt_lengths: of the prompts in the next forward pass; None if that decodes.
        prompts: caches of the prompts that were read last.
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
        """Gives slot `slots[j]` the cache of prompt `source[j]`, or a copy if others need it, too."""
        left = Counter(source.tolist())
        for number, slot in zip(source.tolist(), slots.tolist(), strict=True):
            left[number] -= 1
            self.caches[slot] = copy.deepcopy(self.prompts[number]) if left[number] else self.prompts[number]
        self.prompts = []
        self.prompt_lengths = None

    def begin_decode(self, positions: Int[Tensor, " n"], num_long: int, short_len: int) -> None:
        """Switches the next forward pass to decoding, which it is anyway: each cache knows its position."""

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
        """Sets the length of the longest row; caches grow by themselves."""
        self.max_len = length
        return False


class RowwiseForward:
    """Hidden states of new tokens, with one forward pass of transformers for each row.

    Args:
        lm: the model.
        caches: of its rows; written to.
        argument: of the model's forward pass that takes a cache.
    """

    reads_ranges = False

    def __init__(self, lm: PreTrainedModel, caches: RowCaches, argument: str) -> None:
        self._lm = lm
        self._caches = caches
        self._argument = argument
        self._policy = CausalPolicy(lm)
        self.packed: dict[str, PackedLinear] = {}

    def logits(self, features: Float[Tensor, "n H"]) -> Float[Tensor, "n V"]:
        """Applies the output head."""
        return self._policy.logits(features)

    def __call__(self, input_ids: Int[Tensor, "n t"], position_ids: Tensor, mask: Tensor) -> Float[Tensor, "n t H"]:
        """Last hidden states; 0 for padding and free rows. The model's cache knows positions and what is visible."""
        lengths = self._caches.prompt_lengths
        caches = self._caches.caches
        found: dict[int, Tensor] = {}
        for row, ids in enumerate(input_ids):
            if lengths is None and caches[row] is None:
                continue
            cache = None if lengths is not None else caches[row]
            new = ids[None] if lengths is None else ids[None, : lengths[row]]
            output = body(self._lm)(input_ids=new, use_cache=True, **{self._argument: cache})
            if output.get(self._argument) is None:
                raise ValueError(f"its forward pass returns no {self._argument}")
            found[row] = output.last_hidden_state[0]
            if lengths is not None:
                self._caches.prompts.append(output[self._argument])
        hidden = next(iter(found.values())).new_zeros(*input_ids.shape, next(iter(found.values())).shape[-1])
        for row, states in found.items():
            hidden[row, : len(states)] = states
        return hidden
