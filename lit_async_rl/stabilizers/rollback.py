"""Alarm actions that restore an earlier state: `RollBack` from memory, `RollBackToCheckpoint` from disk."""

from __future__ import annotations

import logging
from abc import abstractmethod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_async_rl.models.sharded_checkpoint import MANIFEST
from lit_async_rl.models.weights import own_piece
from lit_async_rl.runtime.files import absolute, duplicate
from lit_async_rl.stabilizers.collapse import AlarmAction, DiscardingData
from lit_async_rl.stabilizers.step_lr import group_settings
from lit_async_rl.utils.checks import check_range
from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer
from lit_async_rl.utils.saving import finish_saving

# -- Copies of weights and of an optimizer's moments in CPU memory; each rank has its own shards ----------------------


def restorable_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Trained parameters, buffers, and parameters of a reference policy that is reset during training."""
    trained = {n: p for n, p in module.named_parameters() if p.requires_grad or hasattr(p, "is_reset")}
    return trained | dict(module.named_buffers())


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Parameters of all groups, in order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def copied_moments(moments: dict[str, object]) -> dict[str, object]:
    """Copy of an optimizer's state of one parameter, with tensors on the CPU."""
    return {k: own_piece(v).to("cpu", copy=True) if isinstance(v, Tensor) else v for k, v in moments.items()}


def restore_moments(optimizer: Optimizer, param: nn.Parameter, saved: dict[str, object]) -> None:
    """Restores moments in place, as they may be sharded; removes them if none were saved."""
    if not saved:
        optimizer.state.pop(param, None)
        return
    for name, value in saved.items():
        if isinstance(value, Tensor):
            own_piece(optimizer.state[param][name]).copy_(value)
        else:
            optimizer.state[param][name] = value


log = logging.getLogger(__name__)


class _LimitedRollback(AlarmAction):
    """Base class of rollbacks; stops training once `max_rollbacks` are used up.

    What the discarded versions of a `PolicyModule` have sampled does not train: the next publication drops groups that
    have their tokens or are still being sampled. The prompts come again.

    Attributes:
        version: of the policy that `roll_back` restores; None for modules without versions.
    """

    nothing_to_restore = "No healthy state was saved yet"

    def __init__(self, max_rollbacks: int) -> None:
        check_range(type(self).__name__, "integer >= 1", max_rollbacks=max_rollbacks)
        self.max_rollbacks = max_rollbacks
        self.num_rollbacks = 0
        self.version: int | None = None

    def act(self, trainer: AnyTrainer, pl_module: AnyModule) -> str:
        if self.num_rollbacks >= self.max_rollbacks:
            trainer.should_stop = True
            return f"It was rolled back {self.num_rollbacks} times already: training stops."
        settings = [group_settings(optimizer) for optimizer in trainer.optimizers]
        done = self.roll_back(trainer, pl_module)
        # keep the present settings: schedulers are not rolled back, and some compute the next rate from the present
        # one; a checkpoint of the run that was resumed may hold other settings
        for optimizer, of_groups in zip(trainer.optimizers, settings, strict=True):
            for group, present in zip(optimizer.param_groups, of_groups, strict=True):
                group.update(present)
        if done is None:
            return f"{self.nothing_to_restore}: training continues unchanged."
        # a `PolicyModule` publishes changed weights after an update only, and a rollback is none
        if callable(mark_updated := getattr(pl_module, "mark_updated", None)):
            mark_updated()
        self.num_rollbacks += 1
        data = trainer.datamodule  # type: ignore[attr-defined]
        if self.version is None or not isinstance(data, DiscardingData):
            return done
        data.discard_after(self.version)
        return f"{done} What versions after {self.version} have sampled is discarded."

    def state_dict(self) -> dict[str, Any]:
        return {"num_rollbacks": self.num_rollbacks}

    def resume(self, trainer: AnyTrainer, state_dict: dict[str, Any]) -> None:
        self.num_rollbacks = state_dict["num_rollbacks"]

    @abstractmethod
    def roll_back(self, trainer: AnyTrainer, pl_module: AnyModule) -> str | None:
        """Restores weights and optimizer state; returns a sentence for the report, None without a saved state."""


class RollBack(_LimitedRollback):
    """Restores weights, buffers, a resettable reference policy and optimizer moments from a copy of a healthy step.

    Under every strategy each rank copies its own shards to CPU memory, without communication. Schedulers are not rolled
    back, nor is the order of prompts. Parameters unfrozen or added to the optimizer since then keep their weights, with
    new moments.

    Copies are not checkpointed. The first healthy step after a checkpoint takes one, as the first of a resumed run
    does, so that a resumed run continues like an uninterrupted one, unless it rolls back before that.

    Args:
        every_n_steps: healthy steps between copies.
        max_rollbacks: rollbacks before training stops instead.
    """

    def __init__(self, every_n_steps: int = 50, max_rollbacks: int = 3) -> None:
        super().__init__(max_rollbacks)
        check_range("RollBack", "integer >= 1", every_n_steps=every_n_steps)
        self.every_n_steps = every_n_steps
        self._step: int | None = None
        self._is_due = False  # since a checkpoint was saved
        self._weights: dict[str, Tensor] = {}
        self._moments: list[dict[nn.Parameter, dict[str, object]]] = []

    def begin(self, trainer: AnyTrainer) -> None:
        self._step = None
        self._is_due = False
        self._weights = {}
        self._moments = []
        self.version = None
        self.num_rollbacks = 0

    def healthy(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        """Takes a copy every `every_n_steps` steps, before the update, whose result is not yet known."""
        tensors = restorable_tensors(pl_module)
        is_due = self._is_due or self._step is None or trainer.global_step - self._step >= self.every_n_steps
        if not is_due and tensors.keys() <= self._weights.keys():
            return
        self._step = trainer.global_step
        self._is_due = False
        self.version = _version_of(pl_module)
        self._weights = {name: own_piece(t).to("cpu", copy=True) for name, t in tensors.items()}
        self._moments = [{p: copied_moments(o.state.get(p, {})) for p in parameters_of(o)} for o in trainer.optimizers]

    def saved(self) -> None:
        self._is_due = True

    @torch.no_grad()
    def roll_back(self, trainer: AnyTrainer, pl_module: AnyModule) -> str | None:
        if self._step is None:
            return None
        finish_saving(trainer)  # a checkpoint writer in the background still reads these tensors
        for name, tensor in restorable_tensors(pl_module).items():
            if name in self._weights:
                own_piece(tensor).copy_(self._weights[name])
        for optimizer, saved in zip(trainer.optimizers, self._moments, strict=True):
            for param in parameters_of(optimizer):  # some may have been added since the copy
                restore_moments(optimizer, param, saved.get(param, {}))
        return f"Weights and moments were rolled back to those after step {self._step}."


class RollBackToCheckpoint(_LimitedRollback):
    """Restores weights and optimizer state from the newest checkpoint written while the run was healthy.

    A checkpoint is healthy if the next step, the first with its weights, is. The newest is kept as `healthy.ckpt`
    beside the others, because `ModelCheckpoint` removes its own (`save_top_k: 1`) and moves the link `last.ckpt`.
    `healthy.ckpt` is a hard link, or a copy where files are not replaced atomically or the file system has no links,
    and needs the disk space of one more checkpoint.

    A resumed run may return to the checkpoint it was resumed from if that is the newest. It replaces the `healthy.ckpt`
    of an earlier run without using it. Two alarms with this action would share the file.

    Checkpoints at URLs such as `s3://` are not kept; one with other parameter groups than the optimizer now has is not
    restored.

    Args:
        max_rollbacks: rollbacks before training stops instead.

    Raises:
        ValueError: at the start of training, with Lightning's `AsyncCheckpointIO`.

    Attributes:
        path: the checkpoint to restore; None on other ranks than the first.
    """

    def __init__(self, max_rollbacks: int = 3) -> None:
        super().__init__(max_rollbacks)
        self.path: str | None = None
        self._original = ""  # file name under which it was saved
        self._last_classified: tuple[int, int] | None = None

    def begin(self, trainer: AnyTrainer) -> None:
        if type(trainer.strategy.checkpoint_io).__name__ == "AsyncCheckpointIO":  # of either Lightning
            raise ValueError(
                "CollapseAlarm.action=RollBackToCheckpoint: Lightning's AsyncCheckpointIO does not report when a file "
                "is complete; use lit_async_rl's BackgroundCheckpointIO in trainer.plugins"
            )
        newest = _newest(_names(trainer))
        resumed = trainer.ckpt_path
        is_present = newest is not None and resumed and Path(resumed).exists() and newest.samefile(resumed)
        self.path = None
        self._original = ""
        self.num_rollbacks = 0
        self._last_classified = None if newest is None or is_present else _identity(newest)

    def healthy(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        """Keeps the newest checkpoint, if it was written since the step before."""
        self._classify_when_written(trainer, is_healthy=True)

    def unhealthy(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        """Rejects the newest checkpoint, if it was written since the step before."""
        self._classify_when_written(trainer, is_healthy=False)

    def roll_back(self, trainer: AnyTrainer, pl_module: AnyModule) -> str | None:
        finish_saving(trainer)  # the newest checkpoint may still be written, and decides on `path`
        path, original = trainer.strategy.broadcast((self.path, self._original))  # only the first rank knows
        if path is None:
            return None
        checkpoint = trainer.strategy.load_checkpoint(path)
        if not _has_same_groups(checkpoint, trainer.optimizers):
            self.nothing_to_restore = f"The checkpoint {path} has other parameter groups than the optimizer"
            return None
        # not strict: a module may leave frozen weights out of its checkpoints
        trainer.strategy.load_model_state_dict(checkpoint, strict=False)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if hasattr(callback, "on_roll_back"):  # `ReferenceReset`
                callback.on_roll_back(trainer, pl_module, checkpoint)
        trainer.strategy.load_optimizer_state_dict(checkpoint)
        self.version = None if _version_of(pl_module) is None else checkpoint.get("version")
        return f"Weights and moments were rolled back to the checkpoint {path}, saved as {original}."

    def _classify_when_written(self, trainer: AnyTrainer, is_healthy: bool) -> None:
        """Classifies the newest checkpoint as healthy or not, once it is written."""
        names = _names(trainer)
        checkpoint_io = trainer.strategy.checkpoint_io
        if not names or not trainer.is_global_zero:
            return
        can_link = getattr(checkpoint_io, "replaces_files", False)
        after_saving = getattr(checkpoint_io, "after_saving", None)  # of writers in the background
        if after_saving is None:
            self._classify_newest(names, is_healthy, can_link)
        else:
            after_saving(lambda: self._classify_newest(names, is_healthy, can_link))

    def _classify_newest(self, names: list[str], is_healthy: bool, can_link: bool) -> None:
        newest = _newest(names)
        if newest is None or (identity := _identity(newest)) == self._last_classified:
            return
        self._last_classified = identity
        if not is_healthy:
            return
        kept = newest.with_name("healthy.ckpt")
        # a link must not see later writes: torch writes into its folders in place, and replaces nothing
        is_replaced = can_link and (newest.is_file() or (newest / MANIFEST).is_file())
        try:
            duplicate(newest, kept, is_replaced)
        except OSError as error:
            log.warning(
                "RollBackToCheckpoint could not keep a copy of %s, so the older checkpoint is kept: %s", newest, error
            )
            return
        self.path = str(kept)
        self._original = newest.name


def _version_of(pl_module: AnyModule) -> int | None:
    """Version of the policy in training; None for modules that count none."""
    version = getattr(pl_module, "version", None)
    return version if isinstance(version, int) else None


def _names(trainer: AnyTrainer) -> list[str]:
    """Newest checkpoint, perhaps a link, of each `ModelCheckpoint` (of either Lightning package)."""
    callbacks = [callback for callback in trainer.checkpoint_callbacks if hasattr(callback, "last_model_path")]
    return [name for c in callbacks if (name := c.last_model_path or c.best_model_path)]


def _newest(names: list[str]) -> Path | None:
    """The newest file or folder that exists, with links resolved."""
    found = [path for name in names if (path := absolute(name).resolve()).exists()]
    return max(found, key=lambda path: path.stat().st_mtime_ns, default=None)


def _identity(path: Path) -> tuple[int, int]:
    """Inode and time of the last change [ns], which tell apart checkpoints of one name."""
    status = path.stat()
    return status.st_ino, status.st_mtime_ns


def _has_same_groups(checkpoint: dict[str, Any], optimizers: list[Optimizer]) -> bool:
    """Whether parameter groups have equal sizes; sharded checkpoints have no `optimizer_states` here."""
    saved = checkpoint.get("optimizer_states") or []
    return all(_sizes(s["param_groups"]) == _sizes(o.param_groups) for s, o in zip(saved, optimizers, strict=False))


def _sizes(groups: list[dict[str, Any]]) -> list[int]:
    return [len(group["params"]) for group in groups]
