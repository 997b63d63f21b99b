"""Atomic checkpoint files, optionally written in the background."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from lit_async_rl.models.sharded_checkpoint import check_folder
from lit_async_rl.runtime.checkpoint_files import DigestWriter, check_file, read_in_thread
from lit_async_rl.runtime.files import absolute, is_disk_full, move_into_place, part_name, remove_stale_parts, replacing
from lit_async_rl.runtime.threads import OrderedTasks
from lit_async_rl.utils.device_memory import StagedCopies, host_copy, staged_copies

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Written:
    """Path of a checkpoint, and the number of optimizer steps before it."""

    path: Path
    step: int


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes checkpoints atomically: a crash while saving leaves the previous file intact.

    (Lightning's own IO moves the file from the system's temporary folder, which is a copy between file systems.)

    On a full disk training continues, after a warning. After any failure no checkpoint is removed until one is written
    again. If the last one of a run is missing, the run ends with `LastCheckpointError`.

    Attributes:
        replaces_files: a checkpoint of the same name is a new file, and hard links keep the old one.
        unwritten: the last checkpoint, if it could not be written to a full disk; None otherwise.
        newest: the newest checkpoint written and not removed; None without one.
        last_is_missing: whether the last checkpoint was not written, for any reason.
    """

    replaces_files = True

    def __init__(self) -> None:
        self.unwritten: Written | None = None
        self.newest: Written | None = None
        self.last_is_missing = False
        self._is_readability_checked = False

    @property
    def disk_is_full(self) -> bool:
        """Whether the last checkpoint was not written because the disk is full."""
        return self.unwritten is not None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Writes a checkpoint; Lightning writes those at URLs such as `s3://`."""
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = absolute(path)
        written = Written(path=Path(path), step=int(checkpoint.get("global_step", 0)))
        self.last_is_missing = True  # until the file is complete: an error below may be raised to the caller
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            remove_stale_parts(target.parent)
            with replacing(target) as file:
                writer = DigestWriter(file)
                torch.save(checkpoint, cast("BinaryIO", writer))  # which only calls `write`
                writer.finish_archive()
        except (OSError, RuntimeError) as error:  # torch's writer raises RuntimeError in place of OSError
            if not is_disk_full(error):
                raise
            self.unwritten = written
            log.warning("checkpoint %s was not written: the disk is full. Older checkpoints are kept", path)
            return
        self.unwritten = None
        self.newest = written
        self.last_is_missing = False
        if not self._is_readability_checked:
            self._is_readability_checked = True
            _warn_if_unreadable(target)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Loads a checkpoint after verifying its digest; never executes code, whatever `weights_only` is."""
        check_checkpoint(path, is_of_policy=False)  # any module's; a `PolicyModule` refuses those of others
        check_is_one_file(path)
        return super().load_checkpoint(path, map_location or (lambda storage, _: storage), weights_only=True)

    def remove_checkpoint(self, path: Any) -> None:
        """Removes a checkpoint, unless its successor could not be written."""
        if self.last_is_missing:
            return
        super().remove_checkpoint(path if "://" in str(path) else absolute(path))
        if self.newest is not None and self.newest.path == Path(path):
            self.newest = None


def _warn_if_unreadable(path: Path) -> None:
    """Reads a checkpoint without tensor values, to report early what would make a resume fail."""
    try:
        read_in_thread(path, f"checkpoint {path}")
    except ValueError as error:
        log.warning(
            "no run can be resumed from this checkpoint: %s. Callbacks and modules may save only tensors, numbers, "
            "text, and lists and dictionaries of these (in state_dict, on_save_checkpoint and hyperparameters)",
            error,
        )


def check_checkpoint(path: str | Path, is_of_policy: bool = True) -> None:
    """Checks that a checkpoint exists, is undamaged, and would not execute code when loaded.

    URLs such as `s3://` are not checked.

    Args:
        path: of a file, or of a folder of shards.
        is_of_policy: whether it must have been saved by a `PolicyModule`.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        ValueError: it is damaged, no checkpoint, or contains code.
    """
    if "://" in str(path):
        return
    where = f"ckpt_path={str(path)!r}"
    if not Path(path).exists() and Path(path).parent.is_dir():
        remove_stale_parts(Path(path).parent)  # renames a complete checkpoint after a crash before the renaming
    if not Path(path).exists():
        raise FileNotFoundError(f"{where}: there is no such checkpoint")
    check = check_folder if Path(path).is_dir() else check_file
    check(Path(path), where, is_of_policy)


def check_is_one_file(path: str | Path) -> None:
    """Checks that a checkpoint is one file, not a folder of shards.

    Raises:
        ValueError: it is a folder; names the command that consolidates it.
    """
    if Path(path).is_dir():
        raise ValueError(
            f"ckpt_path={str(path)!r} is a folder of shards, which only the strategy that wrote it can load; "
            f"`python -m lightning.pytorch.utilities.consolidate_checkpoint {path}` converts it to {path}.consolidated"
        )


def check_same_model(saved: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """Checks that saved weights belong to this model, before anything is changed.

    Raises:
        ValueError: names or shapes differ.
    """
    for name in [*own, *saved]:
        here = tuple(own[name].shape) if name in own else None
        there = tuple(saved[name].shape) if name in saved else None
        if here != there:
            raise ValueError(
                f"the checkpoint belongs to another model: {name} has the shape {there} in the checkpoint and {here} "
                "in model.model (None means that there is no such weight). Use the model.model and model.lora of the "
                "run that saved the checkpoint"
            )


# -- Checkpoints written in the background: training pauses only while the weights are copied -------------------------


STATES = "optimizer_states"


class BackgroundCheckpointIO(AtomicCheckpointIO):
    """Atomic checkpoints, written by a thread from a copy in CPU memory while training continues.

    Optimizer states, two thirds of a checkpoint with AdamW, change only in optimizer steps: the thread copies them, and
    the next step of any optimizer waits for the copy. Everything else is copied before `save_checkpoint` returns.

    One copy exists at a time: a save during another one waits for it, and so does loading. Files change in the order of
    the calls, so an older checkpoint is removed only after its successor was written; a kill at any moment leaves a
    loadable one. An error of the thread is raised by the next call, at the latest at the end of the run.

    The copy takes as much memory as the checkpoint (12 bytes per parameter with float32 weights and AdamW).
    `AtomicCheckpointIO` as a plugin of the Trainer takes no copy, but training waits.
    """

    def __init__(self) -> None:
        super().__init__()
        self._thread: OrderedTasks | None = None
        self._pending: list[Future[None]] = []  # tasks of the thread, in order
        self._copying: Future[None] | None = None
        self._step_hook: RemovableHandle | None = None  # on all optimizers, while their states are copied
        self._waiting_for_link: set[str] = set()  # checkpoints to remove once no link points to them

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Copies everything but optimizer states, and returns; Lightning writes checkpoints at URLs."""
        self.wait()  # a second copy at the same time would double the memory
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        known: dict[Any, Tensor] = {}
        staged = staged_copies(_tensors(checkpoint))
        states = {name: value for name, value in checkpoint.items() if name == STATES}
        copied = _copy_all({name: value for name, value in checkpoint.items() if name != STATES}, known, staged)
        before = [(tensor, tensor._version) for tensor in _tensors(states)]
        copying = self._copying = self._submit(
            lambda: copied.update(_copy_unchanged(states, known, before, staged=staged))
        )
        # the trainer's thread waits here for the copy, because the step would change what the thread reads
        self._step_hook = register_optimizer_step_pre_hook(lambda *_: self._finish_copying())

        def write() -> None:
            self.last_is_missing = True
            copying.result()  # done already, as one thread runs the tasks in order: raises its error
            super(BackgroundCheckpointIO, self).save_checkpoint(copied, path, storage_options)

        self._submit(write)

    def remove_checkpoint(self, path: Any) -> None:
        """Removes a checkpoint after all earlier calls, the target of a link once the link has moved."""
        self._submit(lambda: self._remove(str(path)))

    def link_checkpoint(self, target: str, link: str) -> None:
        """Makes `link` a symbolic link to the checkpoint `target`, atomically, after all earlier calls."""
        self._submit(lambda: self._link(absolute(target), absolute(link)))

    def after_saving(self, task: Callable[[], None]) -> None:
        """Calls `task` in the thread after all earlier calls."""
        self._submit(task)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        self.wait()
        return super().load_checkpoint(path, map_location, weights_only)

    def wait(self) -> None:
        """Waits until everything is written, without a time limit.

        Raises:
            OSError: a checkpoint could not be written; other errors of the thread are raised unchanged, too.
        """
        self._finish_copying()
        pending = self._pending
        self._pending = []
        for one in pending:
            one.result()

    def settle(self) -> None:
        """Waits like `wait`, but leaves errors to it."""
        futures.wait(self._pending)

    def _finish_copying(self) -> None:
        """Waits until the optimizer states are copied; nothing is queued before them."""
        copying = self._copying
        self._copying = None
        if self._step_hook is not None:
            self._step_hook.remove()
            self._step_hook = None
        if copying is not None:
            copying.result()

    def teardown(self) -> None:
        """Ends the thread once all is written; Lightning calls it when a run ends, also by an error."""
        thread = self._thread
        self._thread = None
        if thread is not None:
            thread.shutdown(wait=True)
        self.wait()

    def _submit(self, task: Callable[[], None]) -> Future[None]:
        for one in [one for one in self._pending if one.done()]:
            self._pending.remove(one)
            one.result()
        if self._thread is None:
            self._thread = OrderedTasks(name="checkpoints")
        self._pending.append(self._thread.submit(task))
        return self._pending[-1]

    def _remove(self, path: str) -> None:
        if _is_linked(absolute(path)):
            self._waiting_for_link.add(path)
        else:
            super().remove_checkpoint(path)

    def _link(self, target: Path, link: Path) -> None:
        if not target.exists():  # the disk was full
            return
        if not link.is_symlink() or link.resolve() != target.resolve():
            part = part_name(link)
            part.unlink(missing_ok=True)
            part.symlink_to(os.path.relpath(target, link.parent))
            move_into_place(part, link)
        waiting = self._waiting_for_link
        self._waiting_for_link = set()
        for path in waiting:
            self._remove(path)


def _is_linked(path: Path) -> bool:
    """Whether a symbolic link beside the file points to it."""
    target = path.resolve()
    return path.parent.is_dir() and any(p.is_symlink() and p.resolve() == target for p in path.parent.glob("*.ckpt"))


def _copy_unchanged(
    states: Any, known: dict[Any, Tensor], before: Sequence[tuple[Tensor, int]], staged: StagedCopies | None
) -> Any:
    """Deep copy of optimizer states, checked for changes since the save was requested.

    Args:
        states: optimizer states.
        known: copies of tensors that share memory, see `_copy`.
        before: each tensor, with torch's counter of its in-place changes at the request.
        staged: copies of tensors on a GPU; None if there are none.

    Raises:
        RuntimeError: a tensor was changed meanwhile, outside of an optimizer step.
    """
    copied = _copy_all(states, known, staged)
    if any(tensor._version != version for tensor, version in before):
        raise RuntimeError(
            "the checkpoint was not written, because optimizer states changed outside an optimizer step while "
            "they were being copied. Use trainer.plugins=[AtomicCheckpointIO], which saves the states before training "
            "continues"
        )
    return copied


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


def _copy_all(value: Any, known: dict[Any, Tensor], staged: StagedCopies | None) -> Any:
    """`_copy`, on a stream of its own if tensors are on a GPU, so that training goes on."""
    with contextlib.nullcontext() if staged is None else staged.use():
        return _copy(value, known, staged)


def _copy(value: Any, known: dict[Any, Tensor], staged: StagedCopies | None) -> Any:
    """Deep copy with tensors in CPU memory; tensors that share memory have one copy."""
    if isinstance(value, Tensor):
        place = value.data_ptr(), value.storage_offset(), value.shape, value.stride(), value.dtype, value.device
        if place not in known or value.numel() == 0:
            known[place] = host_copy(value, staged)
        return known[place]
    if isinstance(value, OrderedDict):
        copied: Any = OrderedDict((key, _copy(item, known, staged)) for key, item in value.items())
        vars(copied).update(copy.deepcopy(vars(value)))  # `_metadata` of a state dict: versions of modules
        return copied
    if type(value) is dict:
        return {key: _copy(item, known, staged) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copy(item, known, staged) for item in value)
    return copy.deepcopy(value)
