"""Base of monitors: accumulate over the micro-batches of a step, log once per step."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from torchmetrics import Metric

from lit_async_rl.callbacks.parts import rollout_data
from lit_async_rl.distributed.ranks import cpu_group
from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer


class StepMonitor(pl.Callback):
    """Monitor of steps. Subclasses implement `update` for a micro-batch and `compute` for the metrics of the step.

    Statistics of an empty set are not logged: a step in which every token is masked has no staleness.

    Attributes:
        prog_bar: metrics shown in the progress bar.

    Raises:
        ValueError: when training starts without a `RolloutDataModule`.
    """

    prog_bar: tuple[str, ...] = ()

    def __init__(self) -> None:
        self._step = -1

    @abstractmethod
    def update(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any) -> None:
        """Adds one micro-batch, whose signals are `pl_module.stabilizer_signals`."""

    @abstractmethod
    def compute(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> Mapping[str, Any]:
        """Returns the metrics of the step, and resets."""

    def on_train_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        """Resets the metrics; they are on the CPU, so they need a process group with a CPU backend."""
        rollout_data(trainer, type(self).__name__)
        self._step = trainer.global_step
        group = cpu_group()
        for metric in vars(self).values():
            if isinstance(metric, Metric):
                metric.process_group = group
                metric.reset()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.update(trainer, pl_module, batch)
        if trainer.global_step > self._step:
            self._step = trainer.global_step
            for name, value in self.compute(trainer, pl_module).items():
                pl_module.log(name, value, prog_bar=name in self.prog_bar)
