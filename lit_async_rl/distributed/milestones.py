"""Milestones of a rank's training thread: Lightning's hooks, which all ranks pass in the same order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl

from lit_async_rl.distributed.progress import Progress
from lit_async_rl.utils.lightning_types import AnyTrainer


def watch_hooks(trainer: AnyTrainer, progress: Progress, fail: Callable[[BaseException], None]) -> None:
    """Lets `progress` pass a milestone at each of Lightning's hooks, before all other callbacks of the trainer.

    Args:
        trainer: whose callbacks get one more.
        progress: of this rank.
        fail: told of an exception before any callback handles it, perhaps by a collective (a last checkpoint).
    """
    others = [c for c in trainer.callbacks if not isinstance(c, _Milestones)]  # of an earlier run of this trainer
    trainer.callbacks[:] = [_Milestones(progress, fail), *others]


class _Milestones(pl.Callback):
    def __init__(self, progress: Progress, fail: Callable[[BaseException], None]) -> None:
        self._progress, self._fail = progress, fail

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._fail(exception)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._progress.reach("the start of training")

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._progress.reach(f"forward of micro-batch {batch_idx}, step {trainer.global_step}")

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Any) -> None:
        self._progress.reach(f"backward, step {trainer.global_step}")

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._progress.reach(f"after backward, step {trainer.global_step}")

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        self._progress.reach(f"optimizer step {trainer.global_step}")

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._progress.reach(f"end of micro-batch {batch_idx}, step {trainer.global_step}")

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._progress.reach("the start of validation")

    def on_validation_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._progress.reach(f"validation batch {batch_idx}")

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._progress.reach(f"end of validation batch {batch_idx}")

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._progress.reach("the end of validation")

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._progress.reach("saving a checkpoint", self._progress.long_s)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._progress.reach("the end of training", self._progress.long_s)
