"""The default optimizer, and what rounding leaves of its constants and updates."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
FACTORS = ("betas", "beta", "momentum", "alpha")  # settings that moments are multiplied by in every step
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


def check_trained_dtypes(parameters: Iterable[nn.Parameter], trainer: AnyTrainer) -> None:
    """Refuses weights in float16 that train, and frozen ones without a loss scaler.

    AdamW's eps of 1e-8 is 0 in float16, so that weights whose gradient vanishes move without bound, and gradients below
    6e-8 vanish, unless `precision: 16-mixed` scales the loss. DeepSpeed keeps weights in float32 by itself.

    Raises:
        ValueError: names the setting, and what to use instead.
    """
    has_scaler = getattr(trainer.precision_plugin, "scaler", None) is not None
    if type(trainer.strategy).__name__.startswith("DeepSpeed"):
        return
    for parameter in parameters:
        if parameter.dtype == torch.float16 and (parameter.requires_grad or not has_scaler):
            raise ValueError(
                "model.dtype must be float32 or bfloat16 to train, got float16, in which the eps of optimizers and "
                "small gradients are 0. For products in float16 use model.dtype: float32 with trainer.precision: "
                "16-mixed, which scales the loss on a GPU"
            )


def check_constants(optimizer: Optimizer) -> None:
    """Compares the constants of an optimizer with the dtype of its weights, in which torch keeps its moments.

    Warns, in one line each, of factors of moments that round to 1, so that moments never decay (0.999 in bfloat16), and
    of a decoupled weight decay that rounds away (1 - rate * decay is 1).

    Raises:
        ValueError: an eps that is not 0 rounds to 0, so that weights without gradient would be divided by 0.
    """
    said: dict[str, None] = {}
    for group in optimizer.param_groups:
        for dtype in {parameter.dtype for parameter in group["params"] if parameter.requires_grad}:
            name = str(dtype).removeprefix("torch.")
            for setting, value in _numbers(group, lambda key: key.startswith("eps")):
                if value and not torch.tensor(value, dtype=dtype):
                    raise ValueError(
                        f"model.optimizer: {setting} must be representable in {name}, got {value:g}, which is 0"
                    )
            for setting, value in _numbers(group, FACTORS.__contains__):
                if 0 < value < 1 and torch.tensor(value, dtype=dtype) == 1:
                    said[
                        f"model.optimizer: {setting}={value:g} rounds to 1 in {name}, so that what it multiplies never "
                        f"decays. Use model.dtype: float32 with trainer.precision: bf16-mixed, or a smaller {setting}"
                    ] = None
            decay = float(optimizer.defaults.get("lr", 0.0)) * float(group.get("weight_decay", 0.0))
            if group.get("decoupled_weight_decay") and decay and torch.tensor(1 - decay, dtype=dtype) == 1:
                said[
                    f"model.weight_decay={group['weight_decay']:g} has no effect: times the learning rate it is "
                    f"{decay:.2g}, and 1 less that is 1 in {name}. Leave it out, or raise one of the two"
                ] = None
    for line in said:
        log.warning(line)


def _numbers(group: Mapping[str, Any], is_wanted: Callable[[str], bool]) -> Iterator[tuple[str, float]]:
    """Settings of a group of parameters, by name; those of a tuple by name and place."""
    for key, value in group.items():
        if is_wanted(key):
            for place, one in enumerate(value if isinstance(value, tuple | list) else [value]):
                if isinstance(one, int | float) and not isinstance(one, bool):
                    yield (f"{key}[{place}]" if isinstance(value, tuple | list) else key), float(one)


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
