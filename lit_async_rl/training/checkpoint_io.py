"""Checkpoint files that are whole or not there at all."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from torch import Tensor

log = logging.getLogger(__name__)
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the file and renames when all is on the disk, so that a crash while saving leaves the old one.

    (Lightning's own moves the file from the system's temporary folder, which copies it between file systems.)

    When the disk is full training goes on: one line says that the checkpoint is missing, and until one is written again
    none is removed.
    """

    def __init__(self) -> None:
        self._disk_is_full = False

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Writes a checkpoint; addresses such as `s3://` are left to Lightning."""
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(path)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with replacing(target) as file:
                torch.save(checkpoint, file)
        except (OSError, RuntimeError) as error:  # torch's writer turns one into the other
            if not is_disk_full(error):
                raise
            self._disk_is_full = True
            log.warning("checkpoint %s was not written: the disk is full. Older ones stay; training goes on", target)
            return
        self._disk_is_full = False

    def remove_checkpoint(self, path: Any) -> None:
        """Removes a checkpoint, unless the one that takes its place could not be written."""
        if not self._disk_is_full:
            super().remove_checkpoint(path)


def is_disk_full(error: BaseException) -> bool:
    """Whether a full disk, or a quota, is behind an error."""
    behind: BaseException | None = error
    while behind is not None:
        if isinstance(behind, OSError) and behind.errno in FULL:
            return True
        behind = behind.__context__
    return False


@contextmanager
def replacing(target: Path) -> Iterator[BinaryIO]:
    """A file beside `target` that takes its place when all is on the disk; after an error nothing is left of it."""
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(target)
        sync_folder(target.parent)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


@contextmanager
def tolerate_full_disk(what: str) -> Iterator[None]:
    """Goes on without what could not be written, and says so in one line, if a full disk is the reason."""
    try:
        yield
    except OSError as error:
        if not is_disk_full(error):
            raise
        log.warning("%s was not written: the disk is full", what)


def append(path: Path, text: str) -> None:
    """Adds text to the end of a file: all of it, or nothing.

    Raises:
        OSError: it cannot be written.
    """
    data = text.encode()
    with path.open("ab", buffering=0) as file:
        size = file.tell()
        try:
            if file.write(data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        except OSError:
            file.truncate(size)
            raise


def check_writable(folder: Path, what: str) -> None:
    """Makes a folder, if need be, and a file in it: an unwritable one is noticed at the start, not at the first save.

    Raises:
        OSError: nothing can be written there; says to which setting's folder.
    """
    probe = folder / f".{os.getpid()}.probe"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise type(error)(error.errno, f"{what} cannot be written to: {error.strerror}", str(folder)) from None


def check_same_model(saved: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """Refuses the weights of another model before anything is changed.

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


def sync_folder(folder: Path) -> None:
    """Makes renamed files in a folder last through a loss of power."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
