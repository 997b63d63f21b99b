"""Periodic reset of the reference policy."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from lit_async_rl.callbacks.parts import policy_module
from lit_async_rl.models.policy import CausalPolicy
from lit_async_rl.models.weights import apply_weights, is_sharded, receive_weights
from lit_async_rl.utils.checks import check_range
from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer


class ReferenceReset(pl.Callback):
    """Copies the policy to the reference every `every_n_steps` optimizer steps, as in TBA (arXiv:2503.18929).

    Checkpoints then contain the reference, and rollbacks of `CollapseAlarm` restore it with the weights. Not supported
    with sharded parameters.

    Args:
        every_n_steps: optimizer steps between resets.

    Raises:
        ValueError: `every_n_steps` is not positive; when training starts, there is no reference, or it is sharded.
    """

    def __init__(self, every_n_steps: int) -> None:
        super().__init__()
        check_range("ReferenceReset", "integer >= 1", every_n_steps=every_n_steps)
        self.every_n_steps = every_n_steps
        self._last = 0

    def on_fit_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        """Checks that there is a reference policy, whole on every rank."""
        self._last = 0
        for parameter in _reference(pl_module).parameters():
            parameter.is_reset = True  # type: ignore[attr-defined]  # so that `RollBack` copies it
        if is_sharded(trainer.strategy.model or pl_module):
            raise ValueError(
                f"ReferenceReset copies whole weights, but trainer.strategy={type(trainer.strategy).__name__} shards "
                "the reference policy. Leave ReferenceReset out, or use DDP"
            )

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Copies the policy's full weights (adapters merged) after every n-th step."""
        if trainer.global_step == self._last or trainer.global_step % self.every_n_steps:
            return
        self._last = trainer.global_step
        lm = _reference(pl_module).causal_lm
        weights = policy_module(pl_module, "ReferenceReset").stream_weights()
        apply_weights(lm, receive_weights(lm, weights))

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint["reference"] = _reference(pl_module).state_dict()

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Restores the reference, if the checkpoint has one."""
        self.on_roll_back(trainer, pl_module, checkpoint)

    def on_roll_back(self, trainer: AnyTrainer, pl_module: AnyModule, checkpoint: dict[str, Any]) -> None:
        """Restores the reference after an alarm, if the checkpoint has one."""
        if "reference" in checkpoint:
            _reference(pl_module).load_state_dict(checkpoint["reference"])


def _reference(pl_module: AnyModule) -> CausalPolicy:
    reference = policy_module(pl_module, "ReferenceReset").reference
    if reference is None:
        raise ValueError(
            "ReferenceReset needs a reference policy with weights of its own: set model.kl_coefficient, or a loss that "
            "needs a reference. With model.lora but without modules_to_save, the reference is the policy without its "
            "adapters, so it cannot be reset"
        )
    return reference
