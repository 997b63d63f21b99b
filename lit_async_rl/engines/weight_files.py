"""Weights on their way to another process: read in chunks, written to a folder of safetensors files and read there."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import shutil
import tempfile
import threading
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

# -- Temporary folders of weights, and removal of those left behind by killed runs ------------------------------------
# A run holds the lock of its folders (`flock`, released by the kernel when the process ends). A lock that can be
# acquired therefore belongs to a dead run, on whatever machine or in whatever container it ran.


PREFIX = "lit_async_rl_weights_"
SHARED_MEMORY = "/dev/shm"
log = logging.getLogger(__name__)


def folder_with_room(num_bytes: int, copies: int = 1) -> str:
    """Parent of the folders of weights for processes on this machine: shared memory if `copies` of `num_bytes` fit.

    Otherwise the system's temporary folder, with a warning if there is shared memory.
    """
    folder = tempfile.gettempdir()
    if not Path(SHARED_MEMORY).is_dir():
        return folder
    free = shutil.disk_usage(SHARED_MEMORY).free
    if free >= copies * num_bytes:
        return SHARED_MEMORY
    log.warning(
        "%s has %.2f GiB free, but one copy of the weights takes %.2f GiB, so weights are passed through files in %s, "
        "which is slower. In a container, set --shm-size=%dg (docker run) or mount an emptyDir with medium: Memory "
        "(Kubernetes)",
        *(SHARED_MEMORY, free / 2**30, num_bytes / 2**30, folder, math.ceil(2 * num_bytes / 2**30)),
    )
    return folder


class WeightFolders:
    """Creates the folders of one transfer, one per update.

    Args:
        parent: created if missing; None is the system's temporary folder.
    """

    def __init__(self, parent: str | None) -> None:
        self.parent = parent
        self._lock: FileLock | None = None
        self._is_changing = threading.Lock()  # several threads may close an engine at once
        self._name = ""
        self._numbers = itertools.count()

    def __reduce__(self) -> tuple[type[WeightFolders], tuple[str | None]]:
        """A copy in another process makes its own folders."""
        return WeightFolders, (self.parent,)

    def make(self) -> Path:
        """Creates a folder; the first call removes those of dead runs."""
        parent = Path(tempfile.gettempdir() if self.parent is None else self.parent)
        with self._is_changing:
            if self._lock is None:
                parent.mkdir(parents=True, exist_ok=True)
                delete_abandoned(parent)
                self._name = PREFIX + uuid.uuid4().hex[:12]
                self._lock = FileLock(_lock_of(parent, self._name), thread_local=False)
                self._lock.acquire(timeout=0)
            folder = parent / f"{self._name}_{next(self._numbers)}"
        folder.mkdir()
        folder.chmod(0o755)
        return folder

    def close(self) -> None:
        """Removes remaining folders and releases the lock. Safe to call twice, and from two threads at once."""
        with self._is_changing:
            if self._lock is not None:
                lock_file = Path(self._lock.lock_file)
                for folder in lock_file.parent.glob(f"{self._name}_*"):
                    shutil.rmtree(folder, ignore_errors=True)
                lock_file.unlink(missing_ok=True)  # before others can take it
                self._lock.release()
                self._lock = None


def _lock_of(parent: Path, name: str) -> Path:
    return parent / f".{name}.lock"


def delete_abandoned(parent: Path) -> list[Path]:
    """Removes and returns the folders of dead runs. Without file locking nothing is removed."""
    deleted = []
    for path in sorted(parent.glob(f".{PREFIX}*.lock")):
        lock = FileLock(path, thread_local=False)
        # a live run has it; another user's; gone meanwhile
        with contextlib.suppress(Timeout, OSError), lock.acquire(timeout=0):
            for folder in parent.glob(f"{path.name.removeprefix('.').removesuffix('.lock')}_*"):
                shutil.rmtree(folder, ignore_errors=True)
                deleted.append(folder)
            path.unlink(missing_ok=True)
    if deleted:
        log.warning("the weights of killed runs were deleted: %s", ", ".join(map(str, deleted)))
    return deleted


def chunks(
    weights: Iterable[tuple[str, Tensor]], max_bytes: int, device: str, dtype: torch.dtype | None
) -> Iterator[list[tuple[str, Tensor]]]:
    """Consecutive tensors of at most `max_bytes` in all, or a single larger one.

    Each is copied, because a gathered shard is valid only until the next one is requested: to `device` and, if it is
    floating point, to `dtype`.
    """
    chunk: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in weights:
        if chunk and size + tensor.nbytes > max_bytes:
            yield chunk
            chunk = []
            size = 0
        kept = dtype if tensor.is_floating_point() else None
        chunk.append((name, tensor.detach().to(device, kept, copy=True).contiguous()))
        size += tensor.nbytes
    if chunk:
        yield chunk


def write_folder(
    folder: Path, shards: Iterable[Iterable[tuple[str, Tensor]]], metadata: Mapping[str, str] | None = None
) -> int:
    """Writes a file for each shard, or without shards one with the metadata, if given; returns their bytes.

    Raises:
        OSError: a file cannot be written.
    """
    num_bytes = number = 0
    for shard in shards:
        num_bytes += _write(folder, number, dict(shard), metadata=metadata)
        number += 1
    if not number and metadata is not None:  # nothing has changed, which is to be said, too
        num_bytes = _write(folder, 0, {}, metadata=metadata)
    return num_bytes


def _write(folder: Path, number: int, tensors: dict[str, Tensor], metadata: Mapping[str, str] | None) -> int:
    file = folder / f"{number:05}.safetensors"
    save_file(tensors, file, None if metadata is None else dict(metadata))
    return file.stat().st_size


def read_folder(folder: str) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of all safetensors files of a folder; reads data only, no code.

    Raises:
        PermissionError: the folder was not created by a trainer, or holds links or devices.
        FileNotFoundError: it holds no safetensors files.
    """
    if not Path(folder).name.startswith(PREFIX) or Path(folder).is_symlink():
        raise PermissionError(f"{folder!r} was not created by a trainer: its name must begin with {PREFIX}")
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder!r} holds no *.safetensors files: can this machine see the trainer's folder?")
    for file in files:
        if file.is_symlink() or not file.is_file():
            raise PermissionError(f"{str(file)!r} is a link or a device, not a file that a trainer wrote")
        with safe_open(file, framework="pt") as tensors:
            for name in sorted(tensors.keys()):  # an index comes before its values
                yield name, tensors.get_tensor(name)


def read_metadata(folder: str) -> dict[str, str]:
    """Metadata of the first file; empty if there is none. Whether the files may be read is up to `read_folder`."""
    file = next(iter(sorted(Path(folder).glob("*.safetensors"))), None)
    if file is None or file.is_symlink() or not file.is_file() or not Path(folder).name.startswith(PREFIX):
        return {}
    with safe_open(file, framework="pt") as tensors:
        return tensors.metadata() or {}
