"""Lightning's fit loop as a generator that stops at every hook, around the real data module, weight sync and guard.

The loop counters follow Lightning 2.6; everything it drives is in `tests.reliability.state_machine.modules`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from lightning.pytorch.loops.progress import _BatchProgress
from torch.optim import Optimizer

from lit_async_rl.data.rollout_source import RolloutFeed
from lit_async_rl.types import RolloutBatch
from tests.reliability.state_machine.modules import (
    VirtualData,
    VirtualPolicy,
    VirtualSettings,
    VirtualSync,
    gradient_of,
    mix,
    rows_of,
)

MODEL = "RolloutDataModule"  # key of the data module's state


class VirtualOptimizer(Optimizer):
    """Optimizer with parameter groups only."""

    def __init__(self, parameter: Any) -> None:
        self.param_groups = [{"params": [parameter], "lr": 1.0}]


@dataclass
class VirtualTrainer:
    """The part of `lightning.pytorch.Trainer` that is used here; `fit` stops at every hook.

    Attributes:
        files: written by `save_checkpoint`.
        note: additional content of a file.
    """

    settings: VirtualSettings
    ckpt_path = None
    datamodule: VirtualData
    module: VirtualPolicy
    note: Callable[[], dict[str, Any]]
    max_steps: int
    files: dict[str, Any] = field(default_factory=dict)
    global_step: int = 0
    should_stop: bool = False
    received_sigterm: bool = False
    sanity_checking: bool = False
    world_size: int = 1
    precision_plugin: None = None
    lr_scheduler_configs: tuple[()] = ()

    def __post_init__(self) -> None:
        self.accumulate_grad_batches = self.settings.micro_batches
        self.callbacks = []
        self.sync = VirtualSync()
        self.state = SimpleNamespace(fn="fit")
        self.progress = _BatchProgress()
        self.loggers: list[Any] = []
        self.strategy = SimpleNamespace(checkpoint_io=None)  # files are in memory
        self.parameter = SimpleNamespace(grad=None)
        self.optimizers = [VirtualOptimizer(self.parameter)]
        self.datamodule.trainer = self  # type: ignore[assignment]
        self.module._trainer = self  # type: ignore[assignment]

    def save_checkpoint(self, path: str, weights_only: bool | None = None, storage_options: Any = None) -> None:
        """Collects states in Lightning's order."""
        optimizer = {"global_step": self.global_step, "weights": self.module.weights}
        loops = {"fit_loop": {"epoch_loop.batch_progress": self.progress.state_dict()}}
        checkpoint: dict[str, Any] = {"loops": loops, "state_dict": {}, **optimizer, "note": self.note()}
        self.sync.on_save_checkpoint(self, self.module, checkpoint)  # type: ignore[arg-type]
        checkpoint[MODEL] = self.datamodule.state_dict()
        self.module.on_save_checkpoint(checkpoint)
        self.files[path] = copy.deepcopy(checkpoint)

    def _load(self, checkpoint: dict[str, Any]) -> None:
        self.datamodule.load_state_dict(checkpoint[MODEL])
        self.module.on_load_checkpoint(checkpoint)
        self.sync.on_load_checkpoint(self, self.module, checkpoint)  # type: ignore[arg-type]
        self.module.weights = checkpoint["weights"]
        self.global_step = checkpoint["global_step"]
        self.progress.load_state_dict(checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"])

    def _begin(self, length: int) -> None:
        """`_TrainingEpochLoop.reset` after a resume."""
        total: Any = self.progress.total
        is_at_batch_end = total.ready == total.started == total.processed == total.completed + 1
        if is_at_batch_end:
            self.progress.increment_completed()
            if self.progress.current.completed >= length:
                self.progress.reset_on_run()
        self.progress.reset_on_restart()

    @property
    def _is_done(self) -> bool:
        return self.global_step >= self.max_steps or self.should_stop

    def fit(self, checkpoint: dict[str, Any] | None = None) -> Iterator[str]:
        """Yields the name of every hook."""
        module = self.module
        sync = self.sync
        module.setup("fit")
        sync.setup(self, module, "fit")  # type: ignore[arg-type]
        if checkpoint is not None:
            self._load(checkpoint)
        yield "on_fit_start"
        feed = self.datamodule.train_dataloader()
        if not self._is_done:
            self._begin(len(feed))
            yield "on_train_start, first"
            sync.on_train_start(self, module)  # type: ignore[arg-type]
            yield "on_train_start"
        while not self._is_done:
            yield from self._epoch(feed)
            self.progress.reset_on_run()
        yield "on_train_end"
        module.teardown("fit")

    def _epoch(self, feed: RolloutFeed) -> Iterator[str]:
        fetched = self.progress.current.ready
        current = self.progress.current
        length = len(feed)
        while not self._is_done and not self.progress.is_last_batch:
            try:
                batch = next(feed)
            except StopIteration:
                return
            fetched += 1
            self.progress.is_last_batch = fetched >= length
            batch_idx = current.ready
            self.progress.increment_ready()
            yield "on_train_batch_start"
            self.progress.increment_started()
            yield from self._micro_batch(batch, batch_idx)
            self.progress.increment_processed()
            yield "on_train_batch_end, first"
            self.sync.on_train_batch_end(self, self.module, None, batch, batch_idx)  # type: ignore[arg-type]
            yield "on_train_batch_end"
            self.module.on_train_batch_end(None, batch, batch_idx)
            self.progress.increment_completed()
            yield "on_advance_end"

    def _micro_batch(self, batch: RolloutBatch, batch_idx: int) -> Iterator[str]:
        module = self.module
        module.training_step(batch, batch_idx)
        if batch_idx % self.accumulate_grad_batches == 0:
            yield "on_before_zero_grad"
            module.gradient = 0
        yield "on_before_backward"
        module.gradient += sum(gradient_of(group, tokens) for group, tokens, _ in rows_of(batch))
        self.parameter.grad = None if self.settings.skips_step(self.global_step) else module.gradient
        yield "on_after_backward"
        module.on_after_backward()
        if self.progress.current.ready % self.accumulate_grad_batches and not self.progress.is_last_batch:
            return
        yield "on_before_optimizer_step"
        module.on_before_optimizer_step(self.optimizers[0])  # type: ignore[arg-type]
        if self.parameter.grad is not None:
            module.weights = mix(module.weights, module.gradient)
        yield "after the optimizer's step"
        self.global_step += 1
