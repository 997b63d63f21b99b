"""Access to the `PolicyModule` and the `RolloutDataModule` of a run, for callbacks that need them."""

from __future__ import annotations

from lit_async_rl.data.module import RolloutDataModule
from lit_async_rl.training.module import PolicyModule
from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer


def policy_module(pl_module: AnyModule, owner: str) -> PolicyModule:
    """Returns the module as a `PolicyModule`, for the callback `owner`.

    Raises:
        ValueError: it is not a `PolicyModule`.
    """
    if not isinstance(pl_module, PolicyModule):
        raise ValueError(f"{owner} needs a PolicyModule (of lightning.pytorch), got {type(pl_module).__name__}")
    return pl_module


def rollout_data(trainer: AnyTrainer, owner: str) -> RolloutDataModule:
    """Returns the trainer's `RolloutDataModule`, for the callback `owner`.

    Raises:
        ValueError: there is no data module, or it is not a `RolloutDataModule`.
    """
    data = trainer.datamodule
    if not isinstance(data, RolloutDataModule):
        got = "no data module" if data is None else type(data).__name__
        raise ValueError(f"{owner} needs a RolloutDataModule, got {got}")
    return data
