"""Statistics of the replay buffer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import lightning.pytorch as pl
from torchmetrics import MeanMetric

from lit_async_rl.callbacks.monitors.step_monitor import StepMonitor
from lit_async_rl.callbacks.parts import rollout_data
from lit_async_rl.types import RolloutBatch
from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer


class ReplayMonitor(StepMonitor):
    """Logs `replay/*`, the fields of `ReplayStats`, and `sample/off_policy_share`, the share of stale tokens.

    Raises:
        ValueError: the run has no replay buffer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.off_policy = MeanMetric()

    def on_fit_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        if rollout_data(trainer, "ReplayMonitor").replay is None:
            raise ValueError("ReplayMonitor: data.replay is not set, so there is nothing to monitor")

    def update(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: RolloutBatch) -> None:
        """Adds the tokens that train."""
        signals: Any = pl_module.stabilizer_signals
        self.off_policy.update((signals["staleness"][batch.loss_mask] > 0).float().cpu())

    def compute(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> Mapping[str, Any]:
        replay = trainer.datamodule.replay  # type: ignore[attr-defined]
        values = {f"replay/{name}": float(value) for name, value in asdict(replay.stats()).items()}
        share = float(self.off_policy.compute())
        self.off_policy.reset()
        return values if math.isnan(share) else values | {"sample/off_policy_share": share}
