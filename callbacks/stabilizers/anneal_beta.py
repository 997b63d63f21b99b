"""Annealing of the KL coefficient of a loss."""

from __future__ import annotations

import dataclasses

import lightning.pytorch as pl

from lit_async_rl.callbacks.parts import policy_module
from lit_async_rl.errors import SetupError
from lit_async_rl.losses import OAPL, TrajectoryBalance
from lit_async_rl.training.module import PolicyModule
from lit_async_rl.types import RolloutBatch
from lit_async_rl.utils.checks import check_range
from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer


class AnnealBeta(pl.Callback):
    """Anneals `model.loss.beta` linearly to `final` within `steps` optimizer steps.

    As in TBA (arXiv:2503.18929), for losses with a `beta`. Depends on the step only, so a resumed run continues the
    schedule. The initial beta is restored when training ends. Logs `loss/beta`.

    Args:
        final: final value of beta.
        steps: optimizer steps until it is reached.

    Raises:
        ValueError: a setting is not positive, or the loss has no `beta`.
    """

    def __init__(self, final: float, steps: int) -> None:
        super().__init__()
        check_range("AnnealBeta", "integer positive", steps=steps)
        check_range("AnnealBeta", "positive", final=final)
        self.final = final
        self.steps = steps
        self._initial_beta: tuple[PolicyModule, float] | None = None  # module and its initial beta

    def on_fit_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        """Reads the initial beta from the loss."""
        module = policy_module(pl_module, "AnnealBeta")
        self._initial_beta = module, _loss(module).beta

    def on_exception(self, trainer: AnyTrainer, pl_module: AnyModule, exception: BaseException) -> None:
        self._restore()

    def teardown(self, trainer: AnyTrainer, pl_module: AnyModule, stage: str) -> None:
        self._restore()

    def _restore(self) -> None:
        """Restores the initial beta, or another fit would begin with the annealed one."""
        if self._initial_beta is not None:
            module, first = self._initial_beta
            module.objective.loss = dataclasses.replace(_loss(module), beta=first)
            self._initial_beta = None

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: RolloutBatch, batch_idx: int
    ) -> None:
        """Sets beta for this step."""
        if self._initial_beta is None:
            raise SetupError("AnnealBeta.on_fit_start must run before the first training batch")
        module, first = self._initial_beta
        beta = first + min(1.0, trainer.global_step / self.steps) * (self.final - first)
        module.objective.loss = dataclasses.replace(_loss(module), beta=beta)
        module.log("loss/beta", beta)


def _loss(module: PolicyModule) -> TrajectoryBalance | OAPL:
    if not isinstance(module.objective.loss, TrajectoryBalance | OAPL):
        raise ValueError(f"AnnealBeta: model.loss={type(module.objective.loss).__name__} has no beta to change")
    return module.objective.loss
