"""Random projection of a gradient, for inner products of gradients that are not kept.

Count sketch (Charikar, Chen and Farach-Colton 2002) with fixed positions: entry i of the vector is added, with a random
sign, to entry i mod m of the sketch. Inner products of sketches are unbiased estimates of those of the vectors, and the
cosine has the standard error sqrt((1 + c^2) / m), 0.004 to 0.0055 for m = 65,521, whatever the size of the model. It is
larger where few entries dominate both vectors and fall on the same places; m is prime, so that the dimensions of a
layer do not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

SIZE = 65_521  # m
OFFSETS = 2**20  # signs of a row of m entries begin at one of so many places
ROWS_AT_ONCE = 64  # on an accelerator, where a kernel launch costs more than the memory
SEED = 0


class Sketch:
    """Projects vectors given in pieces; the same signs for all vectors of the same pieces.

    Args:
        device: of the vectors.
    """

    def __init__(self, device: torch.device) -> None:
        self._generator = torch.Generator().manual_seed(SEED)
        signs = torch.randint(0, 2, (OFFSETS + SIZE,), generator=self._generator, dtype=torch.int8)
        self._signs = (2 * signs - 1).to(device, torch.float32)
        self._offsets: list[int] = []
        self._rows_at_once = 1 if device.type == "cpu" else ROWS_AT_ONCE

    @torch.no_grad()
    def __call__(self, pieces: Sequence[Tensor]) -> Float[Tensor, " m"]:
        """The sketch of the concatenated pieces."""
        out = self._signs.new_zeros(SIZE)
        block = 0
        for piece in pieces:
            for part in piece.reshape(-1).split(self._rows_at_once * SIZE):
                self._add(out, part, self._offset(block))
                block += 1
        return out

    def _add(self, out: Tensor, part: Tensor, offset: int) -> None:
        num_rows, rest = divmod(len(part), SIZE)
        if num_rows:
            rows = part[: num_rows * SIZE].view(num_rows, SIZE).to(out.dtype)
            signs = self._signs.as_strided((num_rows, SIZE), (1, 1), offset)  # each row one place further on
            out.addcmul_(rows[0], signs[0]) if num_rows == 1 else out.add_((rows * signs).sum(0))
        if rest:
            begin = offset + num_rows
            out[:rest].addcmul_(part[-rest:].to(out.dtype), self._signs[begin : begin + rest])

    def _offset(self, block: int) -> int:
        if block >= len(self._offsets):
            more = torch.randint(0, OFFSETS - ROWS_AT_ONCE, (1024,), generator=self._generator)
            self._offsets += more.tolist()
        return self._offsets[block]
