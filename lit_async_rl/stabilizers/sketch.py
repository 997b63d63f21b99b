"""Random projection of a gradient, for inner products of gradients that are not kept.

Count sketch (Charikar, Chen and Farach-Colton 2002) by rows: the vector is cut into rows of m entries, each of which is
multiplied by random signs, rotated by a random number of places, and added. Inner products of sketches are unbiased
estimates of those of the vectors, and the cosine has the standard error sqrt((1 + c^2) / m) over the random numbers,
0.004 to 0.0055 for m = 65,521, whatever the size of the model. m is prime, so that the dimensions of a layer do not all
fall on the same places.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

SIZE = 65_521  # m
OFFSETS = 2**20  # signs of a row of m entries begin at one of so many places
ROWS_AT_ONCE = 8  # on an accelerator, where a kernel launch costs more than the memory
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
        self._offsets: list[tuple[int, int]] = []  # of each block: in the signs, and its rotation
        self._rows_at_once = 1 if device.type == "cpu" else ROWS_AT_ONCE

    @torch.no_grad()
    def __call__(self, pieces: Sequence[Tensor]) -> Float[Tensor, " m"]:
        """The sketch of the concatenated pieces."""
        out = self._signs.new_zeros(SIZE)
        block = 0
        for piece in pieces:
            for part in piece.reshape(-1).split(self._rows_at_once * SIZE):
                self._add(out, part, *self._offset(block))
                block += 1
        return out

    def _add(self, out: Tensor, part: Tensor, offset: int, rotation: int) -> None:
        num_rows, rest = divmod(len(part), SIZE)
        if num_rows:
            rows = part[: num_rows * SIZE].view(num_rows, SIZE).to(out.dtype)
            signs = self._signs.as_strided((num_rows, SIZE), (1, 1), offset)  # each row one place further on
            signed = rows[0] * signs[0] if num_rows == 1 else (rows * signs).sum(0)
            _add_rotated(out, signed, rotation)
        if rest:
            begin = offset + num_rows
            _add_rotated(out, part[-rest:].to(out.dtype) * self._signs[begin : begin + rest], rotation)

    def _offset(self, block: int) -> tuple[int, int]:
        while block >= len(self._offsets):
            limits = OFFSETS - ROWS_AT_ONCE, SIZE
            signs, rotations = (torch.randint(0, n, (1024,), generator=self._generator).tolist() for n in limits)
            self._offsets += zip(signs, rotations, strict=True)
        return self._offsets[block]


def _add_rotated(out: Tensor, values: Tensor, rotation: int) -> None:
    """Adds values from place `rotation` on, and from the beginning once the end is reached."""
    first = min(len(values), SIZE - rotation)
    out[rotation : rotation + first].add_(values[:first])
    out[: len(values) - first].add_(values[first:])
