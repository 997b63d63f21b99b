"""Keys and values of rows that come and go, behind the cache interface of transformers.

n active rows in slots 0..n-1, S slots, M positions, Hk key-value heads, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

BLOCK = 16  # positions


class SlotCache:
    """One row of keys and values per slot, left-aligned. Buffers grow with the longest row that was ever reserved.

    In prefill mode (`begin_prefill`) keys and values are handed back as they come and remembered, so that one prompt's
    can be copied to the slots of all its samples; otherwise each call writes one position of every active row.
    """

    is_compileable = False  # asked by transformers
    layers = ()  # asked by transformers

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.max_len = 0
        self._keys: list[Tensor] = []  # per layer [S, Hk, M, D]
        self._values: list[Tensor] = []
        self._prefill: list[tuple[Tensor, Tensor]] | None = None
        self._all_rows = torch.empty(0, dtype=torch.long)
        self._rows = torch.empty(0, dtype=torch.long)
        self._positions = torch.empty(0, dtype=torch.long)
        self._view = 0

    # -- called by transformers ---------------------------------------------------------------------------------------

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions are always given explicitly."""
        return 0

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Adds the new keys and values, returns all that the layer attends to."""
        if self._prefill is not None:
            self._prefill.append((key, value))
            return key, value
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        keys[self._rows, :, self._positions] = key[:, :, 0]
        values[self._rows, :, self._positions] = value[:, :, 0]
        n = len(self._rows)
        return keys[:n, :, : self._view], values[:n, :, : self._view]

    # -- called by the engine -----------------------------------------------------------------------------------------

    def begin_prefill(self) -> None:
        """The next forward is a prefill."""
        self._prefill = []

    def end_prefill(self, source: Tensor, slots: Tensor) -> None:
        """Copies row `source[j]` of the prefill to slot `slots[j]`."""
        assert self._prefill is not None
        fresh, self._prefill = self._prefill, None
        if not self._keys:
            self._keys = [self._room(key) for key, _ in fresh]
            self._values = [self._room(value) for _, value in fresh]
            self._all_rows = torch.arange(self.num_slots, device=fresh[0][0].device)
        for layer, (key, value) in enumerate(fresh):
            self._keys[layer][slots, :, : key.shape[2]] = key[source]
            self._values[layer][slots, :, : value.shape[2]] = value[source]

    def begin_decode(self, positions: Tensor, view: int) -> None:
        """The next forward adds one token to each active row, at `positions`; attention sees the first `view`."""
        self._positions, self._view = positions, view
        self._rows = self._all_rows[: len(positions)]

    def copy(self, sources: Tensor, targets: Tensor, length: int) -> None:
        """Copies the first `length` positions of slots to other slots, all at once."""
        for buffer in (*self._keys, *self._values):
            buffer[targets, :, :length] = buffer[sources, :, :length]

    def reserve(self, max_len: int) -> None:
        """Makes room for at least `max_len` positions: whole blocks, so that a view of blocks always fits."""
        if max_len <= self.max_len:
            return
        before, self.max_len = self.max_len, -(-max_len // BLOCK) * BLOCK
        for buffers in (self._keys, self._values):
            for layer, old in enumerate(buffers):
                buffers[layer] = self._room(old)
                buffers[layer][:, :, :before] = old

    def _room(self, like: Tensor) -> Tensor:
        return like.new_zeros(self.num_slots, like.shape[1], self.max_len, like.shape[3])
