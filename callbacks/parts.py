"""The module and the data module that most callbacks of this package work with."""

from __future__ import annotations

from lit_async_rl.data.module import RolloutDataModule
from lit_async_rl.training.module import PolicyModule
from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer


def policy_module(pl_module: AnyModule, owner: str) -> PolicyModule:
    """The policy that is trained.

    Raises:
        ValueError: it is another kind of module.
    """
    if not isinstance(pl_module, PolicyModule):
        raise ValueError(f"{owner} needs a PolicyModule (of lightning.pytorch), got {type(pl_module).__name__}")
    return pl_module


def rollout_data(trainer: AnyTrainer, owner: str) -> RolloutDataModule:
    """Where the rollouts come from.

    Raises:
        ValueError: there is no data module, or another kind of one.
    """
    data = trainer.datamodule
    if not isinstance(data, RolloutDataModule):
        got = "no data module" if data is None else type(data).__name__
        raise ValueError(f"{owner} needs a RolloutDataModule, got {got}")
    return data
