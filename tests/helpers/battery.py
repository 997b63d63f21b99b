"""Every public callback, found by looking, and runs of all that go together; used by one process and by two."""

from __future__ import annotations

import importlib
import math
import pkgutil
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from flow import MODEL, make_data, make_module
from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment

from lit_async_rl import callbacks
from lit_async_rl.advantages.group import GroupMean, Raw
from lit_async_rl.callbacks import StalenessController
from lit_async_rl.callbacks.monitors.step_monitor import StepMonitor
from lit_async_rl.engines.base import SamplingParams
from lit_async_rl.losses import TrajectoryBalance
from lit_async_rl.losses.aggregation import FixedLength
from lit_async_rl.replay.buffer import ReplayBuffer
from lit_async_rl.rollouts.intake import OverlongFilter
from lit_async_rl.tasks import SortDigits

BASES = {StepMonitor}
TRAJECTORY = {"ReferenceReset", "ReplayMonitor"}  # need a reference, a replay buffer
ONCE = {"Progress", "LiveView"}  # a trainer has one progress bar, and these runs have none
EXTRA = {"LMEvalValidation", "ReplicaScaling"}  # need a library and its tasks, or Ray; have their own tests


def discovered() -> dict[str, type[pl.Callback]]:
    """Every callback class of the package, by name."""
    found = {}
    for info in pkgutil.walk_packages(callbacks.__path__, f"{callbacks.__name__}."):
        module = importlib.import_module(info.name)
        for name, value in vars(module).items():
            is_here = isinstance(value, type) and value.__module__ == module.__name__
            if is_here and issubclass(value, pl.Callback) and value not in BASES:
                found[name] = value
    return found


def make(name: str, folder: Path, **changes: Any) -> pl.Callback:
    """One of each: as it is by default, or so that it acts within a few steps."""
    settings: dict[str, dict[str, Any]] = {
        "AdaptiveStaleness": dict(target_ess_ratio=0.99, band=0.0),
        "BottleneckVerdict": dict(every_n_steps=2),
        "CollapseAlarm": dict(min_ess_ratio=0.99, patience=1, cooldown_steps=0),
        "Evaluation": dict(datasets={"held_out": SortDigits(8, size=4, split="held_out")}, every_n_steps=2),
        "GradientAlignmentControl": dict(low=0.0, high=0.98),
        "GradientClipping": dict(max_norm=0.05),
        "LMEvalValidation": dict(tasks=["none"]),
        "ReferenceReset": dict(every_n_steps=2),
        "RolloutTape": dict(folder=str(folder / "tape")),
        "SampleLogger": dict(every_n_steps=1),
        "StalenessController": dict(limit=-1e9, max_halvings=1, cooldown_steps=1),
    }
    made = discovered()[name](**(settings.get(name, {}) | changes))
    if isinstance(made, StalenessController):
        made.forecast.MIN_STEPS = 2  # these runs are short
    return made


class Notes(Logger):
    """Keeps what is logged, step by step."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.steps = {}

    name = "notes"
    version = 0

    @property
    def save_dir(self) -> str:
        return str(self.folder)

    @property
    @rank_zero_experiment
    def experiment(self) -> None:
        return None

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.steps.setdefault(step, {}).update(metrics)


def assert_finite(notes: Notes) -> None:
    broken = {(step, n): v for step, metrics in notes.steps.items() for n, v in metrics.items() if not math.isfinite(v)}
    assert not broken, broken


def run(
    folder: Path,
    kind: str,
    max_steps: int = 3,
    others: list[pl.Callback] | None = None,
    all_callbacks: list[pl.Callback] | None = None,
    module: Any = None,
    ckpt_path: str | None = None,
    trainer: dict[str, Any] | None = None,
    **data: Any,
) -> tuple[Any, Notes, pl.Trainer]:
    """A run with all callbacks that go with this kind of loss, `policy` or `trajectory`; every metric is finite."""
    settings: dict[str, Any] = dict(groups_per_step=2, group_size=2, max_staleness=1)
    loss: dict[str, Any] = {}
    if kind == "trajectory":
        loss = dict(loss=TrajectoryBalance(0.1))
        settings |= dict(advantage=GroupMean(), aggregation=FixedLength(1))
        settings |= dict(replay=ReplayBuffer(0.5))
    rollouts = make_data(**(settings | data))
    module = module or make_module(**loss)
    notes = Notes(folder)
    runner = pl.Trainer(
        **dict(
            accelerator="cpu",
            devices=1,
            max_steps=max_steps,
            accumulate_grad_batches=rollouts.micro_batches_per_step,
            logger=notes,
            log_every_n_steps=1,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
            callbacks=[*(others or []), *(all_callbacks or everything(folder, kind))],
        )
        | (trainer or {})
    )
    runner.fit(module, datamodule=rollouts, ckpt_path=ckpt_path)
    assert runner.global_step == max_steps
    assert_finite(notes)
    return module, notes, runner


def everything(folder: Path, kind: str, without: frozenset[str] = frozenset()) -> list[pl.Callback]:
    """One of each, clipping and guards behind those that look at gradients."""
    names = set(discovered()) - ONCE - EXTRA - without - (set() if kind == "trajectory" else TRAJECTORY)
    last = ["GradientAlignmentControl", "GradientClipping", "SkipNonFinite", "WeightSync"]
    return [make(name, folder) for name in [*sorted(names - set(last)), *(n for n in last if n in names)]]


class NaNs(pl.Callback):
    """In a gradient of step 1, or in its loss."""

    def __init__(self, where: str) -> None:
        self.where = where

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: torch.Tensor) -> None:
        if self.where == "loss" and trainer.global_step == 1:
            loss.register_hook(lambda gradient: gradient * torch.nan)
            loss.data.mul_(torch.nan)

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        if self.where == "gradient" and trainer.global_step == 1:
            next(p.grad for p in pl_module.parameters() if p.grad is not None).view(-1)[0] = torch.nan


SITUATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "nothing trains": dict(sampling=SamplingParams(max_tokens=2), filters=[OverlongFilter()]),
    "one token": dict(sampling=SamplingParams(max_tokens=1)),
    "one rollout": dict(groups_per_step=1, group_size=1, advantage=Raw()),
    "micro-batches without rollouts": dict(groups_per_step=1, group_size=4, micro_batches_per_step=4),
    "NaN in the loss": dict(others=[NaNs("loss")]),
    "NaN in a gradient, clipped by norm": dict(others=[NaNs("gradient")], trainer=dict(gradient_clip_val=0.1)),
    "NaN in a gradient, clipped by value": dict(
        others=[NaNs("gradient")], trainer=dict(gradient_clip_val=0.1, gradient_clip_algorithm="value")
    ),
}
__all__ = ["MODEL", "SITUATIONS", "NaNs", "Notes", "assert_finite", "discovered", "everything", "make", "run"]
