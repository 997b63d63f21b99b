"""Alarm actions that restore an earlier state: `RollBack` from memory, `RollBackToCheckpoint` from disk."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lit_async_rl.stabilizers.alarm_actions import AlarmAction
from lit_async_rl.utils.checks import check_range
from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer


class _Limited(AlarmAction):
    """Base of rollbacks, which stops training after `max_rollbacks` of them."""

    nothing_to_restore = "No healthy state was saved yet"

    def __init__(self, max_rollbacks: int) -> None:
        check_range(type(self).__name__, ">= 1", max_rollbacks=max_rollbacks)
        self.max_rollbacks = max_rollbacks
        self.num_rollbacks = 0

    def act(self, trainer: AnyTrainer, pl_module: AnyModule) -> str:
        if self.num_rollbacks >= self.max_rollbacks:
            trainer.should_stop = True
            return f"It was rolled back {self.num_rollbacks} times already: training stops."
        learning_rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in trainer.optimizers]
        done = self.roll_back(trainer, pl_module)
        # schedulers are not rolled back, and some compute the next rate from the present one
        for optimizer, rates in zip(trainer.optimizers, learning_rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
        if done is None:
            return f"{self.nothing_to_restore}: training continues unchanged."
        if callable(mark_updated := getattr(pl_module, "mark_updated", None)):  # a `PolicyModule` publishes them
            mark_updated()
        self.num_rollbacks += 1
        return done

    def state_dict(self) -> dict[str, Any]:
        return {"num_rollbacks": self.num_rollbacks}

    def resume(self, trainer: AnyTrainer, state_dict: dict[str, Any]) -> None:
        self.num_rollbacks = state_dict["num_rollbacks"]

    @abstractmethod
    def roll_back(self, trainer: AnyTrainer, pl_module: AnyModule) -> str | None:
        """Restores weights and optimizer state; returns a sentence for the report, or None without a saved state."""


class RollBack(_Limited):
    """Restores weights, buffers and optimizer moments from a copy taken at a healthy step.

    Each rank copies its own shards to CPU memory: works under every strategy, without communication. Schedulers and
    data are not rolled back: rollouts of discarded policies arrive for up to `max_staleness` more versions and are
    handled by importance weights or `ESSLearningRate`. The copies are not checkpointed. Parameters unfrozen or added to
    the optimizer since the copy keep their weights, and start with new moments.

    Args:
        every_n_steps: healthy steps between copies.
        max_rollbacks: rollbacks before training stops instead.
    """

    def __init__(self, every_n_steps: int = 50, max_rollbacks: int = 3) -> None:
        super().__init__(max_rollbacks)
        check_range("RollBack", ">= 1", every_n_steps=every_n_steps)
        self.every_n_steps = every_n_steps
        self._step: int | None = None
        self._weights: dict[str, Tensor] = {}
        self._moments: list[list[dict[str, object]]] = []

    def begin(self, trainer: AnyTrainer) -> None:
        self._step, self._weights, self._moments = None, {}, []

    def healthy(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        """Takes a copy every `every_n_steps` steps, before the update: the one that follows is not known to be good."""
        tensors = _tensors(pl_module)
        is_due = self._step is None or trainer.global_step - self._step >= self.every_n_steps
        if not is_due and tensors.keys() <= self._weights.keys():
            return
        self._step = trainer.global_step
        self._weights = {name: _piece(t).to("cpu", copy=True) for name, t in tensors.items()}
        self._moments = [[_copied(o.state.get(p, {})) for p in _params(o)] for o in trainer.optimizers]

    @torch.no_grad()
    def roll_back(self, trainer: AnyTrainer, pl_module: AnyModule) -> str | None:
        if self._step is None:
            return None
        for name, tensor in _tensors(pl_module).items():
            if name in self._weights:
                _piece(tensor).copy_(self._weights[name])
        for optimizer, saved in zip(trainer.optimizers, self._moments, strict=True):
            params = _params(optimizer)  # groups are added at the end
            for param, moments in zip(params, saved + [{}] * (len(params) - len(saved)), strict=True):
                _restore_moments(optimizer, param, moments)
        return f"Weights and moments were rolled back to those after step {self._step}."


class RollBackToCheckpoint(_Limited):
    """Restores weights and optimizer state from the newest checkpoint written while the run was healthy.

    A checkpoint with fewer parameter groups than the optimizer now has cannot be restored.

    Args:
        max_rollbacks: rollbacks before training stops instead.
    """

    def __init__(self, max_rollbacks: int = 3) -> None:
        super().__init__(max_rollbacks)
        self.path: str | None = None

    def begin(self, trainer: AnyTrainer) -> None:
        self.path = None

    def healthy(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        """Records the path of the newest checkpoint."""
        for callback in trainer.checkpoint_callbacks:
            if hasattr(callback, "last_model_path"):  # the `ModelCheckpoint` of either Lightning
                self.path = callback.last_model_path or callback.best_model_path or self.path

    def roll_back(self, trainer: AnyTrainer, pl_module: AnyModule) -> str | None:
        if self.path is None:
            return None
        checkpoint = trainer.strategy.load_checkpoint(self.path)
        if not _fits(checkpoint, trainer.optimizers):
            self.nothing_to_restore = f"The checkpoint {self.path} has other parameter groups than the optimizer"
            return None
        # not strict: a module may leave out of its checkpoints what never changes
        trainer.strategy.load_model_state_dict(checkpoint, strict=False)
        trainer.strategy.load_optimizer_state_dict(checkpoint)
        return f"Weights and moments were rolled back to the checkpoint {self.path}."


def _fits(checkpoint: dict[str, Any], optimizers: list[Optimizer]) -> bool:
    """Whether numbers of parameter groups match; sharded checkpoints have no `optimizer_states` here."""
    saved = checkpoint.get("optimizer_states") or []
    return all(len(s["param_groups"]) == len(o.param_groups) for s, o in zip(saved, optimizers, strict=False))


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    return trained | dict(module.named_buffers())


def _params(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _piece(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _copied(moments: dict[str, object]) -> dict[str, object]:
    return {k: _piece(v).to("cpu", copy=True) if isinstance(v, Tensor) else v for k, v in moments.items()}


def _restore_moments(optimizer: Optimizer, param: nn.Parameter, saved: dict[str, object]) -> None:
    """Restores moments in place, because they may be sharded; removes those that did not exist yet."""
    if not saved:
        optimizer.state.pop(param, None)
        return
    for name, value in saved.items():
        if isinstance(value, Tensor):
            _piece(optimizer.state[param][name]).copy_(value)
        else:
            optimizer.state[param][name] = value
