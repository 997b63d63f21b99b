"""Lowers a loss's KL penalty over time."""

from __future__ import annotations

import dataclasses

import lightning.pytorch as pl

from lit_async_rl.errors import SetupError
from lit_async_rl.losses import OAPL, TrajectoryBalance
from lit_async_rl.training.module import PolicyModule
from lit_async_rl.types import RolloutBatch


class AnnealBeta(pl.Callback):
    """Moves `model.loss.beta` in a straight line to `final` within `steps` optimizer steps, where it stays.

    As in TBA (arXiv:2503.18929), for losses with a `beta`. Logs `loss/beta`. Depends on the step alone, so it resumes.

    Args:
        final: beta at the end.
        steps: optimizer steps until then.

    Raises:
        ValueError: a setting is not positive, or the loss has no `beta`.
    """

    def __init__(self, final: float, steps: int) -> None:
        super().__init__()
        for name, value in dict(final=final, steps=steps).items():
            if not value > 0:
                raise ValueError(f"AnnealBeta.{name} must be positive, got {value}")
        self.final, self.steps = final, steps
        self._first: float | None = None

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Takes the loss's own beta as the start."""
        loss = _loss(pl_module)
        self._first = loss.beta if self._first is None else self._first

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: RolloutBatch, batch_idx: int
    ) -> None:
        """Sets the value of this step."""
        if self._first is None:
            raise SetupError("AnnealBeta works within a fit")
        if not isinstance(pl_module, PolicyModule):
            raise SetupError(f"AnnealBeta needs a PolicyModule, not {type(pl_module).__name__}")
        done = min(1.0, trainer.global_step / self.steps)
        beta = self._first + done * (self.final - self._first)
        pl_module.objective.loss = dataclasses.replace(_loss(pl_module), beta=beta)
        pl_module.log("loss/beta", beta)


def _loss(pl_module: pl.LightningModule) -> TrajectoryBalance | OAPL:
    if not isinstance(pl_module, PolicyModule):
        raise SetupError(f"AnnealBeta needs a PolicyModule, not {type(pl_module).__name__}")
    if not isinstance(pl_module.objective.loss, TrajectoryBalance | OAPL):
        raise ValueError(f"AnnealBeta: model.loss={type(pl_module.objective.loss).__name__} has no beta to change")
    return pl_module.objective.loss
