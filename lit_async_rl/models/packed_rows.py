"""Layout of shared-prompt packing: which token of which completion stands where in the packed rows.

The input has B rows (completions) of T positions, the packed form R rows of L positions; why, see `models.packing`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from lit_async_rl.errors import InvariantError

_PADDING = -1  # branch of positions that hold no token


@dataclass(frozen=True, kw_only=True)
class PackedRows:
    """Layout of groups in packed rows.

    Attributes:
        source: index of each packed token in the flattened [B, T] input (0 for padding).
        position: position of the token in its input row.
        group: group within the packed row; groups do not attend to each other.
        branch: 0 is the shared prefix, then completions from 1 on; -1 is padding.
        target: index in the flattened [R, L] rows of each needed input position; 0 elsewhere.
    """

    source: Int[Tensor, "R L"]
    position: Int[Tensor, "R L"]
    group: Int[Tensor, "R L"]
    branch: Int[Tensor, "R L"]
    target: Int[Tensor, "B T"]

    @property
    def num_tokens(self) -> int:
        """Number of tokens without padding."""
        return int((self.branch != _PADDING).sum())

    def to(self, device: torch.device) -> PackedRows:
        """The same on another device."""
        return PackedRows(**{name: value.to(device) for name, value in vars(self).items()})


@dataclass(frozen=True)
class _Segment:
    """Positions `begin` to `end` of input row `rows[0]`, computed once for all of `rows`."""

    rows: tuple[int, ...]
    begin: int
    end: int
    branch: int


def pack(
    input_ids: Int[Tensor, "B T"], needed: Bool[Tensor, "B T"], group_index: Sequence[int], row_tokens: int = 0
) -> PackedRows:
    """Packs the tokens that `needed` positions depend on, on the CPU; rows without needed positions are omitted."""
    width = input_ids.shape[1]
    lengths = (needed * torch.arange(1, width + 1)).amax(-1).tolist()  # up to the last position that predicts
    members: dict[int, list[int]] = {}
    for row, index in enumerate(group_index):
        if lengths[row]:
            members.setdefault(index, []).append(row)
    if not members:
        raise InvariantError("no position is needed, so there is nothing to pack")
    # lists: there are many short segments, and each tensor operation costs as much as a long one
    ids = input_ids.tolist()
    groups = [_segments(ids, rows, lengths) for rows in members.values()]
    sizes = [sum(segment.end - segment.begin for segment in group) for group in groups]
    bins = _first_fit(sizes, row_tokens)
    length = max(sum(sizes[n] for n in numbers) for numbers in bins)
    fields: list[list[list[int]]] = [[], [], [], []]
    target = [[0] * width for _ in ids]
    for number, numbers in enumerate(bins):
        columns: tuple[list[int], ...] = [], [], [], []
        source, position, group_of, branch = columns
        for n in numbers:
            for segment in groups[n]:
                part = range(segment.begin, segment.end)
                place, first = number * length + len(source), segment.rows[0] * width
                for row in segment.rows:
                    target[row][segment.begin : segment.end] = range(place, place + len(part))
                source += range(first + segment.begin, first + segment.end)
                position += part
                group_of += [n] * len(part)
                branch += [segment.branch] * len(part)
        for field, values, padding in zip(fields, columns, (0, 0, 0, _PADDING), strict=True):
            field.append(values + [padding] * (length - len(values)))
    tensors = dict(zip(("source", "position", "group", "branch"), map(torch.tensor, fields), strict=True))
    return PackedRows(**tensors, target=torch.tensor(target))


def _segments(ids: Sequence[list[int]], rows: list[int], lengths: Sequence[int]) -> list[_Segment]:
    """Common prefix of the rows, then the remainder of each row."""
    columns = zip(*(ids[row][: lengths[row]] for row in rows), strict=False)  # as many as the shortest has
    shared = sum(1 for _ in takewhile(lambda tokens: len(set(tokens)) == 1, columns))
    tails = [_Segment((row,), shared, lengths[row], branch) for branch, row in enumerate(rows, start=1)]
    return [_Segment(tuple(rows), 0, shared, 0), *tails]


def _first_fit(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """First-fit decreasing bin packing of indices; a size above `capacity` gets a bin of its own."""
    bins: list[list[int]] = []
    room: list[int] = []
    for n in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
        fitting = next((b for b, left in enumerate(room) if sizes[n] <= left), None)
        if fitting is None:
            bins.append([n])
            room.append(capacity - sizes[n])
        else:
            bins[fitting].append(n)
            room[fitting] -= sizes[n]
    return bins
