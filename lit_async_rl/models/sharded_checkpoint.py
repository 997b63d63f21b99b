"""Atomic sharded checkpoints with a manifest of digests that is verified before loading.

torch writes each rank's shards into a folder, without digests and not crash-safe. Here the folder is written under a
temporary name, gets a manifest (size and XXH3 digest of each file), and replaces the old one by renaming.
"""

from __future__ import annotations

import inspect
import io
import json
import logging
import os
import pickle
import shutil
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import xxhash
from torch.distributed import all_gather_object, get_rank, get_world_size
from torch.distributed.checkpoint import CheckpointException, filesystem, metadata

from lit_async_rl.runtime.checkpoint_files import CHUNK_BYTES, OF_POLICY, check_content, read_safely
from lit_async_rl.runtime.files import absolute, move_into_place, part_name, remove_stale_parts

MANIFEST = "manifest.json"
log = logging.getLogger(__name__)


class WholeFolders:
    """Mixin for Lightning's FSDP strategies: atomic, verified sharded checkpoints, loaded without unpickling code."""

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Writes a temporary folder and renames it; unsharded checkpoints are written by the `CheckpointIO`."""
        strategy: Any = self
        if not strategy.writes_folders or "://" in str(filepath):
            super().save_checkpoint(checkpoint, filepath, storage_options)  # type: ignore[misc]
            return
        path = absolute(strategy.broadcast(filepath))
        part = Path(strategy.broadcast(str(part_name(path))))  # contains the process id of the leading rank
        if strategy.is_global_zero:
            shutil.rmtree(part, ignore_errors=True)
        strategy.barrier("sharded checkpoint: begin")  # no rank may write before the old files are gone
        super().save_checkpoint(checkpoint, part, storage_options)  # type: ignore[misc]
        write_manifest(part)  # a collective: after it all files are there
        if strategy.is_global_zero:
            move_into_place(part, path)
        strategy.barrier("sharded checkpoint: renamed")  # no rank may go on, and report a checkpoint that is not there

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Verifies a folder on rank 0, and loads it without executing code.

        Raises:
            ValueError: the checkpoint is damaged, or belongs to another model or strategy; raised on all ranks.
        """
        strategy: Any = self
        path = Path(strategy.broadcast(checkpoint_path))
        problem = None
        if strategy.is_global_zero and not path.exists() and path.parent.is_dir():
            remove_stale_parts(path.parent)
        if strategy.is_global_zero and path.is_dir():
            try:
                check_folder(path, f"ckpt_path={str(path)!r}", is_of_policy=False)
            except ValueError as error:
                problem = str(error)
        # all ranks must raise together: those that went on would wait for rank 0 in the collectives of the load
        if (problem := strategy.broadcast(problem)) is not None:
            raise ValueError(problem)
        with nothing_executed():
            if path.is_file() and (saved := getattr(module := strategy.lightning_module, "saved_weights", None)):
                saved.check(torch.load(path, mmap=True, map_location="cpu", weights_only=True), module.policy)
            try:
                return super().load_checkpoint(path, weights_only=True)  # type: ignore[misc]
            except CheckpointException as error:  # a `BaseException` with the failures of all ranks
                reason = next((str(one) for one, _ in error.failures.values()), str(error))
                raise ValueError(
                    f"ckpt_path={str(path)!r} cannot be loaded: {reason} Shards can be loaded only with the same "
                    "model.model, model.lora and kind of trainer.strategy with which they were saved"
                ) from None


@contextmanager
def nothing_executed() -> Iterator[None]:
    """Context in which `torch.load` refuses pickled code, which loaders of distributed checkpoints allow."""
    name = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def write_manifest(folder: Path) -> None:
    """Writes the manifest of a complete folder. A collective: each rank digests its own files, in parallel."""
    rank = get_rank()
    ranks = get_world_size()
    own = [file for file in sorted(folder.iterdir()) if _writer(file, ranks) == rank]
    digests: list[Any] = [None] * ranks
    all_gather_object(digests, {file.name: [file.stat().st_size, _digest(file)] for file in own})
    if rank == 0:
        everything = {name: entry for part in digests for name, entry in part.items()}
        with (folder / MANIFEST).open("w") as file:
            json.dump({"format": 1, "files": everything}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())


def _writer(file: Path, ranks: int) -> int:
    """Rank that wrote the file `__<rank>_<number>.distcp`; 0 for other files."""
    number = file.name.split("_")[2] if file.name.startswith("__") else ""
    return int(number) % ranks if number.isdigit() else 0


def check_folder(folder: Path, where: str, is_of_policy: bool = True) -> None:
    """Checks that a sharded checkpoint is undamaged and contains no code; arguments as of `check_file`.

    Raises:
        ValueError: it is damaged or contains code; the message names folder and file.
    """
    if not (folder / "meta.pt").is_file() or not (folder / ".metadata").is_file():
        candidates = (folder / "last.ckpt", folder / "checkpoints" / "last.ckpt")
        inside = next((one for one in candidates if one.exists()), None)
        hint = "" if inside is None else f"; did you mean {inside}?"
        raise ValueError(f"{where} is not a sharded checkpoint (a folder that contains .metadata and meta.pt){hint}")
    if (folder / MANIFEST).is_file():
        _check_manifest(folder, where)
    else:
        log.warning(
            "%s has no %s, so damage to it cannot be detected: another program or an earlier version of lit-async-rl "
            "saved this checkpoint",
            where,
            MANIFEST,
        )
    try:
        _MetadataReader(io.BytesIO((folder / ".metadata").read_bytes())).load()
    except Exception as error:
        raise ValueError(f"{where} is damaged: .metadata cannot be read: {error}") from None
    content = read_safely(folder / "meta.pt", where)
    if is_of_policy:
        check_content(content, where, OF_POLICY)


def _check_manifest(folder: Path, where: str) -> None:
    try:
        files = dict(json.loads((folder / MANIFEST).read_text())["files"])
        expected = {str(name): (int(size), str(digest)) for name, (size, digest) in files.items()}
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError(f"{where} is damaged: {MANIFEST} cannot be read") from None
    for name, (size, digest) in expected.items():
        file = folder / name
        if Path(name).name != name or not file.is_file():
            raise ValueError(f"{where} is damaged: its file {name} is missing")
        if file.stat().st_size != size or _digest(file) != digest:
            raise ValueError(f"{where} is damaged: its file {name} does not match the digest in {MANIFEST}")
    if more := {file.name for file in folder.iterdir()} - expected.keys() - {MANIFEST}:
        raise ValueError(f"{where} is damaged: it contains {min(more)}, which {MANIFEST} does not list")


def _digest(file: Path) -> str:
    digest = xxhash.xxh3_128()
    with file.open("rb") as opened:
        while chunk := opened.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


class _MetadataReader(pickle.Unpickler):
    """Unpickler of torch's `.metadata` that admits only the expected classes, by their exact names."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if module == "torch.distributed.checkpoint.metadata" and inspect.isclass(found := vars(metadata).get(name)):
            return found
        others = {
            ("torch", "Size"): torch.Size,
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): filesystem._StorageInfo,
            ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
            ("collections", "OrderedDict"): OrderedDict,
            ("pathlib", "PosixPath"): PurePosixPath,  # the path at which the folder was written
            ("pathlib._local", "PosixPath"): PurePosixPath,  # the same class in Python 3.13
        }
        if (module, name) not in others:
            raise pickle.UnpicklingError(
                f"the file is not loaded, because it contains code (which was not executed): {module}.{name}"
            )
        return others[module, name]
