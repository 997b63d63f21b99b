"""Heads of the sampling distributions of the embedded engine's rows: S slots, C columns, k tokens."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lit_async_rl.sampler_head import SamplerHead


class HeadRecorder:
    """Records entropy and likeliest tokens of every sampled token, while any request asks for it.

    Costs nothing otherwise. Its tensors grow with the number of columns and with the largest k.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self.width: int | None = None  # largest k that was asked for; None records nothing
        self._entropy = torch.zeros(num_slots, 0, device=device)
        self._ids = torch.zeros(num_slots, 0, 0, dtype=torch.int32, device=device)
        self._logprobs = torch.zeros(num_slots, 0, 0, device=device)

    def reserve(self, columns: int, width: int | None) -> None:
        """Makes room for `columns` tokens per row and `width` entries of each; None asks for no recording."""
        if width is None and self.width is None:
            return
        self.width = max(width or 0, self.width or 0)
        slots, known, entries = self._ids.shape
        if columns > known or self.width > entries:
            columns, entries = max(columns, known), max(self.width, entries)
            self._entropy = _grow(self._entropy, (slots, columns), 0.0)
            self._ids = _grow(self._ids, (slots, columns, entries), 0.0)
            self._logprobs = _grow(self._logprobs, (slots, columns, entries), -torch.inf)

    def append(self, rows: Int[Tensor, " n"], columns: Int[Tensor, " n"], log_p: Float[Tensor, "n V"]) -> None:
        """Records the distributions that the tokens in `columns` of `rows` are sampled from."""
        if self.width is None:
            return
        possible = log_p > -torch.inf
        self._entropy[rows, columns] = -torch.where(possible, log_p.exp() * log_p, 0.0).sum(-1)
        best = log_p.topk(min(self.width, log_p.shape[-1]), dim=-1)
        here = slice(0, best.values.shape[-1])
        self._ids[rows, columns, here] = best.indices.to(torch.int32)
        self._logprobs[rows, columns, here] = best.values

    def of(self, row: int, length: int, width: int) -> SamplerHead:
        """Head of the first `length` tokens of a row, with `width` entries."""
        parts = (self._entropy[row, :length], self._ids[row, :length, :width], self._logprobs[row, :length, :width])
        return SamplerHead(*(part.to("cpu", copy=True) for part in parts))

    def move(self, sources: Int[Tensor, " k"], targets: Int[Tensor, " k"]) -> None:
        """Moves rows to other slots."""
        if self.width is not None:
            for values in (self._entropy, self._ids, self._logprobs):
                values[targets] = values[sources]

    def forget(self) -> None:
        """Stops recording until the next request that asks for it."""
        self.width = None


def _grow(values: Tensor, shape: tuple[int, ...], fill: float) -> Tensor:
    grown = values.new_full(shape, fill)
    grown[tuple(slice(0, size) for size in values.shape)] = values
    return grown
