"""Atomic checkpoint files."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from torch import Tensor

from lit_async_rl.models.sharded_checkpoint import check_folder
from lit_async_rl.utils.digest import DigestWriter, check_file, read_in_thread
from lit_async_rl.utils.files import is_disk_full, replacing
from lit_async_rl.utils.folder_lock import remove_stale_parts

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
