"""Parameter gradients from a ghost tape, without another backward pass.

Once sum_t c_it log pi(y_it) has been differentiated to the outputs of all layers, for the norms, the gradient of any
weighted sum over trajectories needs only the last product of each layer, dW = sum_i a_i sum_t e_it x_it^T
("book-keeping", Bu et al. 2023, arXiv:2210.00038, for differentially private training). So the norms cost no second
backward pass.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from lit_async_rl.baselines.ghost_norms import GhostTape
from lit_async_rl.baselines.layer_norms import LayerRecord, has_sharded_parameters, own_parameters


def can_keep_books(tape: GhostTape) -> bool:
    """Whether the tape yields parameter gradients: parameters are not sharded, and the head ran in a single chunk."""
    return not has_sharded_parameters(tape.policy) and tape.is_complete


def surrogate_loss(tape: GhostTape, row_weights: Float[Tensor, " B"], value: Float[Tensor, ""]) -> Float[Tensor, ""]:
    """Scalar with the given `value` and the gradient of sum_i a_i sum_t c_it log pi(y_it), a = `row_weights`.

    Implemented as sum_p <p, G_p> over parameters p with constant gradients G_p, so parameter hooks and loss scaling
    work as usual.
    """
    total = torch.zeros((), device=row_weights.device)
    for record in tape.layer_records:
        total = total + _layer_term(record, row_weights)
    return total - total.detach() + value.detach()


def _layer_term(record: LayerRecord, row_weights: Tensor) -> Tensor:
    """sum_p <p, G_p> over the parameters of one layer."""
    module, inputs = record.module, record.inputs
    # float32, as the weights of rows are, also where activations are bfloat16
    grads = record.grads * row_weights.view(-1, *[1] * (record.grads.ndim - 1))
    flat = grads.flatten(0, -2)
    own = own_parameters(module)
    total = flat.new_zeros(())
    if "weight" in own:
        weight = own["weight"]
        if record.row_grads is not None:
            gradient = (row_weights @ record.row_grads.flatten(1).to(row_weights.dtype)).view(
                record.row_grads.shape[1:]
            )
        elif isinstance(module, nn.Embedding):
            gradient = torch.zeros_like(weight, dtype=flat.dtype).index_add_(0, inputs.flatten(), flat)
        else:
            gradient = flat.mT @ inputs.flatten(0, -2).to(flat.dtype)
        total = total + (weight * (gradient.mT if isinstance(module, Conv1D) else gradient)).sum()
    if "bias" in own:
        total = total + (own["bias"] * flat.sum(0)).sum()
    return total
