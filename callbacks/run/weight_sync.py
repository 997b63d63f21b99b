"""Closes the circle: hands the engine the new weights, counts the version, gives the producer its slots back."""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl

from lit_async_rl.data.module import RolloutDataModule
from lit_async_rl.errors import SetupError
from lit_async_rl.training.module import PolicyModule
from lit_async_rl.utils.lightning_types import AnyTrainer


class WeightSync(pl.Callback):
    """Publishes the policy every `weight_sync_steps` optimizer steps.

    A version is counted, and the engine loaded, only when the weights have really changed: where every update since the
    last publication was skipped (by `GradientAlignmentControl`, say) the engine keeps what it has. The slots of the
    groups trained on come back either way. Logs `perf/weight_sync_s`, the seconds the trainer spent publishing.

    Args:
        weight_sync_steps: optimizer steps between publications.

    Attributes:
        total_s: seconds spent publishing since training began.

    Raises:
        ValueError: `weight_sync_steps` is not positive.
    """

    def __init__(self, weight_sync_steps: int = 1) -> None:
        if weight_sync_steps < 1:
            raise ValueError(f"weight_sync_steps must be >= 1, got {weight_sync_steps}")
        self.weight_sync_steps = weight_sync_steps
        self.total_s = 0.0
        self._published_step: int | None = None  # until training begins
        self._steps_before = 0  # a resume: steps since the last publication

    def setup(self, trainer: AnyTrainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Starts over where the callback is used again."""
        if stage == "fit":
            self._published_step, self._steps_before = None, 0

    def on_train_start(self, trainer: AnyTrainer, pl_module: pl.LightningModule) -> None:
        """Loads the current (possibly resumed) weights before the first prompt is sampled."""
        module, data = _parts(trainer, pl_module)
        self._published_step, self.total_s = trainer.global_step - self._steps_before, 0.0
        data.publish(module.version, module.stream_weights())
        data.start(module.version, module.stream_weights)
        self._sync_if_due(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: AnyTrainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After the last micro-batch of every `weight_sync_steps`-th step."""
        if (seconds := self._sync_if_due(trainer, pl_module)) is not None:
            pl_module.log("perf/weight_sync_s", seconds)

    def _sync_if_due(self, trainer: AnyTrainer, pl_module: pl.LightningModule) -> float | None:
        if self._steps_since(trainer) < self.weight_sync_steps:
            return None
        self._published_step = trainer.global_step
        module, data = _parts(trainer, pl_module)
        began = time.monotonic()
        if data.any_rank(module.take_updated()):  # a rank may hold a shard without gradients
            module.version += 1
            data.publish(module.version, module.stream_weights())
        data.advance(module.version)
        seconds = time.monotonic() - began
        self.total_s += seconds
        return seconds

    def on_save_checkpoint(
        self, trainer: AnyTrainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Adds the steps since the last publication; not 0 only between two."""
        checkpoint["steps_since_publication"] = self._steps_since(trainer)

    def on_load_checkpoint(
        self, trainer: AnyTrainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Goes on counting there."""
        self._steps_before = checkpoint["steps_since_publication"]

    def _steps_since(self, trainer: AnyTrainer) -> int:
        return self._steps_before if self._published_step is None else trainer.global_step - self._published_step


def _parts(trainer: AnyTrainer, pl_module: pl.LightningModule) -> tuple[PolicyModule, RolloutDataModule]:
    data = trainer.datamodule  # type: ignore[attr-defined]
    if not isinstance(pl_module, PolicyModule):
        raise SetupError(f"WeightSync publishes a PolicyModule, not {type(pl_module).__name__}")
    if not isinstance(data, RolloutDataModule):
        raise SetupError(f"WeightSync serves a RolloutDataModule, not {type(data).__name__}")
    return pl_module, data
