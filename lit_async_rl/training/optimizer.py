"""AdamW defaults, learning-rate schedules, and detection of constants and updates lost to rounding."""

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

from lit_async_rl import rules
from lit_async_rl.stabilizers.step_lr import STATE_LAYOUT_SETTINGS, has_plain_settings
from lit_async_rl.utils.checks import check_range
from lit_async_rl.utils.lightning_types import AnyTrainer

# -- Learning-rate schedules with the peak of `model.learning_rate` and the length of `trainer.max_steps` -------------
# A schedule is a function of the step, the peak rate and the number of steps of the run. Only the step is checkpointed,
# so that a run resumed with another rate or more steps follows the schedule of its own settings.


@dataclass(frozen=True, kw_only=True)
class RateSchedule(ABC):
    """A learning rate by optimizer step, peak rate and length of the run.

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
        """Learning rate of an optimizer step.

        Args:
            peak: peak rate.
            step: number of the optimizer step, from 0.
            num_steps: optimizer steps of the run.
        """

    def momentum(self, step: int, num_steps: int) -> float | None:
        """Momentum (Adam: beta1) of an optimizer step; None does not change it."""
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
    """Linear warm-up, then a constant rate."""

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
        check_range("model.scheduler", "in [0, 1]", final=self.final)

    def rate(self, peak: float, step: int, num_steps: int) -> float:
        warm = self.warmup_steps(num_steps)
        if step < warm:
            return self.warm(peak, step, num_steps)
        progress = (step - warm) / (num_steps - warm)
        return peak * (self.final + (1 - self.final) * self.decay(progress))

    @abstractmethod
    def decay(self, progress: float) -> float:
        """Share of the decaying part of the rate, from 1 at `progress` 0 to 0 at `progress` 1."""


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

    For the same total change of the weights its peak rate is lower than that of a schedule with a single peak, and the
    bias of stale gradients grows with the rate (arXiv:2607.01083).

    Args:
        warmup: optimizer steps until the peak rate; below 1, that share of the run.
        decay: length of the final decay, as a share of the run.
    """

    decay: int | float = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("model.scheduler", "in [0, 1]", decay=self.decay)

    def rate(self, peak: float, step: int, num_steps: int) -> float:
        remaining = num_steps - step  # the first step of the decay still has the peak rate
        share = min(1.0, remaining / (self.decay * num_steps)) if self.decay else 1.0
        return min(self.warm(peak, step, num_steps), peak * max(0.0, share))


@dataclass(frozen=True, kw_only=True)
class OneCycle(RateSchedule):
    """One-cycle policy (arXiv:1708.07120), numerically equal to torch's `OneCycleLR` with its defaults.

    The rate rises from `start` to the peak and falls to `final`, each along half a cosine; momentum (Adam: beta1) falls
    from 0.95 to 0.85 and rises again.

    Args:
        warmup: optimizer steps until the peak rate; below 1, that share of the run.
        start: rate of the first step, as a share of the peak rate.
        final: rate of the last step, as a share of the peak rate.
        cycle_momentum: False does not change momentum.
    """

    warmup: int | float = 0.1
    start: int | float = 0.04
    final: int | float = 4e-6
    cycle_momentum: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("model.scheduler", "in (0, 1]", start=self.start)
        check_range("model.scheduler", "in [0, 1]", final=self.final)

    def rate(self, peak: float, step: int, num_steps: int) -> float:
        start = peak / (1 / self.start)  # rounded like torch's division by `div_factor`
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


DEFAULT_LEARNING_RATE = 1e-6  # if neither `model.learning_rate` nor an optimizer sets one
FUSED_DEVICES = ("cpu", "cuda", "mps", "xpu")  # devices of torch's fused AdamW
SAMPLED_WEIGHTS = 4096  # per tensor, for the estimate of lost updates
SETTINGS_WITH_MOMENTS = ("amsgrad", "centered")  # settings of torch's optimizers that add moments
NO_SETTINGS = {"params", "initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum"}  # added by schedulers
SAME_OPTIMIZER = "resume with the optimizer that it was saved with"
DECAY_FACTORS = ("betas", "beta", "momentum", "alpha")  # settings that multiply moments in every step
MAX_LOST_SHARE = 0.5  # share of unchanged weights above which there is a warning
log = logging.getLogger(__name__)


def make_optimizer(
    make: Callable[..., Optimizer], parameters: Sequence[nn.Parameter], learning_rate: float | None = None
) -> Optimizer:
    """Calls `make` with the parameters.

    Args:
        make: a class of optimizers, a `functools.partial` of one, or a function.
        parameters: to train.
        learning_rate: rate of a class or partial without one; None leaves it to the class.

    Raises:
        ValueError: it raises an error about its settings.
    """
    is_unset = learning_rate is not None and takes_rate(make) and "lr" not in getattr(make, "keywords", {})
    try:
        return make(parameters, lr=learning_rate) if is_unset else make(parameters)
    except (TypeError, ValueError) as error:
        raise ValueError(f"model.optimizer cannot be made: {error}") from error


def takes_rate(make: Callable[..., Optimizer]) -> bool:
    """Whether `make` is a class with an argument `lr`, or a partial of one; functions hide their rate.

    The command line's partial binds a function, with the class as last argument.
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
    """AdamW, fused if torch supports it for the parameters (several times faster on the CPU, too).

    Not fused with `precision: 16-mixed`: a fused optimizer unscales gradients in its step, so that Lightning refuses to
    clip.

    Args:
        parameters: parameters to train.
        trainer: trainer of the run.
        lr: learning rate; None is `DEFAULT_LEARNING_RATE`.
        **settings: other arguments of `torch.optim.AdamW`.
    """
    has_scaler = getattr(trainer.precision_plugin, "scaler", None) is not None
    is_supported = all(p.device.type in FUSED_DEVICES and p.is_floating_point() for p in parameters)
    fused = True if is_supported and not has_scaler else None
    optimizer: Any = AdamW(parameters, lr=lr or DEFAULT_LEARNING_RATE, **settings, fused=fused)
    # a fused optimizer sets it, and Lightning then refuses to clip, also with bf16-mixed, where nothing is scaled
    optimizer._step_supports_amp_scaling = False
    return optimizer


def adopt_settings(optimizer: Optimizer, settings: Sequence[Mapping[str, Any]], scheduler: object) -> None:
    """Restores an optimizer's own settings after a resume, which replaces them by the checkpoint's.

    The schedule sets the rate, and momentum if it (or a scheduler of torch) changes that. Optimizers with several
    parameter groups keep the checkpoint's settings, as do those of other libraries, whose settings may be state.

    Args:
        optimizer: of this run.
        settings: its `group_settings` as it was made.
        scheduler: of this run.

    Raises:
        ValueError: see `check_saved_groups`.
    """
    has_constant_momentum = isinstance(scheduler, RateSchedule) and scheduler.momentum(0, 100) is None
    kept = {"lr", *STATE_LAYOUT_SETTINGS} | (set() if has_constant_momentum else {"betas", "momentum"})
    check_saved_groups(optimizer, optimizer.param_groups, settings)
    if len(optimizer.param_groups) == 1 and has_plain_settings(optimizer):
        optimizer.param_groups[0].update({k: v for k, v in settings[0].items() if k not in kept})


def check_saved_groups(
    optimizer: Optimizer, groups: Sequence[Mapping[str, Any]], settings: Sequence[Mapping[str, Any]]
) -> None:
    """Checks that a checkpoint's parameter groups are those of such an optimizer.

    Args:
        optimizer: of this run.
        groups: `param_groups` of the saved optimizer.
        settings: `group_settings` of this run's optimizer as it was made.

    Raises:
        ValueError: they are of another kind or number, or lack moments that a setting needs.
    """
    name = f"model.optimizer={type(optimizer).__name__}"
    if len(groups) != len(optimizer.param_groups):
        raise ValueError(
            f"{name} has {len(optimizer.param_groups)} parameter groups, but the checkpoint's optimizer has "
            f"{len(groups)}: {SAME_OPTIMIZER}"
        )
    for group in groups:
        missing = optimizer.defaults.keys() - group.keys()
        unknown = group.keys() - optimizer.defaults.keys() - NO_SETTINGS
        if missing and unknown:  # only one of the two occurs between versions of the same optimizer
            has = ", ".join(sorted(missing))
            had = ", ".join(sorted(unknown))
            raise ValueError(f"{name} has {has}, but the checkpoint's has {had}: {SAME_OPTIMIZER}")
    if len(groups) == 1 and has_plain_settings(optimizer):
        for setting in SETTINGS_WITH_MOMENTS:
            if settings[0].get(setting) and not groups[0].get(setting):
                raise ValueError(
                    f"the option {setting}=True of {name} needs optimizer moments that the checkpoint lacks: "
                    "leave the option out"
                )


def check_constants(optimizer: Optimizer) -> None:
    """Checks that the constants of an optimizer survive rounding to the dtype of its weights (and moments).

    Warns of factors of moments that round to 1, so that moments never decay (0.999 in bfloat16), and of a decoupled
    weight decay that is lost (1 - rate * decay rounds to 1).

    Raises:
        ValueError: a non-zero eps rounds to 0, so that updates without gradient would be divided by 0.
    """
    warnings: dict[str, None] = {}  # an ordered set
    for group in optimizer.param_groups:
        for dtype in {parameter.dtype for parameter in group["params"] if parameter.requires_grad}:
            name = str(dtype).removeprefix("torch.")
            for setting, value in _numbers(group, lambda key: key.startswith("eps")):
                if value and not torch.tensor(value, dtype=dtype):
                    raise ValueError(
                        f"model.optimizer: {setting}={value:g} rounds to 0 in {name}: choose a larger value"
                    )
            for setting, value in _numbers(group, DECAY_FACTORS.__contains__):
                if 0 < value < 1 and torch.tensor(value, dtype=dtype) == 1:
                    warnings[
                        f"model.optimizer: {setting}={value:g} rounds to 1 in {name}, so the average that it "
                        "multiplies never decays. Use model.dtype: float32 with trainer.precision: bf16-mixed, or a "
                        f"smaller {setting}"
                    ] = None
            decay = float(optimizer.defaults.get("lr", 0.0)) * float(group.get("weight_decay", 0.0))
            if group.get("decoupled_weight_decay") and decay and torch.tensor(1 - decay, dtype=dtype) == 1:
                warnings[
                    f"model.weight_decay={group['weight_decay']:g} has no effect: times the learning rate it is "
                    f"{decay:.2g}, and 1 less that is 1 in {name}. Leave it out, or raise one of the two"
                ] = None
    for line in warnings:
        log.warning(line)


def _numbers(group: Mapping[str, Any], is_wanted: Callable[[str], bool]) -> Iterator[tuple[str, float]]:
    """(name, value) of numeric settings of a parameter group; entries of a tuple are `name[position]`."""
    for key, value in group.items():
        if is_wanted(key):
            for position, entry in enumerate(value if isinstance(value, tuple | list) else [value]):
                if isinstance(entry, int | float) and not isinstance(entry, bool):
                    yield (f"{key}[{position}]" if isinstance(value, tuple | list) else key), float(entry)


@torch.no_grad()
def lost_share(parameters: Iterable[nn.Parameter], lr: float) -> float:
    """Share of the trained weights that a step of Adam (of size `lr`) does not change.

    An update below half the distance to the dtype's next number is lost to rounding. Estimated from a sample of each
    tensor, or of this rank's shard.
    """
    lost = total = 0.0
    for parameter in parameters:
        local: Any = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        if not parameter.requires_grad or local.is_meta or local.numel() == 0:
            continue
        sample = local.detach().flatten()[:: max(1, local.numel() // SAMPLED_WEIGHTS)]
        unchanged = ((sample - lr) == sample) & ((sample + lr) == sample)
        lost += float(unchanged.float().mean()) * parameter.numel()
        total += parameter.numel()
    return lost / total if total else 0.0


def warn_of_lost_updates(parameters: Iterable[nn.Parameter], lr: float) -> None:
    """Logs a warning if most weights would not change in a step."""
    trained = [p for p in parameters if p.requires_grad]
    if (share := lost_share(trained, lr)) > MAX_LOST_SHARE:
        log.warning(
            "model.dtype=%s with the learning rate %g: %.1f %% of the weights do not change in a step, because updates "
            "this small are rounded away. Use model.dtype: float32 with trainer.precision: bf16-mixed",
            str(trained[0].dtype).removeprefix("torch."),
            lr,
            100 * share,
        )


# -- Binding of a `RateSchedule` to the rate and length of a run, and checks of torch's schedulers against them -------


class BoundSchedule(LRScheduler):
    """A `RateSchedule` on one optimizer; beyond the end of the run, the rate of the last step.

    Args:
        optimizer: optimizer with the peak rates.
        schedule: the schedule.
        num_steps: optimizer steps of the run; -1 is endless, for schedules that do not need the length.
    """

    def __init__(self, optimizer: Optimizer, schedule: RateSchedule, num_steps: int) -> None:
        self.schedule = schedule
        self.num_steps = num_steps
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        """Learning rates of the present step; also sets momentum."""
        step = min(self.last_epoch, self.num_steps - 1) if self.num_steps > 0 else self.last_epoch
        momentum = self.schedule.momentum(step, self.num_steps)
        for group in self.optimizer.param_groups if momentum is not None else ():
            if "betas" in group:
                group["betas"] = (momentum, *group["betas"][1:])
            elif "momentum" in group:
                group["momentum"] = momentum
        return [self.schedule.rate(peak, step, self.num_steps) for peak in self.base_lrs]  # type: ignore[arg-type]

    def state_dict(self) -> dict[str, Any]:
        """The step only, because peak and length belong to the resuming run."""
        return {"last_epoch": self.last_epoch, "_step_count": self._step_count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues this run's schedule at the saved step, in place of the rates that the optimizer restored.

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
        optimizer: optimizer of the run.
        learning_rate: `model.learning_rate`; None if it is not set.
        max_steps: `trainer.max_steps`; -1 is endless.

    Raises:
        ValueError: optimizer or scheduler have another rate or length than the run.
    """
    rules.refuse(rules.of_rate(optimizer, learning_rate))
    made = scheduler if isinstance(scheduler, RateSchedule) else scheduler(optimizer)
    rules.refuse(rules.of_schedule(made, optimizer, learning_rate, max_steps=max_steps))
    return BoundSchedule(optimizer, made, max_steps) if isinstance(made, RateSchedule) else made


def check_resumable(scheduler: Any, checkpoint: Mapping[str, Any], max_steps: int) -> None:
    """Checks that the checkpointed length of a torch scheduler is the run's.

    Raises:
        ValueError: it is not; names schedules that can be resumed with another length.
    """
    states = [] if isinstance(scheduler, RateSchedule) else checkpoint.get("lr_schedulers", [])
    for length in (state["total_steps"] for state in states if "total_steps" in state):
        if 0 < max_steps != length:
            raise ValueError(
                f"trainer.max_steps={max_steps}, but the checkpoint's model.scheduler has total_steps={length}: "
                f"{rules.RUN_SCHEDULES_ADVICE}"
            )


def scheduled_rate(trainer: AnyTrainer, optimizer: Optimizer) -> float:
    """Learning rate of the present step before callbacks scale it (`OneStepLearningRate`)."""
    schedules = trainer.lr_scheduler_configs
    rates = schedules[0].scheduler.get_last_lr() if schedules else [optimizer.param_groups[0]["lr"]]
    return float(rates[0])
