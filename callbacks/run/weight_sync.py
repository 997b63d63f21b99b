"""Closes the circle: hands the engine the new weights, counts the version, gives the producer its slots back."""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl

from lit_async_rl.callbacks.parts import policy_module, rollout_data
from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer


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
        ValueError: `weight_sync_steps` is not positive; when training starts, module or data module is another.
    """

    def __init__(self, weight_sync_steps: int = 1) -> None:
        if weight_sync_steps < 1:
            raise ValueError(f"weight_sync_steps must be >= 1, got {weight_sync_steps}")
        self.weight_sync_steps = weight_sync_steps
        self.total_s = 0.0
        self._published_step = 0
        self._steps_before = 0  # a resume: steps since the last publication

    def on_train_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        """Loads the current (possibly resumed) weights before the first prompt is sampled."""
        module, data = policy_module(pl_module, "WeightSync"), rollout_data(trainer, "WeightSync")
        self._published_step, self.total_s = trainer.global_step - self._steps_before, 0.0
        data.publish(module.version, module.stream_weights())
        data.start(module.version, module.stream_weights)
        if self._steps_before:
            self._steps_before = 0
            self._sync_if_due(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After the last micro-batch of every `weight_sync_steps`-th step."""
        if (seconds := self._sync_if_due(trainer, pl_module)) is not None:
            pl_module.log("perf/weight_sync_s", seconds)

    def _sync_if_due(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> float | None:
        if trainer.global_step - self._published_step < self.weight_sync_steps:
            return None
        self._published_step = trainer.global_step
        module, data = policy_module(pl_module, "WeightSync"), rollout_data(trainer, "WeightSync")
        began = time.monotonic()
        if data.any_rank(module.take_updated()):  # a rank may hold a shard without gradients
            module.version += 1
            data.publish(module.version, module.stream_weights())
        data.advance(module.version)
        seconds = time.monotonic() - began
        self.total_s += seconds
        return seconds

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Adds the steps since the last publication; not 0 only between two."""
        checkpoint["steps_since_publication"] = trainer.global_step - self._published_step

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Goes on counting there."""
        self._steps_before = checkpoint["steps_since_publication"]
