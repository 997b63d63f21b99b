"""Copies of weights and of an optimizer's moments in CPU memory; each rank has its own shards."""

from __future__ import annotations

from torch import Tensor, nn
from torch.optim import Optimizer

from lit_async_rl.models.weight_copies import own_piece


def restorable_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Trained parameters, those of a reference that is reset, and buffers."""
    trained = {n: p for n, p in module.named_parameters() if p.requires_grad or hasattr(p, "is_reset")}
    return trained | dict(module.named_buffers())


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Parameters of all groups, in order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def copied_moments(moments: dict[str, object]) -> dict[str, object]:
    """An optimizer's state of one parameter, its tensors copied."""
    return {k: own_piece(v).to("cpu", copy=True) if isinstance(v, Tensor) else v for k, v in moments.items()}


def restore_moments(optimizer: Optimizer, param: nn.Parameter, saved: dict[str, object]) -> None:
    """Restores moments in place, because they may be sharded; removes those that did not exist yet."""
    if not saved:
        optimizer.state.pop(param, None)
        return
    for name, value in saved.items():
        if isinstance(value, Tensor):
            own_piece(optimizer.state[param][name]).copy_(value)
        else:
            optimizer.state[param][name] = value
