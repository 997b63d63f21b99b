"""What to do when a run collapses: actions for `CollapseAlarm`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lit_async_rl.stabilizers.staleness_bound import bounded_data
from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer


class AlarmAction(ABC):
    """Carried out after the step that raised the alarm, on all ranks alike."""

    def begin(self, trainer: AnyTrainer) -> None:  # noqa: B027
        """Called when training starts: forgets an earlier run, and refuses a trainer on which it could not act."""

    def healthy(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:  # noqa: B027
        """Called before each update whose data broke no limit: the weights as they are now have proved good."""

    @abstractmethod
    def act(self, trainer: AnyTrainer, pl_module: AnyModule) -> str:
        """Acts; says in words what was done."""

    def state_dict(self) -> dict[str, Any]:
        """What to checkpoint; plain and the same on all ranks."""
        return {}

    def resume(self, trainer: AnyTrainer, state_dict: dict[str, Any]) -> None:  # noqa: B027
        """Restores it, after the first step of a resumed run."""


class Warn(AlarmAction):
    """Only says what happened."""

    def act(self, trainer: AnyTrainer, pl_module: AnyModule) -> str:
        """See the class."""
        return "Training goes on unchanged."


class Stop(AlarmAction):
    """Ends training after this step, in good order."""

    def act(self, trainer: AnyTrainer, pl_module: AnyModule) -> str:
        """See the class."""
        trainer.should_stop = True
        return "Training stops."


class LowerStaleness(AlarmAction):
    """Lowers the data module's `max_staleness`.

    Args:
        by: versions at a time.
        minimum: but not below.

    Raises:
        ValueError: a setting is out of range; when training starts, the data module has no bound or cannot change it.
    """

    def __init__(self, by: int = 1, minimum: int = 0) -> None:
        if by < 1 or minimum < 0:
            raise ValueError(f"LowerStaleness: by must be >= 1 and minimum >= 0, got {by} and {minimum}")
        self.by, self.minimum = by, minimum
        self._bound: int | None = None

    def begin(self, trainer: AnyTrainer) -> None:
        """Needs a data module whose bound can be changed."""
        data = bounded_data(trainer, "LowerStaleness")
        data.set_max_staleness(data.max_staleness)
        self._bound = None

    def act(self, trainer: AnyTrainer, pl_module: AnyModule) -> str:
        """See the class."""
        data = bounded_data(trainer, "LowerStaleness")
        before, after = data.max_staleness, max(self.minimum, data.max_staleness - self.by)
        if after >= before:
            return f"max_staleness stays at {before}, its minimum."
        data.set_max_staleness(after)
        self._bound = after
        return f"max_staleness was lowered from {before} to {after}."

    def state_dict(self) -> dict[str, Any]:
        """The bound, if it was ever lowered."""
        return {"bound": self._bound}

    def resume(self, trainer: AnyTrainer, state_dict: dict[str, Any]) -> None:
        """Lowers it again: a data module starts at its configured bound."""
        self._bound = state_dict["bound"]
        data = bounded_data(trainer, "LowerStaleness")
        if self._bound is not None and self._bound < data.max_staleness:
            data.set_max_staleness(self._bound)


class _Limited(AlarmAction):
    """Stops instead when it was needed too often."""

    def __init__(self, max_rollbacks: int) -> None:
        if max_rollbacks < 1:
            raise ValueError(f"max_rollbacks must be >= 1, got {max_rollbacks}")
        self.max_rollbacks = max_rollbacks
        self.num_rollbacks = 0

    def act(self, trainer: AnyTrainer, pl_module: AnyModule) -> str:
        """See the class."""
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
            return "There is nothing good to roll back to yet: training goes on unchanged."
        if callable(mark_updated := getattr(pl_module, "mark_updated", None)):  # a `PolicyModule` publishes them
            mark_updated()
        self.num_rollbacks += 1
        return done

    def state_dict(self) -> dict[str, Any]:
        """How often it was needed."""
        return {"num_rollbacks": self.num_rollbacks}

    def resume(self, trainer: AnyTrainer, state_dict: dict[str, Any]) -> None:
        """Restores it."""
        self.num_rollbacks = state_dict["num_rollbacks"]

    @abstractmethod
    def roll_back(self, trainer: AnyTrainer, pl_module: AnyModule) -> str | None:
        """Restores weights and moments; None if there is nothing to restore."""


class RollBack(_Limited):
    """Restores weights, buffers and optimizer moments of the last healthy copy in memory.

    Each rank copies its own shards to the CPU: works under every strategy, without communication. Schedulers and data
    go on: data sampled by the policies that were undone arrives for up to `max_staleness` more versions, and is for
    importance weights or `ESSLearningRate` to deal with. The copies are not checkpointed. Parameters that were unfrozen
    or given to the optimizer since the copy keep their weights, and start with new moments.

    Args:
        every_n_steps: healthy steps between copies.
        max_rollbacks: then it stops instead.
    """

    def __init__(self, every_n_steps: int = 50, max_rollbacks: int = 3) -> None:
        super().__init__(max_rollbacks)
        if every_n_steps < 1:
            raise ValueError(f"RollBack: every_n_steps must be >= 1, got {every_n_steps}")
        self.every_n_steps = every_n_steps
        self._step: int | None = None
        self._weights: dict[str, Tensor] = {}
        self._moments: list[list[dict[str, object]]] = []

    def begin(self, trainer: AnyTrainer) -> None:
        """Forgets the copies of an earlier run."""
        self._step, self._weights, self._moments = None, {}, []

    def healthy(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        """Takes a copy when it is time; not after the update, because nothing has judged that one yet."""
        tensors = _tensors(pl_module)
        is_due = self._step is None or trainer.global_step - self._step >= self.every_n_steps
        if not is_due and tensors.keys() <= self._weights.keys():
            return
        self._step = trainer.global_step
        self._weights = {name: _piece(t).to("cpu", copy=True) for name, t in tensors.items()}
        self._moments = [[_copied(o.state.get(p, {})) for p in _params(o)] for o in trainer.optimizers]

    @torch.no_grad()
    def roll_back(self, trainer: AnyTrainer, pl_module: AnyModule) -> str | None:
        """See the class."""
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
    """Restores weights and moments from the newest checkpoint that was written while the run was healthy.

    One that was written before parameter groups were added to an optimizer is of no use.

    Args:
        max_rollbacks: then it stops instead.
    """

    def __init__(self, max_rollbacks: int = 3) -> None:
        super().__init__(max_rollbacks)
        self.path: str | None = None

    def begin(self, trainer: AnyTrainer) -> None:
        """Forgets the checkpoints of an earlier run."""
        self.path = None

    def healthy(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        """Remembers what the checkpoint callbacks have written up to now."""
        for callback in trainer.checkpoint_callbacks:
            if hasattr(callback, "last_model_path"):  # the `ModelCheckpoint` of either Lightning
                self.path = callback.last_model_path or callback.best_model_path or self.path

    def roll_back(self, trainer: AnyTrainer, pl_module: AnyModule) -> str | None:
        """See the class."""
        if self.path is None:
            return None
        checkpoint = trainer.strategy.load_checkpoint(self.path)
        if not _fits(checkpoint, trainer.optimizers):
            return None
        # not strict: a module may leave out of its checkpoints what never changes
        trainer.strategy.load_model_state_dict(checkpoint, strict=False)
        trainer.strategy.load_optimizer_state_dict(checkpoint)
        return f"Weights and moments were rolled back to the checkpoint {self.path}."


def _fits(checkpoint: dict[str, Any], optimizers: list[Optimizer]) -> bool:
    """Whether its optimizers have as many parameter groups; sharded checkpoints are read elsewhere."""
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
    """In place, because moments may be sharded; those that did not exist yet are taken away again."""
    if not saved:
        optimizer.state.pop(param, None)
        return
    for name, value in saved.items():
        if isinstance(value, Tensor):
            _piece(optimizer.state[param][name]).copy_(value)
        else:
            optimizer.state[param][name] = value
