"""Matrix products of one decoder layer of a Llama-like model: n rows, T tokens each, H hidden size."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from lit_async_rl.engines.embedded.packed import PackedLinear
from lit_async_rl.errors import InvariantError

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


class LayerProducts(ABC):
    """All linear layers of a decoder layer."""

    @abstractmethod
    def qkv(self, x: Float[Tensor, "n T H"]) -> Float[Tensor, "n T K"]:
        """Queries, keys and values of all heads, in order."""

    @abstractmethod
    def add_out(self, x: Float[Tensor, "n T H"], heads: Float[Tensor, "n T D"]) -> Float[Tensor, "n T H"]:
        """Sum of x and the output projection of attention; may overwrite x."""

    @abstractmethod
    def add_mlp(self, x: Float[Tensor, "n T H"], normed: Float[Tensor, "n T H"]) -> Float[Tensor, "n T H"]:
        """Sum of x and down(silu(gate) * up); may overwrite x."""


class PlainProducts(LayerProducts):
    """Products of torch, of layers with the same input as one.

    Args:
        layer: of transformers.
        owns_weights: True lays such parameters side by side in memory, where they stay parameters of their layers, so
            that one product reads them all; False only joins the outputs.
    """

    def __init__(self, layer: Any, owns_weights: bool) -> None:
        self._attention, self._mlp = layer.self_attn, layer.mlp
        self._qkv = _Joined([getattr(layer.self_attn, name) for name in PROJECTIONS[:3]], owns_weights)
        self._gate_up = _Joined([layer.mlp.gate_proj, layer.mlp.up_proj], owns_weights)
        if owns_weights:
            _side_by_side([layer.self_attn.o_proj.weight])
            _side_by_side([layer.mlp.down_proj.weight])

    def qkv(self, x: Tensor) -> Tensor:
        return self._qkv(x)

    def add_out(self, x: Tensor, heads: Tensor) -> Tensor:
        return _plus_linear(x, self._attention.o_proj, heads)

    def add_mlp(self, x: Tensor, normed: Tensor) -> Tensor:
        gate, up = self._gate_up(normed).chunk(2, -1)
        return _plus_linear(x, self._mlp.down_proj, F.silu(gate).mul_(up))


class PackedProducts(LayerProducts):
    """Products of oneDNN with packed weights, which add, multiply and activate in the same pass.

    Args:
        layer: of transformers.
        packed: of all its linear layers.
    """

    def __init__(self, layer: Any, packed: dict[nn.Linear, PackedLinear]) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._qkv = [packed[getattr(attention, name)] for name in PROJECTIONS[:3]]
        self._out = packed[attention.o_proj]
        self._gate, self._up, self._down = (packed[m] for m in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))

    def qkv(self, x: Tensor) -> Tensor:
        return torch.cat([linear(x) for linear in self._qkv], -1)

    def add_out(self, x: Tensor, heads: Tensor) -> Tensor:
        return self._out.combine(heads, "add", x)

    def add_mlp(self, x: Tensor, normed: Tensor) -> Tensor:
        return self._down.combine(self._up.combine(normed, "mul", self._gate(normed, "swish")), "add", x)


class _Joined:
    """Linear layers with the same input, computed as one matrix product."""

    def __init__(self, linears: list[nn.Linear], owns_weights: bool) -> None:
        self._linears = linears
        self._weight = _side_by_side([linear.weight for linear in linears]) if owns_weights else None
        biases = [linear.bias for linear in linears if linear.bias is not None]
        if len(biases) not in (0, len(linears)):
            raise InvariantError("some of the projections have a bias and some do not")
        self._bias = _side_by_side(biases) if owns_weights and biases else None

    def __call__(self, x: Float[Tensor, "n T H"]) -> Float[Tensor, "n T K"]:
        if self._weight is None:
            return torch.cat([_linear(linear, x) for linear in self._linears], -1)
        return F.linear(x, self._weight, self._bias)


def _side_by_side(parameters: Sequence[Tensor]) -> Tensor:
    whole = torch.cat([p.detach() for p in parameters])
    if whole.dim() == 2 and whole.device.type == "cpu":  # the inputs' dimension first: products take 10 % less time
        whole = whole.t().contiguous().t()
    for parameter, part in zip(parameters, whole.split([len(p) for p in parameters]), strict=True):
        parameter.data = part
    return whole


def _plus_linear(x: Tensor, module: Any, y: Tensor) -> Tensor:
    """Returns x + module(y), in place if no cast is needed."""
    if torch.is_autocast_enabled(x.device.type) or module.bias is not None:
        return x + _linear(module, y)
    x.flatten(0, 1).addmm_(y.flatten(0, 1), module.weight.t())
    return x


def _linear(module: Any, x: Tensor) -> Tensor:
    return F.linear(x, module.weight, module.bias)
