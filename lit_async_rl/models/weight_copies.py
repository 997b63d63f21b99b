"""Copies of trained weights in CPU memory, put back for a while; each rank has its own shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def trained_weights(module: nn.Module) -> dict[str, Tensor]:
    """The parts on this rank of all parameters that train."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()  # the root keeps what it gathered for a forward pass without gradients
    return {name: own_piece(p) for name, p in module.named_parameters() if p.requires_grad}


def num_bytes(module: nn.Module) -> int:
    """Size of the trained weights on all ranks together, at least 1; the same on each rank."""
    return sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad) or 1


def copy_weights(module: nn.Module) -> dict[str, Tensor]:
    """Copies of the trained weights."""
    return {name: piece.to("cpu", copy=True) for name, piece in trained_weights(module).items()}


@contextmanager
def with_weights(module: nn.Module, copies: Mapping[str, Tensor] | None) -> Iterator[None]:
    """Context in which `module` has the weights in `copies`; afterwards it has its own again, bit for bit.

    Args:
        module: not wrapped by FSDP1, which keeps gathered weights.
        copies: of `copy_weights`; None changes nothing.
    """
    if copies is None:
        yield
        return
    own = copy_weights(module)
    try:
        _put(module, copies)
        yield
    finally:
        _put(module, own)


@torch.no_grad()
def _put(module: nn.Module, copies: Mapping[str, Tensor]) -> None:
    for name, piece in trained_weights(module).items():
        piece.copy_(copies[name])


def own_piece(tensor: Tensor) -> Tensor:
    """The part of a tensor on this rank."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
