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
    """Input and output gradient of one layer in a backward pass.

    Attributes:
        module: the layer.
        inputs: input activations [B, T, D], or token ids [B, T].
        grads: gradient at the output, [B, T, K].
        row_grads: per-row gradient of the weight, [B, K, D] or [B, K], if it was computed for the norms.
    """

    module: nn.Module
    inputs: Tensor
    grads: Tensor
    row_grads: Tensor | None = None


class InputGrams:
    """Cache of Gram matrices x_t . x_s, shared by layers with the same input (query, key, value; gate, up)."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, torch.Size], Tensor] = {}

    def of(self, inputs: Float[Tensor, "B T D"]) -> Float[Tensor, "B T T"]:
        """Gram matrices of `inputs`, which must outlive the cache."""
        key = (inputs.data_ptr(), inputs.shape)
        if key not in self._known:
            self._known[key] = inputs @ inputs.mT
        return self._known[key]


def linear_squared_norms(record: LayerRecord, grams: InputGrams) -> Float[Tensor, " B"]:
    """||sum_t e_t x_t^T||^2 of each row, by Gram matrices or per-row gradients, whichever is cheaper.

    Per-row gradients are smaller than the activations here, and are kept: their weighted sum is the gradient of the
    update.
    """
    inputs, grads = record.inputs, record.grads
    length, num_inputs, num_outputs = inputs.shape[1], inputs.shape[2], grads.shape[2]
    if length * (num_inputs + num_outputs) < num_inputs * num_outputs:
        return (grams.of(inputs) * (grads @ grads.mT)).sum((1, 2))
    record.row_grads = grads.mT @ inputs
    return record.row_grads.square().sum((1, 2))


def embedding_squared_norms(ids: Int[Tensor, "B T"], grads: Float[Tensor, "B T K"]) -> Float[Tensor, " B"]:
    """Squared norm of each row's gradient of the embedding table: gradients of equal ids add up."""
    same = ids[:, :, None] == ids[:, None, :]
    return ((grads @ grads.mT) * same).sum((1, 2))


def own_parameters(module: nn.Module) -> dict[str, Tensor]:
    """Trainable parameters of the module itself; those of a gathered FSDP1 unit are plain attributes."""
    hidden = {name: value for name, value in vars(module).items() if isinstance(value, Tensor)}
    own = dict(module.named_parameters(recurse=False)) | hidden
    return {name: value for name, value in own.items() if value.requires_grad}


def has_sharded_parameters(module: nn.Module) -> bool:
    """Whether FSDP1, FSDP2 or tensor parallelism shards a trainable parameter; the same on all ranks.

    Unlike `models.weights.is_sharded` it also recognises a module inside of the FSDP1 wrapper.
    """
    return any(
        not isinstance(p, nn.Parameter) or isinstance(p, DTensor) or hasattr(p, "_fsdp_flattened")
        for part in module.modules()
        for p in own_parameters(part).values()
    )


@torch.no_grad()
def elementwise_factor(module: nn.Module, inputs: Tensor) -> Tensor:
    """Factor of the weight in the output of a norm layer, which is linear in its weight.

    Does not read the weight, which may be sharded.
    """
    zero = torch.zeros(inputs.shape[-1], device=inputs.device, dtype=inputs.dtype)
    one_more, nothing = _with_weight(module, zero + 1), _with_weight(module, zero)
    if not nothing(inputs[:1, :1]).any():  # most are 0 for a weight of 0; Gemma multiplies by 1 + weight
        return one_more(inputs)
    return one_more(inputs) - nothing(inputs)


def _with_weight(module: nn.Module, weight: Tensor) -> Callable[[Tensor], Tensor]:
    """Forward function of the module with the given weight and zero bias, without hooks."""
    other = copy.copy(module)
    for name in own_parameters(module):
        vars(other).pop(name, None)
    other._parameters = {**module._parameters, "weight": weight}  # type: ignore[dict-item]
    if "bias" in own_parameters(module):
        other._parameters["bias"] = torch.zeros_like(weight)  # type: ignore[assignment]
    forward: Callable[[Tensor], Tensor] = other.forward
    return forward


def elementwise_squared_norms(record: LayerRecord) -> Float[Tensor, " B"]:
    """Squared norms of layers with an elementwise weight and optional bias (RMS norm, layer norm)."""
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
    """Sums over positions, and over heads for per-head norms."""
    return values.flatten(1, -2).sum(1)


def layer_squared_norms(record: LayerRecord, grams: InputGrams) -> Float[Tensor, " B"]:
    """Squared norm of each row's gradient of the layer's own parameters."""
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
