"""Linear layers with weights as oneDNN's products read them, in place of the parameters' memory."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

MIN_ELEMENTS = 2**16  # of a weight: below, an operation of oneDNN costs more than its product saves
_MEASURED = ("x86_64", "AMD64")  # other processors have other libraries beneath oneDNN
_ROWS = 64  # hint of the layout; it is the same from eight rows on


class PackedLinear:
    """A linear layer on the CPU; from the first `write` on, its weight is packed: no gradients.

    A product with few rows takes half of the time, because the weight is not rearranged for it. The parameter keeps its
    shape, but all its elements are one NaN in memory: the packed weight is no second copy.
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

    def dense(self) -> Float[Tensor, "K H"]:
        """The weight as it was written; a copy once it is packed."""
        return self.parameter.detach() if self._packed is None else self._packed.to_dense()

    @contextmanager
    def in_module(self, unpacked: bool) -> Iterator[None]:
        """Within it, the layer's own forward pass multiplies by its weight, packed, or unpacked for each pass."""
        linear: Any = self._linear
        linear.forward = (lambda x: F.linear(x, self.dense(), linear.bias)) if unpacked else self.__call__
        try:
            yield
        finally:
            del linear.forward

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
def in_modules(layers: Iterable[PackedLinear]) -> Iterator[None]:
    """Within it, forward passes of transformers multiply by the weights of these layers.

    One of each shape is unpacked, which takes several times as long as a product of few rows.
    """
    seen = set[torch.Size]()
    with ExitStack() as stack:
        for layer in layers:
            shape = layer.parameter.shape
            stack.enter_context(layer.in_module(unpacked=shape not in seen))
            seen.add(shape)
        yield
