"""Linear layers whose weights are kept as oneDNN's products read them, in place of the parameters' own memory."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

MIN_ELEMENTS = 2**16  # of a weight: below, an operation of oneDNN costs more than its product saves
_MEASURED = ("x86_64", "AMD64")  # other processors have other libraries beneath oneDNN
_ROWS = 64  # hint of the layout; it is the same from eight rows on


class PackedLinear:
    """A linear layer on the CPU; from the first `write` on, its weight is packed: no gradients.

    A product with few rows takes half of the time, because nothing of the weight is rearranged for it. The parameter
    keeps its shape, but all its elements are one NaN in memory: the packed weight is no second copy.
    """

    def __init__(self, linear: nn.Linear) -> None:
        self._linear = linear
        self._packed: Tensor | None = None

    @staticmethod
    def supports(linears: Sequence[nn.Linear]) -> bool:
        """Whether packing is possible here, and worth it: the mean weight has `MIN_ELEMENTS`."""
        weights = [linear.weight for linear in linears]
        has_onednn = torch.backends.mkldnn.is_available() and platform.machine() in _MEASURED
        if not has_onednn or sum(weight.numel() for weight in weights) < MIN_ELEMENTS * len(weights):
            return False
        possible = {torch.float32} | ({torch.bfloat16} if torch.ops.mkldnn._is_mkldnn_bf16_supported() else set())
        return all(weight.device.type == "cpu" and weight.dtype in possible for weight in weights)

    @property
    def parameter(self) -> Tensor:
        """The layer's weight; NaN once it is packed."""
        return self._linear.weight

    def write(self, weight: Float[Tensor, "K H"]) -> None:
        """Packs a weight of the parameter's type."""
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _ROWS)
        self.parameter.data = torch.full((), torch.nan, dtype=weight.dtype).expand(weight.shape)

    def unpack(self) -> None:
        """Gives the parameter its weight back, until the next `write`."""
        if self._packed is not None:
            self.parameter.data, self._packed = self._packed.to_dense(), None

    def __call__(self, x: Float[Tensor, "*rows H"], activation: str = "none") -> Float[Tensor, "*rows K"]:
        """activation(x W' + b); `activation` is none or swish."""
        weight: Any = self._linear.weight if self._packed is None else self._packed
        return torch.ops.mkldnn._linear_pointwise(x, weight, self._linear.bias, activation, [], "")

    def combine(
        self, x: Float[Tensor, "*rows H"], how: str, other: Float[Tensor, "*rows K"]
    ) -> Float[Tensor, "*rows K"]:
        """(x W' + b) + other, or times; `how` is add or mul."""
        weight: Any = self._linear.weight if self._packed is None else self._packed
        return torch.ops.mkldnn._linear_pointwise(x, other, weight, self._linear.bias, how)


@contextmanager
def unpacked(layers: Iterable[PackedLinear]) -> Iterator[None]:
    """Within it, the parameters hold their weights: for passes that read them."""
    layers = list(layers)
    for layer in layers:
        layer.unpack()
    try:
        yield
    finally:
        for layer in layers:
            layer.write(layer.parameter)
