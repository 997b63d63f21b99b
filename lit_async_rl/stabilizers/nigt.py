"""NIGT optimizer: normalised momentum with gradients at an extrapolated point."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lit_async_rl.utils.checks import check_range


class NIGT(Optimizer):
    """Normalised SGD with implicit gradient transport: the optimizer of Rennala and Malenia NIGT, arXiv:2509.24305.

        d_t     = (1 - eta) d_{t-1} + eta g_t,  g_t the gradient at x_t;  d_0 = g_0
        theta_{t+1} = theta_t - lr d_t / ||d_t||
        x_{t+1} = theta_{t+1} + ((1 - eta) / eta) (theta_{t+1} - theta_t)

    The module's parameters, with which rollouts are sampled, are x_t. theta_t is in the optimizer's state, and `swap`
    exchanges the two. For Rennala, g_t averages the first M gradients to finish, all at x_t: `max_staleness: 0` with
    `admission: Drop` and M = `groups_per_step`; with `SourceMean` it is Malenia's average. Every step has length lr, so
    lr should fall to 0. The norm is over all parameters; under FSDP1 it would cover this rank's shard only, so use
    FSDP2. d_0 = g_0 as in Cutkosky and Mehta, arXiv:2002.03305, who introduced the method; the paper's first step could
    not be checked.

    Args:
        params: parameters or parameter groups.
        lr: alpha, the length of a step. The paper tries 2^-10 ... 2^-1.
        eta: weight of the newest gradient; 1 is normalised SGD. The paper tries 0.001, 0.01 and 0.1.

    Raises:
        ValueError: a setting is out of range.
    """

    def __init__(self, params: Iterable[Tensor] | Iterable[dict[str, Any]], lr: float = 1e-2, eta: float = 0.1) -> None:
        check_range("NIGT", ">= 0", lr=lr)
        check_range("NIGT", "in (0, 1]", eta=eta)
        super().__init__(params, dict(lr=lr, eta=eta))

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Makes one step. Parameters without gradient are unchanged, as are all if every momentum is 0."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        moved = [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None]
        for group, p in moved:
            state = self.state[p]
            if not state:
                state["momentum"] = p.grad.clone()
                state["theta"] = p.clone()
            else:
                state["momentum"].mul_(1 - group["eta"]).add_(p.grad, alpha=group["eta"])
        norm = _norm([self.state[p]["momentum"] for _, p in moved])
        for group, p in moved if norm > 0 else ():
            state = self.state[p]
            step = state["momentum"] * (-group["lr"] / norm)
            state["theta"].add_(step)
            p.copy_(state["theta"]).add_(step, alpha=(1 - group["eta"]) / group["eta"])
        return loss

    @torch.no_grad()
    def swap(self) -> None:
        """Exchanges x_t and theta_t, to evaluate or export theta_t; call it again before the next step."""
        for p, state in self.state.items():
            theta = state["theta"].clone()
            state["theta"].copy_(p)
            p.copy_(theta)


def _norm(tensors: list[Tensor]) -> float:
    """Norm over all tensors and shards. A collective if they are DTensors: all ranks call."""
    if not tensors:
        return 0.0
    norm: Any = torch.nn.utils.get_total_norm(tensors)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
