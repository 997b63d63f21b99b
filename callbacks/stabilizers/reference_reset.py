"""Moves the reference policy along."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from lit_async_rl.errors import SetupError
from lit_async_rl.models.loading import receive_weights
from lit_async_rl.models.policy import CausalPolicy
from lit_async_rl.training.module import PolicyModule


class ReferenceReset(pl.Callback):
    """Makes the policy its own new reference every `every_n_steps` optimizer steps, as TBA may (arXiv:2503.18929).

    A checkpoint then contains the reference. Not for sharded parameters.

    Args:
        every_n_steps: optimizer steps between resets.

    Raises:
        ValueError: `every_n_steps` is not positive, or the run has no reference.
    """

    def __init__(self, every_n_steps: int) -> None:
        super().__init__()
        if every_n_steps < 1:
            raise ValueError(f"ReferenceReset.every_n_steps must be >= 1, got {every_n_steps}")
        self.every_n_steps = every_n_steps
        self._last = 0

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Checks that there is something to reset."""
        _reference(pl_module)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Copies the policy's full weights (adapters merged) after every n-th step."""
        if trainer.global_step == self._last or trainer.global_step % self.every_n_steps:
            return
        self._last = trainer.global_step
        if not isinstance(pl_module, PolicyModule):
            raise SetupError(f"ReferenceReset needs a PolicyModule, not {type(pl_module).__name__}")
        lm = _reference(pl_module).causal_lm
        lm.load_state_dict(receive_weights(lm, pl_module.stream_weights()), strict=False)  # tied names come once

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Adds the reference."""
        checkpoint["reference"] = _reference(pl_module).state_dict()

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Restores it, where the checkpoint was made with resets."""
        if "reference" in checkpoint:
            _reference(pl_module).load_state_dict(checkpoint["reference"])


def _reference(pl_module: pl.LightningModule) -> CausalPolicy:
    if not isinstance(pl_module, PolicyModule):
        raise SetupError(f"ReferenceReset needs a PolicyModule, not {type(pl_module).__name__}")
    if pl_module.reference is None:
        raise ValueError(
            "ReferenceReset: no reference is kept that could be moved. Set model.kl_coefficient, or a loss that needs "
            "one; and no model.lora, whose reference is the policy without its adapters"
        )
    return pl_module.reference
