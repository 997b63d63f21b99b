"""Binds a `RateSchedule` to the rate and length of a run, or checks one of torch's schedulers against them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lit_async_rl.training.schedules import RateSchedule
from lit_async_rl.utils.lightning_types import AnyTrainer

INSTEAD = "use a schedule that takes rate and length from the run (model.scheduler=OneCycle, Cosine, Linear)"


class BoundSchedule(LRScheduler):
    """A `RateSchedule` on one optimizer; behind the end of the run, the rate of its last step.

    Args:
        optimizer: its rates are the peaks.
        schedule: which one.
        num_steps: of the run; only schedules that do not need it take one that is not positive.
    """

    def __init__(self, optimizer: Optimizer, schedule: RateSchedule, num_steps: int) -> None:
        self.schedule, self.num_steps = schedule, num_steps
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
        self.last_epoch, self._step_count = state_dict["last_epoch"], state_dict["_step_count"]
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
