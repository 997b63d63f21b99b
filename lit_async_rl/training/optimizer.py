"""The default optimizer, and what rounding leaves of its updates."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from lit_async_rl.stabilizers.step_lr import GO_WITH_MOMENTS, has_plain_settings
from lit_async_rl.training.schedules import RateSchedule
from lit_async_rl.utils.lightning_types import AnyTrainer

LEARNING_RATE = 1e-6  # where neither the setting nor an optimizer names one
FUSED = ("cpu", "cuda", "mps", "xpu")  # devices of torch's fused AdamW
SAMPLE = 4096  # weights of each tensor that are looked at
WITH_MOMENTS = ("amsgrad", "centered")  # settings of torch's optimizers
LOST = 0.5  # share of weights that do not change, from which on there is a warning
log = logging.getLogger(__name__)


def make_optimizer(make: Callable[..., Optimizer], parameters: Sequence[nn.Parameter]) -> Optimizer:
    """The optimizer that `make` returns.

    Raises:
        ValueError: it refuses its settings.
    """
    try:
        return make(parameters)
    except (TypeError, ValueError) as error:
        raise ValueError(f"model.optimizer cannot be made: {error}") from error


def gradients(optimizer: Optimizer) -> Iterator[Tensor]:
    """Gradients of an optimizer's parameters that have one."""
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if parameter.grad is not None:
            yield parameter.grad


def make_adamw(
    parameters: Sequence[nn.Parameter], trainer: AnyTrainer, lr: float | None = None, **settings: Any
) -> Optimizer:
    """AdamW, fused where torch has it (several times faster on the CPU, too); without a rate, `LEARNING_RATE`.

    Not fused with `precision: 16-mixed`, where a fused optimizer unscales gradients within its step, so that Lightning
    refuses to clip them.
    """
    has_scaler = getattr(trainer.precision_plugin, "scaler", None) is not None
    is_supported = all(p.device.type in FUSED and p.is_floating_point() for p in parameters)
    fused = True if is_supported and not has_scaler else None
    optimizer: Any = AdamW(parameters, lr=lr or LEARNING_RATE, **settings, fused=fused)
    optimizer._step_supports_amp_scaling = False  # without a scaler: Lightning would not clip under bf16-mixed either
    return optimizer


def adopt_settings(optimizer: Optimizer, scheduler: object) -> None:
    """Gives an optimizer the settings again that it was made with, which torch replaces by those of a checkpoint.

    Rates are left to the schedule, and so is momentum if that, or a scheduler of torch, changes it. Optimizers with
    several groups of parameters keep what they have, and so do those of other libraries, whose settings may hold state.

    Raises:
        ValueError: the checkpoint is of another kind of optimizer, or lacks moments that a setting asks for.
    """
    is_steady = isinstance(scheduler, RateSchedule) and scheduler.momentum(0, 100) is None
    kept = {"lr", *GO_WITH_MOMENTS} | (set() if is_steady else {"betas", "momentum"})
    for group in optimizer.param_groups:
        missing = optimizer.defaults.keys() - group.keys()
        strange = group.keys() - optimizer.defaults.keys() - {"params", "initial_lr"}
        if missing and strange:  # one of both: another version of the same
            has, had = ", ".join(sorted(missing)), ", ".join(sorted(strange))
            raise ValueError(
                f"model.optimizer={type(optimizer).__name__} has {has}, but the checkpoint's has {had}: resume with "
                "the optimizer that it was saved with"
            )
    if len(optimizer.param_groups) == 1 and has_plain_settings(optimizer):
        for name in WITH_MOMENTS:
            if optimizer.defaults.get(name) and not optimizer.param_groups[0][name]:
                raise ValueError(
                    f"model.optimizer={type(optimizer).__name__} has {name}=True, and the checkpoint was saved without "
                    "the moments that it needs: leave it out"
                )
        optimizer.param_groups[0].update({k: v for k, v in optimizer.defaults.items() if k not in kept})


@torch.no_grad()
def lost_share(parameters: Iterable[nn.Parameter], lr: float) -> float:
    """Share of the trained weights that a step of Adam (of size `lr`) leaves as they are, because of their dtype.

    An update below half the distance to the next number of the dtype is rounded away. Estimated from some weights of
    each tensor; sharded tensors are estimated from this rank's part.
    """
    lost = total = 0.0
    for parameter in parameters:
        local: Any = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        if not parameter.requires_grad or local.is_meta or local.numel() == 0:
            continue
        some = local.detach().flatten()[:: max(1, local.numel() // SAMPLE)]
        unchanged = ((some - lr) == some) & ((some + lr) == some)
        lost += float(unchanged.float().mean()) * parameter.numel()
        total += parameter.numel()
    return lost / total if total else 0.0


def warn_of_lost_updates(parameters: Iterable[nn.Parameter], lr: float) -> None:
    """One line if most weights would not change in a step."""
    own = [p for p in parameters if p.requires_grad]
    if (share := lost_share(own, lr)) > LOST:
        log.warning(
            "model.dtype=%s with the learning rate %g: %.1f %% of the weights do not change in a step, because updates "
            "this small are rounded away. Use model.dtype: float32 with trainer.precision: bf16-mixed",
            *(str(own[0].dtype).removeprefix("torch."), lr, 100 * share),
        )
