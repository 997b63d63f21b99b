"""Atomic checkpoint files."""

from __future__ import annotations

import copy
import logging
import os
import shutil
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from lit_async_rl.models.sharded_checkpoint import check_folder
from lit_async_rl.utils.files import (
    DigestWriter,
    check_file,
    is_disk_full,
    part_name,
    read_in_thread,
    remove_stale_parts,
    replacing,
)
from lit_async_rl.utils.huge_pages import host_copy

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Written:
    """A checkpoint's file, and the optimizer steps before it."""

    path: Path
    step: int


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes checkpoints atomically: a crash while saving leaves the previous file intact.

    (Lightning's own moves the file from the system's temporary folder, which copies it between file systems.)

    When the disk is full training continues: a warning names the missing checkpoint. After any failure no checkpoint is
    removed until one is written again. If the last one of a run is missing, the run ends with `LastCheckpointError`.

    Attributes:
        replaces_files: a new checkpoint of the same name is another file, so that a hard link keeps the old one.
        unwritten: the last checkpoint, if a full disk did not take it; None otherwise.
        newest: the newest checkpoint that was written and not removed since; None before.
    """

    replaces_files = True

    def __init__(self) -> None:
        self.unwritten: Written | None = None
        self.newest: Written | None = None
        self._has_failed = False  # the last checkpoint is missing, whatever the reason
        self._is_read_again = False

    @property
    def disk_is_full(self) -> bool:
        """Whether the last checkpoint was not written for that reason."""
        return self.unwritten is not None

    @property
    def last_is_missing(self) -> bool:
        """Whether the last checkpoint was not written, whatever the reason."""
        return self._has_failed

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Writes a checkpoint; URLs such as `s3://` are left to Lightning."""
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(path)
        written = Written(path=target, step=int(checkpoint.get("global_step", 0)))
        self._has_failed = True
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            remove_stale_parts(target.parent)
            with replacing(target) as file:
                writer = DigestWriter(file)
                torch.save(checkpoint, cast("BinaryIO", writer))  # it writes, and nothing else
                writer.finish_archive()
        except (OSError, RuntimeError) as error:  # torch's writer turns one into the other
            if not is_disk_full(error):
                raise
            self.unwritten = written
            log.warning("checkpoint %s was not written: the disk is full. Older ones stay", target)
            return
        self.unwritten = None
        self.newest = written
        self._has_failed = False
        if not self._is_read_again:
            self._is_read_again = True
            _warn_if_refused(target)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Loads a checkpoint after verifying its digest; never executes code, whatever `weights_only` is."""
        check_checkpoint(path)
        check_is_one_file(path)
        return super().load_checkpoint(path, map_location or (lambda storage, _: storage), weights_only=True)

    def remove_checkpoint(self, path: Any) -> None:
        """Removes a checkpoint, unless its successor could not be written."""
        if self._has_failed:
            return
        super().remove_checkpoint(path)
        if self.newest is not None and self.newest.path == Path(path):
            self.newest = None


def _warn_if_refused(path: Path) -> None:
    """Reads a checkpoint without its tensors' values: what would refuse a resume is said while the run goes on."""
    try:
        read_in_thread(path, f"checkpoint {path}")
    except ValueError as error:
        log.warning(
            "%s. No run can be resumed from it. What a callback or module saves (state_dict, on_save_checkpoint, "
            "hyperparameters) must be tensors, numbers, text, and lists and dictionaries of these",
            error,
        )


def check_checkpoint(path: str | Path) -> None:
    """Refuses a checkpoint that is missing, damaged, not a checkpoint, or would execute code when loaded.

    URLs such as `s3://` are not checked.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        ValueError: the file is refused; says why.
    """
    if "://" in str(path):
        return
    where = f"ckpt_path={str(path)!r}"
    if not Path(path).exists() and Path(path).parent.is_dir():
        remove_stale_parts(Path(path).parent)  # it may have been written, and not renamed
    if not Path(path).exists():
        raise FileNotFoundError(f"{where}: there is no such checkpoint")
    check = check_folder if Path(path).is_dir() else check_file
    check(Path(path), where)


def check_is_one_file(path: str | Path) -> None:
    """Refuses a folder of shards where one device is to load it.

    Raises:
        ValueError: it is a folder; says how to make a file of it.
    """
    if Path(path).is_dir():
        raise ValueError(
            f"ckpt_path={str(path)!r} is a folder of shards, which only the strategy that wrote it can load; "
            f"`python -m lightning.pytorch.utilities.consolidate_checkpoint {path}` makes {path}.consolidated of it"
        )


def check_same_model(saved: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """Refuses weights of another model before anything is changed.

    Raises:
        ValueError: names or shapes differ.
    """
    for name in [*own, *saved]:
        here, there = (tuple(tensors[name].shape) if name in tensors else None for tensors in (own, saved))
        if here != there:
            raise ValueError(
                f"the checkpoint is of another model: {name} has the shape {there} there and {here} in model.model "
                "(None: there is no such weight); model.model and model.lora must be those of the checkpoint"
            )


# -- Checkpoints written in the background: training pauses only while the weights are copied -------------------------


STATES = "optimizer_states"


class BackgroundCheckpointIO(AtomicCheckpointIO):
    """Atomic checkpoints, written by a thread from a copy in CPU memory while training goes on.

    Optimizer states, two thirds of a checkpoint with AdamW, change in an optimizer's step only: the thread copies them,
    and the next step of any optimizer waits for that. All else is copied before `save_checkpoint` returns.

    One copy exists at a time: a save that comes while another is being written waits for it. Files change in the order
    of the calls, so an older checkpoint is removed only after its successor was written; a kill at any moment leaves
    one that can be loaded. Loading waits for what is being written. An error of the thread is raised by the next call,
    at the latest when the run ends.

    The copy takes as much memory as the checkpoint (12 bytes per parameter with float32 weights and AdamW);
    `AtomicCheckpointIO` as a plugin of the Trainer writes without one, and training waits.
    """

    def __init__(self) -> None:
        super().__init__()
        self._thread: ThreadPoolExecutor | None = None
        self._pending: list[Future[None]] = []
        self._copying: Future[None] | None = None
        self._step_hook: RemovableHandle | None = None  # of all optimizers, while their states are copied
        self._kept: set[str] = set()  # to be removed when the link to it has moved

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Copies all but optimizer states, and returns; URLs are left to Lightning."""
        self.wait()
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        known: dict[Any, Tensor] = {}
        states = {name: value for name, value in checkpoint.items() if name == STATES}
        copied = _copy({name: value for name, value in checkpoint.items() if name != STATES}, known)
        before = [(tensor, tensor._version) for tensor in _tensors(states)]
        copying = self._copying = self._submit(lambda: copied.update(_copied_at_rest(states, known, before)))
        self._step_hook = register_optimizer_step_pre_hook(lambda *_: self._finish_copying())

        def write() -> None:
            self._has_failed = True
            copying.result()
            super(BackgroundCheckpointIO, self).save_checkpoint(copied, path, storage_options)

        self._submit(write)

    def remove_checkpoint(self, path: Any) -> None:
        """Removes a checkpoint after all earlier calls; one that a link names stays until the link has moved."""
        self._submit(lambda: self._remove(str(path)))

    def link_checkpoint(self, target: str, link: str) -> None:
        """Makes `link` a symbolic link to the checkpoint `target`, atomically, after all earlier calls."""
        self._submit(lambda: self._link(Path(target), Path(link)))

    def after_saving(self, task: Callable[[], None]) -> None:
        """Calls `task` in the thread, after all earlier calls: it finds the files as they are to be now."""
        self._submit(task)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        self.wait()
        return super().load_checkpoint(path, map_location, weights_only)

    def wait(self) -> None:
        """Returns when all is written.

        Raises:
            OSError: a checkpoint could not be written (any error of the thread is raised as it was).
        """
        self._finish_copying()
        pending = self._pending
        self._pending = []
        for one in pending:
            one.result()

    def settle(self) -> None:
        """Returns when nothing is being written any more; an error is left to `wait`."""
        futures.wait(self._pending)

    def _finish_copying(self) -> None:
        """Returns when the optimizer states are copied; nothing else is queued before them."""
        copying = self._copying
        self._copying = None
        if self._step_hook is not None:
            self._step_hook.remove()
            self._step_hook = None
        if copying is not None:
            copying.result()

    def teardown(self) -> None:
        """Ends the thread when all is written; Lightning calls it at the end of a run, whatever ended it."""
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
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoints")
        self._pending.append(self._thread.submit(task))
        return self._pending[-1]

    def _remove(self, path: str) -> None:
        if _is_linked(Path(path)):
            self._kept.add(path)
        else:
            super().remove_checkpoint(path)

    def _link(self, target: Path, link: Path) -> None:
        if not target.exists():  # the disk was full
            return
        if not link.is_symlink() or link.resolve() != target.resolve():
            part = part_name(link)
            part.unlink(missing_ok=True)
            part.symlink_to(os.path.relpath(target, link.parent))
            if link.is_dir() and not link.is_symlink():  # shards that `SaveOnSigterm` wrote: no link takes their place
                shutil.rmtree(link)
            part.replace(link)
        kept = self._kept
        self._kept = set()
        for path in kept:
            self._remove(path)


def _is_linked(path: Path) -> bool:
    """Whether a symbolic link beside the file leads to it."""
    target = path.resolve()
    return path.parent.is_dir() and any(p.is_symlink() and p.resolve() == target for p in path.parent.glob("*.ckpt"))


def _copied_at_rest(states: Any, known: dict[Any, Tensor], before: Sequence[tuple[Tensor, int]]) -> Any:
    """Deep copy of optimizer states; `before` has torch's counts of the changes of each tensor when it was to be taken.

    Raises:
        RuntimeError: one was changed meanwhile, by something that is no optimizer's step.
    """
    copied = _copy(states, known)
    if any(tensor._version != version for tensor, version in before):
        raise RuntimeError(
            "optimizer states changed outside of an optimizer's step while a checkpoint was taken of them, which was "
            "not written; trainer.plugins=[AtomicCheckpointIO] takes them before training goes on"
        )
    return copied


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


def _copy(value: Any, known: dict[Any, Tensor]) -> Any:
    """Deep copy with tensors in CPU memory; tensors that share memory in full still do."""
    if isinstance(value, Tensor):
        place = value.data_ptr(), value.storage_offset(), value.shape, value.stride(), value.dtype, value.device
        if place not in known or value.numel() == 0:
            known[place] = host_copy(value)
        return known[place]
    if isinstance(value, OrderedDict):
        made: Any = OrderedDict((key, _copy(item, known)) for key, item in value.items())
        vars(made).update(copy.deepcopy(vars(value)))  # the versions of modules, in a state dict
        return made
    if type(value) is dict:
        return {key: _copy(item, known) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copy(item, known) for item in value)
    return copy.deepcopy(value)
