"""Squared norms of each row's gradient for one layer, from its input and the gradient at its output.

B rows, T positions, D inputs and K outputs of a layer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.pytorch_utils import Conv1D


@dataclass
class LayerRecord:
    """One layer's part in a backward pass.

    Attributes:
        inputs: of the layer, [B, T, D], or token ids [B, T].
        grads: gradient at its output, [B, T, K].
        row_grads: gradient of the weight of each row, [B, K, D] or [B, K], if the norms needed it.
    """

    module: nn.Module
    inputs: Tensor
    grads: Tensor
    row_grads: Tensor | None = None


class InputGrams:
    """x_t . x_s of each row, computed once for layers with the same input (query, key and value; gate and up)."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, torch.Size], Tensor] = {}

    def of(self, inputs: Float[Tensor, "B T D"]) -> Float[Tensor, "B T T"]:
        """The Gram matrices of inputs that are alive as long as this is."""
        key = (inputs.data_ptr(), inputs.shape)
        if key not in self._known:
            self._known[key] = inputs @ inputs.mT
        return self._known[key]


def linear_squared_norms(record: LayerRecord, grams: InputGrams) -> Float[Tensor, " B"]:
    """||sum_t e_t x_t^T||^2 of each row, by whichever of both ways needs fewer multiplications.

    Where gradients of rows are made they are smaller than the layer's activations, and are kept: their weighted sum is
    the gradient of the update.
    """
    inputs, grads = record.inputs, record.grads
    length, num_inputs, num_outputs = inputs.shape[1], inputs.shape[2], grads.shape[2]
    if length * (num_inputs + num_outputs) < num_inputs * num_outputs:
        return (grams.of(inputs) * (grads @ grads.mT)).sum((1, 2))
    record.row_grads = grads.mT @ inputs
    return record.row_grads.square().sum((1, 2))


def embedding_squared_norms(ids: Int[Tensor, "B T"], grads: Float[Tensor, "B T K"]) -> Float[Tensor, " B"]:
    """Squared norm of what each row adds to the table: gradients of equal ids add up."""
    same = ids[:, :, None] == ids[:, None, :]
    return ((grads @ grads.mT) * same).sum((1, 2))


def own_parameters(module: nn.Module) -> dict[str, Tensor]:
    """What of a module itself trains. FSDP1 hides the parameters of a gathered unit: they are attributes then."""
    hidden = {name: value for name, value in vars(module).items() if isinstance(value, Tensor)}
    own = dict(module.named_parameters(recurse=False)) | hidden
    return {name: value for name, value in own.items() if value.requires_grad}


def is_sharded(module: nn.Module) -> bool:
    """Whether FSDP1, FSDP2 or tensor parallelism holds some trained parameter; the same on all ranks."""
    return any(
        not isinstance(p, nn.Parameter) or isinstance(p, DTensor) or hasattr(p, "_fsdp_flattened")
        for part in module.modules()
        for p in own_parameters(part).values()
    )


@torch.no_grad()
def elementwise_factor(module: nn.Module, inputs: Tensor) -> Tensor:
    """What a norm layer multiplies its weight with: its output is linear in the weight, so what one more adds.

    Does not look at the weight, which may be sharded.
    """
    zero = torch.zeros(inputs.shape[-1], device=inputs.device, dtype=inputs.dtype)
    one_more, nothing = _with_weight(module, zero + 1), _with_weight(module, zero)
    if not nothing(inputs[:1, :1]).any():  # most are 0 without a weight; Gemma's multiply by one more than it
        return one_more(inputs)
    return one_more(inputs) - nothing(inputs)


def _with_weight(module: nn.Module, weight: Tensor) -> Callable[[Tensor], Tensor]:
    """The module's function with other parameters, without its hooks."""
    other = copy.copy(module)
    for name in own_parameters(module):
        vars(other).pop(name, None)
    other._parameters = {**module._parameters, "weight": weight}  # type: ignore[dict-item]
    if "bias" in own_parameters(module):
        other._parameters["bias"] = torch.zeros_like(weight)  # type: ignore[assignment]
    forward: Callable[[Tensor], Tensor] = other.forward
    return forward


def elementwise_squared_norms(record: LayerRecord) -> Float[Tensor, " B"]:
    """For layers that multiply by a vector and may add one (RMS norm, layer norm)."""
    module, grads = record.module, record.grads
    total = torch.zeros(len(grads), device=grads.device)
    own = own_parameters(module)
    if "weight" in own:
        record.row_grads = _sum_positions(grads * elementwise_factor(module, record.inputs))
        total = total + record.row_grads.square().sum(-1)
    if "bias" in own:
        total = total + _sum_positions(grads).square().sum(-1)
    return total


def _sum_positions(values: Float[Tensor, "B *T K"]) -> Float[Tensor, "B K"]:
    """Over positions, and over heads where a norm works on each."""
    return values.flatten(1, -2).sum(1)


def layer_squared_norms(record: LayerRecord, grams: InputGrams) -> Float[Tensor, " B"]:
    """||gradient of the layer's own parameters||^2 of each row."""
    module, inputs, grads = record.module, record.inputs, record.grads
    if isinstance(module, nn.Embedding):
        return embedding_squared_norms(inputs, grads)
    if not isinstance(module, nn.Linear | Conv1D):
        return elementwise_squared_norms(record)
    own = own_parameters(module)
    norms = torch.zeros(len(grads), device=grads.device)
    if "weight" in own:
        norms = norms + linear_squared_norms(record, grams)
    if "bias" in own:
        norms = norms + grads.sum(1).square().sum(-1)
    return norms
