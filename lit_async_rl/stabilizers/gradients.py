"""Gradients as vectors: global inner products whatever the sharding.

Right for one device, DDP, FSDP1 (`use_orig_params` or not), FSDP2, hybrid sharding and tensor parallelism. Every rank
holds a piece of the vector; a piece that several ranks hold alike (DDP, replicated tensors) counts once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from jaxtyping import Float64
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lit_async_rl.errors import InvariantError

Pieces = Sequence[Tensor | None]

# float32 dot products of longer vectors lose digits; their partial sums are added in float64
CHUNK = 2**18


class GradSpace:
    """The space that the gradients of some parameters live in, divided into groups (of an optimizer, say).

    Built from parameters, never from `.grad`: a rank whose shard is empty has no gradient, and must still take part in
    every collective. A vector is a list with this rank's piece of each parameter; None counts as zero.

    Args:
        root: outermost module (`trainer.strategy.model`); FSDP1 keeps its process groups there.
        parameter_groups: parameters of each group.
    """

    def __init__(self, root: nn.Module, parameter_groups: Sequence[Iterable[nn.Parameter]]) -> None:
        groups = [list(group) for group in parameter_groups]
        self.params = [p for group in groups for p in group]
        self.group_of = [index for index, group in enumerate(groups) for _ in group]
        self.num_groups = len(groups)
        if not self.params:
            raise ValueError("no parameters: their gradients span no space")
        fsdp1 = _fsdp1_process_groups(root)
        # parameters that sum over the same process groups share a collective; the order is that of first appearance
        self._buckets: list[tuple[tuple[dist.ProcessGroup, ...], list[int]]] = []
        for index, param in enumerate(self.params):
            process_groups = _process_groups(param, fsdp1)
            for known, members in self._buckets:
                if known == process_groups:
                    members.append(index)
                    break
            else:
                self._buckets.append((process_groups, [index]))

    def gradients(self) -> list[Tensor | None]:
        """This rank's pieces of the gradients; writing to them in place changes the gradients."""
        return [None if p.grad is None else _local(_checked(p)) for p in self.params]

    @torch.no_grad()
    def dots(self, *pairs: tuple[Pieces, Pieces]) -> Float64[Tensor, "P G"]:
        """Global <a, b> of each of P pairs in each of G groups, on the CPU. A collective: all ranks call it alike."""
        sums = self._dots(pairs, torch.float32)
        if not sums.isfinite().all():  # squares of 1e20 overflow float32 though the vector itself does not
            sums = self._dots(pairs, torch.float64)
        return sums

    def norms(self, vector: Pieces) -> Float64[Tensor, " G"]:
        """Global Euclidean norm in each group. A collective."""
        return self.dots((vector, vector))[0].sqrt()

    @torch.no_grad()
    def add_(self, vector: Pieces, other: Pieces, coefficients: Sequence[float]) -> None:
        """Adds coefficient * other in place, with one coefficient for each group. No communication."""
        for mine, others, group in zip(vector, other, self.group_of, strict=True):
            if mine is not None and others is not None and coefficients[group] != 0:
                mine.add_(others, alpha=coefficients[group])

    @torch.no_grad()
    def scale_(self, vector: Pieces, factors: Sequence[float]) -> None:
        """Multiplies in place, with one factor for each group; a factor of 1 touches nothing."""
        for mine, group in zip(vector, self.group_of, strict=True):
            if mine is not None and factors[group] != 1:
                mine.mul_(factors[group])

    def drop(self, groups: Iterable[int]) -> None:
        """Sets the gradients of these groups to None, so that no optimizer touches weights, moments or decay."""
        dropped = set(groups)
        for param, group in zip(self.params, self.group_of, strict=True):
            if group in dropped:
                param.grad = None

    def _dots(self, pairs: Sequence[tuple[Pieces, Pieces]], dtype: torch.dtype) -> Tensor:
        device = _local(self.params[0]).device
        wide = torch.float32 if device.type == "mps" else torch.float64
        total = torch.zeros(len(pairs), self.num_groups, dtype=wide, device=device)
        for process_groups, members in self._buckets:
            part = torch.zeros_like(total)
            for row, (a, b) in enumerate(pairs):
                terms: list[list[Tensor]] = [[] for _ in range(self.num_groups)]
                for index in members:
                    x, y = a[index], b[index]
                    if x is not None and y is not None and x.numel():
                        terms[self.group_of[index]] += _partial_dots(x, y, min(dtype, wide, key=lambda d: d.itemsize))
                for group, values in enumerate(terms):
                    if values:
                        part[row, group] = torch.stack(values).to(wide).sum()
            for process_group in process_groups:
                dist.all_reduce(part, group=process_group)
            total += part
        return total.cpu().double()


class GradSpaces:
    """The space of each optimizer's parameters, made once and again when parameters are added (unfreezing, say).

    Args:
        per_parameter_group: keep an optimizer's parameter groups apart instead of treating all as one vector.
    """

    def __init__(self, per_parameter_group: bool = False) -> None:
        self.per_parameter_group = per_parameter_group
        self._known: dict[int, GradSpace] = {}

    def of(self, root: nn.Module, optimizer: Optimizer) -> GradSpace:
        """The optimizer's space."""
        known = self._known.get(id(optimizer))
        groups = [list(group["params"]) for group in optimizer.param_groups]
        if known is None or len(known.params) != sum(map(len, groups)):
            split = groups if self.per_parameter_group else [[p for group in groups for p in group]]
            known = self._known[id(optimizer)] = GradSpace(root, split)
        return known


def _partial_dots(x: Tensor, y: Tensor, dtype: torch.dtype) -> list[Tensor]:
    chunks = zip(x.reshape(-1).split(CHUNK), y.reshape(-1).split(CHUNK), strict=True)
    return [torch.dot(p.to(dtype), q.to(dtype)) for p, q in chunks]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _checked(param: nn.Parameter) -> Tensor:
    grad = param.grad
    if grad is None:
        raise InvariantError("a parameter without a gradient")
    if grad.is_sparse:
        raise ValueError(f"the gradient of a parameter of shape {tuple(param.shape)} is sparse: use sparse=False")
    if isinstance(grad, DTensor) and isinstance(param, DTensor) and grad.placements != param.placements:
        # a pending sum over ranks, say: the optimizer would do it anyway, and a norm before it would be wrong
        param.grad = grad = grad.redistribute(placements=param.placements)
    return grad


def _process_groups(
    param: nn.Parameter, fsdp1: dict[int, tuple[dist.ProcessGroup, ...]]
) -> tuple[dist.ProcessGroup, ...]:
    if isinstance(param, DTensor):
        mesh, placements = param.device_mesh, param.placements
        return tuple(mesh.get_group(n) for n, p in enumerate(placements) if not p.is_replicate() and mesh.size(n) > 1)
    return fsdp1.get(id(param), ())


def _fsdp1_process_groups(root: nn.Module) -> dict[int, tuple[dist.ProcessGroup, ...]]:
    """Parameter (by identity) to the groups that hold its shards; FSDP1's parameters look like plain tensors."""
    if not (dist.is_available() and dist.is_initialized()):
        return {}
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    found: dict[int, tuple[dist.ProcessGroup, ...]] = {}
    for module in root.modules():
        if not isinstance(module, FullyShardedDataParallel) or module._handle is None:
            continue
        if module.process_group is None:
            raise InvariantError("a sharded module without a process group")
        groups = () if module.sharding_strategy == ShardingStrategy.NO_SHARD else (module.process_group,)
        flat = module._handle.flat_param
        for param in [flat, *(flat._params or [])]:
            found[id(param)] = groups
    return found
