"""Lowers a loss's KL penalty over time."""

from __future__ import annotations

import dataclasses

import lightning.pytorch as pl

from lit_async_rl.callbacks.parts import policy_module
from lit_async_rl.errors import SetupError
from lit_async_rl.losses import OAPL, TrajectoryBalance
from lit_async_rl.training.module import PolicyModule
from lit_async_rl.types import RolloutBatch
from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer


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
        self._first: tuple[PolicyModule, float] | None = None  # of this module

    def on_fit_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        """Takes the loss's own beta as the start."""
        module = policy_module(pl_module, "AnnealBeta")
        if self._first is None or self._first[0] is not module:
            self._first = module, _loss(module).beta

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: RolloutBatch, batch_idx: int
    ) -> None:
        """Sets the value of this step."""
        if self._first is None:
            raise SetupError("AnnealBeta works within a fit")
        module, first = self._first
        beta = first + min(1.0, trainer.global_step / self.steps) * (self.final - first)
        module.objective.loss = dataclasses.replace(_loss(module), beta=beta)
        module.log("loss/beta", beta)


def _loss(module: PolicyModule) -> TrajectoryBalance | OAPL:
    if not isinstance(module.objective.loss, TrajectoryBalance | OAPL):
        raise ValueError(f"AnnealBeta: model.loss={type(module.objective.loss).__name__} has no beta to change")
    return module.objective.loss
