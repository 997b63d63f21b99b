"""The default optimizer, and what rounding leaves of its constants and updates."""

from __future__ import annotations

import inspect
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lit_async_rl.stabilizers.step_lr import GO_WITH_MOMENTS, has_plain_settings
from lit_async_rl.utils.checks import check_range
from lit_async_rl.utils.lightning_types import AnyTrainer

# -- Learning-rate schedules that take their height from `model.learning_rate` and their length from `trainer.max_steps`
# A schedule is a function of the step, the peak rate and the number of steps of the run. Nothing of it is checkpointed
# but the step, so a run that is resumed with another rate or more steps follows the schedule of its own settings.


@dataclass(frozen=True, kw_only=True)
class RateSchedule(ABC):
    """A learning rate by optimizer step, as a function of the peak rate and the length of the run.

    Args:
        warmup: optimizer steps until the peak rate; below 1, that share of the run.

    Raises:
        ValueError: a setting is out of range.
    """

    warmup: int | float = 0.0

    def __post_init__(self) -> None:
        check_range("model.scheduler", ">= 0", warmup=self.warmup)

    @abstractmethod
    def rate(self, peak: float, step: int, num_steps: int) -> float:
        """The rate of the optimizer step number `step`, counted from 0."""

    def momentum(self, step: int, num_steps: int) -> float | None:
        """Momentum (Adam: beta1) of that step; None leaves it alone."""
        return None

    @property
    def needs_length(self) -> bool:
        """Whether the rate depends on the length of the run."""
        return True

    def warmup_steps(self, num_steps: int) -> float:
        """The warm-up in optimizer steps."""
        return float(self.warmup * num_steps if self.warmup < 1 else self.warmup)

    def warm(self, peak: float, step: int, num_steps: int) -> float:
        """Linear warm-up: the n-th of N steps has n / N of the peak rate."""
        steps = self.warmup_steps(num_steps)
        return peak * min(1.0, (step + 1) / steps) if steps > 0 else peak


@dataclass(frozen=True, kw_only=True)
class ConstantRate(RateSchedule):
    """Linear warm-up, then the same rate for ever."""

    @property
    def needs_length(self) -> bool:
        """Only for a warm-up that is a share of the run."""
        return 0 < self.warmup < 1

    def rate(self, peak: float, step: int, num_steps: int) -> float:
        return self.warm(peak, step, num_steps)


@dataclass(frozen=True, kw_only=True)
class _Decay(RateSchedule):
    """Linear warm-up, then a decay over the rest of the run.

    Args:
        warmup: optimizer steps until the peak rate; below 1, that share of the run.
        final: share of the peak rate at the end of the run.
    """

    final: int | float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.final <= 1:
            raise ValueError(f"model.scheduler.final must be between 0 and 1, got {self.final}")

    def rate(self, peak: float, step: int, num_steps: int) -> float:
        warm = self.warmup_steps(num_steps)
        if step < warm:
            return self.warm(peak, step, num_steps)
        progress = (step - warm) / (num_steps - warm)
        return peak * (self.final + (1 - self.final) * self.decay(progress))

    @abstractmethod
    def decay(self, progress: float) -> float:
        """From 1 to 0."""


@dataclass(frozen=True, kw_only=True)
class Linear(_Decay):
    """Linear warm-up, then a straight line down to `final`."""

    def decay(self, progress: float) -> float:
        return 1 - progress


@dataclass(frozen=True, kw_only=True)
class Cosine(_Decay):
    """Linear warm-up, then half a cosine down to `final` (SGDR, arXiv:1608.03983, without restarts)."""

    def decay(self, progress: float) -> float:
        return (1 + math.cos(math.pi * progress)) / 2


@dataclass(frozen=True, kw_only=True)
class StableDecay(RateSchedule):
    """Linear warm-up, the peak rate for most of the run, then a straight line to 0 (WSD, arXiv:2404.06395).

    Moves the weights as far as a schedule that touches its peak once, at a rate that is never as high: the bias of
    stale gradients grows with the rate (arXiv:2607.01083).

    Args:
        warmup: optimizer steps until the peak rate; below 1, that share of the run.
        decay: share of the run at its end over which the rate falls.
    """

    decay: int | float = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("model.scheduler", "in [0, 1]", decay=self.decay)

    def rate(self, peak: float, step: int, num_steps: int) -> float:
        left = num_steps - step  # the first step of the decay still has the peak rate
        share = min(1.0, left / (self.decay * num_steps)) if self.decay else 1.0
        return min(self.warm(peak, step, num_steps), peak * max(0.0, share))


@dataclass(frozen=True, kw_only=True)
class OneCycle(RateSchedule):
    """One-cycle policy (arXiv:1708.07120), number for number torch's `OneCycleLR` with its defaults.

    The rate rises from `start` to the peak and falls to `final`, each along half a cosine; momentum (Adam: beta1) falls
    from 0.95 to 0.85 and rises again.

    Args:
        warmup: optimizer steps until the peak rate; below 1, that share of the run.
        start: share of the peak rate at the first step; `final`: at the last.
        cycle_momentum: False leaves momentum alone.
    """

    warmup: int | float = 0.1
    start: int | float = 0.04
    final: int | float = 4e-6
    cycle_momentum: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.start <= 1:
            raise ValueError(f"model.scheduler.start must be in (0, 1], got {self.start}")
        if not 0 <= self.final <= 1:
            raise ValueError(f"model.scheduler.final must be between 0 and 1, got {self.final}")

    def rate(self, peak: float, step: int, num_steps: int) -> float:
        start = peak / (1 / self.start)  # as torch divides by its `div_factor`
        final = start / (self.start / self.final) if self.final else 0.0
        return self._cycle(start, peak, final, step=step, num_steps=num_steps)

    def momentum(self, step: int, num_steps: int) -> float | None:
        return self._cycle(0.95, 0.85, 0.95, step=step, num_steps=num_steps) if self.cycle_momentum else None

    def _cycle(self, start: float, peak: float, final: float, step: int, num_steps: int) -> float:
        top = self.warmup_steps(num_steps) - 1
        last = num_steps - 1
        if step <= top:
            return _half_cosine(start, peak, step / top if top > 0 else 1.0)
        top = max(0.0, top)
        return _half_cosine(peak, final, (step - top) / (last - top) if last > top else 1.0)


def _half_cosine(begin: float, end: float, progress: float) -> float:
    return end + (begin - end) / 2.0 * (math.cos(math.pi * progress) + 1)


LEARNING_RATE = 1e-6  # where neither the setting nor an optimizer names one
FUSED = ("cpu", "cuda", "mps", "xpu")  # devices of torch's fused AdamW
SAMPLE = 4096  # weights of each tensor that are looked at
WITH_MOMENTS = ("amsgrad", "centered")  # settings of torch's optimizers
FACTORS = ("betas", "beta", "momentum", "alpha")  # settings that moments are multiplied by in every step
LOST = 0.5  # share of weights that do not change, from which on there is a warning
log = logging.getLogger(__name__)


def make_optimizer(
    make: Callable[..., Optimizer], parameters: Sequence[nn.Parameter], learning_rate: float | None = None
) -> Optimizer:
    """The optimizer that `make` returns.

    Args:
        make: a class of optimizers, a `functools.partial` of one, or a function.
        parameters: to train.
        learning_rate: rate of a class or partial that was given none; None leaves it to the class.

    Raises:
        ValueError: it refuses its settings.
    """
    is_unset = learning_rate is not None and takes_rate(make) and "lr" not in getattr(make, "keywords", {})
    try:
        return make(parameters, lr=learning_rate) if is_unset else make(parameters)
    except (TypeError, ValueError) as error:
        raise ValueError(f"model.optimizer cannot be made: {error}") from error


def takes_rate(make: Callable[..., Optimizer]) -> bool:
    """Whether `make` is a class, or a partial of one, that has an argument `lr`; of a function nobody knows its rate.

    The command line makes a partial of a function whose last argument is the class.
    """
    kind: object = make.args[-1] if isinstance(make, partial) and make.args else getattr(make, "func", make)
    return isinstance(kind, type) and "lr" in inspect.signature(kind).parameters


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
            has = ", ".join(sorted(missing))
            had = ", ".join(sorted(strange))
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


# -- Binds a `RateSchedule` to the rate and length of a run, or checks one of torch's schedulers against them ---------


INSTEAD = "use a schedule that takes rate and length from the run (model.scheduler=OneCycle, Cosine, Linear)"


class BoundSchedule(LRScheduler):
    """A `RateSchedule` on one optimizer; behind the end of the run, the rate of its last step.

    Args:
        optimizer: its rates are the peaks.
        schedule: which one.
        num_steps: of the run; only schedules that do not need it take one that is not positive.
    """

    def __init__(self, optimizer: Optimizer, schedule: RateSchedule, num_steps: int) -> None:
        self.schedule = schedule
        self.num_steps = num_steps
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        """Rates of the present step; sets momentum, too."""
        step = min(self.last_epoch, self.num_steps - 1) if self.num_steps > 0 else self.last_epoch
        momentum = self.schedule.momentum(step, self.num_steps)
        for group in self.optimizer.param_groups if momentum is not None else ():
            if "betas" in group:
                group["betas"] = (momentum, *group["betas"][1:])
            elif "momentum" in group:
                group["momentum"] = momentum
        return [self.schedule.rate(peak, step, self.num_steps) for peak in self.base_lrs]  # type: ignore[arg-type]

    def state_dict(self) -> dict[str, Any]:
        """The step only: height and length are those of the run that resumes."""
        return {"last_epoch": self.last_epoch, "_step_count": self._step_count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on at that step of this run's schedule, whatever rates the optimizer has restored.

        Reads the state of any torch scheduler.
        """
        self.last_epoch = state_dict["last_epoch"]
        self._step_count = state_dict["_step_count"]
        self._last_lr = self.get_lr()
        for group, lr in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr


def bind_scheduler(
    scheduler: RateSchedule | Callable[[Optimizer], Any],
    optimizer: Optimizer,
    learning_rate: float | None,
    max_steps: int,
) -> Any:
    """The scheduler of a run.

    Args:
        scheduler: a schedule, or a function that makes any scheduler of torch.
        optimizer: with its own rate.
        learning_rate: `model.learning_rate`; None where it was not set.
        max_steps: `trainer.max_steps`; -1 is endless.

    Raises:
        ValueError: optimizer or scheduler state another rate or length than the run.
    """
    present = optimizer.param_groups[0]["lr"]
    if learning_rate is not None and present != learning_rate:
        given = f"model.learning_rate={learning_rate:g}, but model.optimizer={type(optimizer).__name__}"
        raise ValueError(f"{given} has lr={present:g}: leave one of them out")
    if isinstance(scheduler, RateSchedule):
        if max_steps <= 0 and scheduler.needs_length:
            name = type(scheduler).__name__
            raise ValueError(f"trainer.max_steps must be set, got {max_steps}: model.scheduler={name} spans the run")
        return BoundSchedule(optimizer, scheduler, max_steps)
    made = scheduler(optimizer)
    name = f"model.scheduler={type(made).__name__}"
    instead = f"make them equal, or {INSTEAD}"
    length = getattr(made, "total_steps", None)
    if length is not None and max_steps > 0 and length != max_steps:
        raise ValueError(f"{name} has total_steps={length}, but trainer.max_steps={max_steps}: {instead}")
    peaks = [group["max_lr"] for group in optimizer.param_groups if "max_lr" in group]
    if learning_rate is not None and any(peak != learning_rate for peak in peaks):
        raise ValueError(f"{name} has max_lr={peaks[0]:g}, but model.learning_rate={learning_rate:g}: {instead}")
    return made


def check_resumable(scheduler: Any, checkpoint: Mapping[str, Any], max_steps: int) -> None:
    """Refuses to resume a torch scheduler whose checkpointed length is not the run's.

    Raises:
        ValueError: says which schedules can go on.
    """
    states = [] if isinstance(scheduler, RateSchedule) else checkpoint.get("lr_schedulers", [])
    for length in (state["total_steps"] for state in states if "total_steps" in state):
        if 0 < max_steps != length:
            given = f"trainer.max_steps={max_steps}, but the checkpoint's model.scheduler has total_steps={length}"
            raise ValueError(f"{given}: {INSTEAD}")


def scheduled_rate(trainer: AnyTrainer, optimizer: Optimizer) -> float:
    """Learning rate of the present step before callbacks scale it (`OneStepLearningRate`)."""
    schedules = trainer.lr_scheduler_configs
    rates = schedules[0].scheduler.get_last_lr() if schedules else [optimizer.param_groups[0]["lr"]]
    return float(rates[0])
