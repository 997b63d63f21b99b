"""Trajectories in packed rows: hidden states and gradients between the packed layout and one row per trajectory.

B trajectories of T positions, R packed rows of L positions, C columns that hold tokens of a single trajectory.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lit_async_rl.models.packed_rows import PackedRows


def gathered(values: Float[Tensor, "R L H"], rows: PackedRows) -> Float[Tensor, "B T H"]:
    """Values at the positions of each trajectory; arbitrary where nothing was needed."""
    return values.flatten(0, 1)[rows.target]


def packed(grads: Float[Tensor, "B T H"], columns: slice, rows: PackedRows) -> Float[Tensor, "R L H"]:
    """Gradients at packed positions, summed over trajectories that share one; only `columns` are not 0."""
    total = grads.new_zeros(rows.branch.numel(), grads.shape[-1])
    total.index_add_(0, rows.target[:, columns].flatten(), grads[:, columns].flatten(0, 1))
    return total.view(*rows.branch.shape, -1)


@dataclass(frozen=True)
class OwnPositions:
    """Positions that belong to one trajectory.

    Attributes:
        columns: the range of input positions they lie in.
        place: index in the flattened packed rows.
        is_own: whether the trajectory owns the position.
        known: inputs that have been gathered, because layers share them (query, key, value; gate, up).
    """

    columns: slice
    place: Int[Tensor, "B C"]
    is_own: Bool[Tensor, "B C"]
    known: dict[tuple[int, torch.Size], Tensor] = field(default_factory=dict)

    def of_inputs(self, inputs: Float[Tensor, "R L *D"] | Int[Tensor, "R L"]) -> Tensor:
        """A layer's inputs, which must outlive this, one row per trajectory."""
        key = (inputs.data_ptr(), inputs.shape)
        if key not in self.known:
            self.known[key] = inputs.flatten(0, 1)[self.place]
        return self.known[key]

    def of_grads(self, grads: Float[Tensor, "R L *K"]) -> Tensor:
        """Gradients at a layer's outputs, 0 where the position is not the trajectory's own."""
        values = grads.flatten(0, 1)[self.place]
        return values * self.is_own.view(*self.is_own.shape, *[1] * (values.ndim - 2))


def own_positions(rows: PackedRows) -> OwnPositions:
    """Positions of the tokens that a trajectory does not share with the others of its group."""
    target, source, branch = rows.target, rows.source.flatten(), rows.branch.flatten()
    here = torch.arange(target.numel(), device=target.device).view_as(target)
    is_own = (source[target] == here) & (branch[target] > 0)
    used = is_own.any(0).nonzero()[:, 0].tolist()
    columns = slice(used[0], used[-1] + 1) if used else slice(0, 1)
    return OwnPositions(columns, target[:, columns], is_own[:, columns])
