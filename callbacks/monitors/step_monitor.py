"""What all monitors share: add up over the micro-batches of a step, log once."""

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
    """Changes nothing. Subclasses say what one micro-batch adds (`update`) and what the step's values are (`compute`).

    A mean, quantile or maximum over nothing is not logged: a step in which every token is masked has no staleness.

    Attributes:
        prog_bar: names among those of `compute` that the progress bar shows.

    Raises:
        ValueError: when training starts, without a `RolloutDataModule`.
    """

    prog_bar: tuple[str, ...] = ()

    def __init__(self) -> None:
        self._step = -1

    @abstractmethod
    def update(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any) -> None:
        """Adds one micro-batch; `pl_module.stabilizer_signals` are its own."""

    @abstractmethod
    def compute(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> Mapping[str, Any]:
        """The step's metrics; starts over."""

    def on_train_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        """Steps are counted from here; metrics live on the CPU, which the default group may not serve."""
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
        """After each micro-batch."""
        self.update(trainer, pl_module, batch)
        if trainer.global_step > self._step:
            self._step = trainer.global_step
            for name, value in self.compute(trainer, pl_module).items():
                pl_module.log(name, value, prog_bar=name in self.prog_bar)
