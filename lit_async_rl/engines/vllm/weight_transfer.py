"""How new weights reach vLLM's worker processes: from `(name, tensor)` pairs, one tensor at a time, in three steps.

| step | engine | files (`SharedMemoryTransfer`, `FileTransfer`) | GPU to GPU (`IpcTransfer`, `NcclTransfer`) |
|---|---|---|---|
| `stage` | generates | write safetensors files | keep the stream for `deliver` |
| `deliver` | is paused | tell the workers to read them | send the stream |
| `release` | generates again | delete the files | nothing |

Every rank of a sharded policy must read the stream to its end, so the caller of `stage` reads the rest of it after an
error.
"""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from lit_async_rl.engines.vllm.weight_folders import WeightFolders
from lit_async_rl.errors import SetupError
from lit_async_rl.utils.checks import check_range

EXTENSION = "lit_async_rl.engines.vllm.worker.WorkerExtension"


class EngineControl(ABC):
    """Interface of an engine, or of several as one, for weight transfers.

    Attributes:
        num_workers: participating worker processes (tensor-parallel size times number of engines).
    """

    num_workers: int

    @abstractmethod
    def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> None:
        """Calls a method of vLLM's worker, or of our extension, on all workers; returns when all are done.

        Raises:
            RuntimeError: a worker raised.
        """


class WeightTransfer(ABC):
    """Base class of transfers; see the table of this module."""

    @abstractmethod
    def engine_arguments(self) -> dict[str, Any]:
        """Fields of vLLM's `AsyncEngineArgs` that this transfer needs (with dashes: flags of a server)."""

    def environment(self) -> dict[str, str]:
        """Environment variables that the engine's processes need."""
        return {}

    @abstractmethod
    def stage(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Reads the weights; the engine may still generate."""

    @abstractmethod
    def deliver(self, control: EngineControl) -> None:
        """Loads the staged weights into the paused engine. After an error its weights may be mixed."""

    @abstractmethod
    def release(self) -> None:
        """Releases the staged weights."""

    def close(self) -> None:
        """Releases all resources. Safe to call twice."""
        self.release()


class FileTransfer(WeightTransfer):
    """Safetensors files in a folder visible to trainer and workers; may be delivered several times.

    Args:
        folder: created if missing; each update has a subfolder, removed after use, or after `kill -9` by the next run
            that uses the folder. None is the system's temporary folder. For engines on other machines, a path on a
            shared file system.
        shard_gb: maximum size of a file (at least one tensor), which is also the memory needed.
        dtype: floating-point weights are cast to it, such as bfloat16 for an engine that computes in it; None keeps
            theirs.

    Raises:
        ValueError: `shard_gb` is not positive, or `dtype` is not a torch dtype.
    """

    def __init__(self, folder: str | None = None, shard_gb: float = 1.0, dtype: str | None = None) -> None:
        check_range("transfer", "positive", shard_gb=shard_gb)
        self.folder, self.shard_gb, self.dtype = folder, shard_gb, as_dtype(dtype)
        self._folders = WeightFolders(folder)
        self._staged: Path | None = None

    @property
    def staged(self) -> str:
        """Folder of the newest weights."""
        if self._staged is None:
            raise SetupError("weights are applied before they were staged")
        return str(self._staged)

    def engine_arguments(self) -> dict[str, Any]:
        return {"worker_extension_cls": EXTENSION}

    def stage(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Writes the files, in place of those staged before.

        Raises:
            OSError: the files cannot be written.
        """
        self.release()
        self._staged = self._folders.make()
        for number, shard in enumerate(chunks(weights, int(self.shard_gb * 2**30), "cpu", self.dtype)):
            save_file(dict(shard), self._staged / f"{number:05}.safetensors")

    def deliver(self, control: EngineControl) -> None:
        """Has every worker read the files."""
        control.collective_rpc("load_policy_weights", {"folder": self.staged})

    def release(self) -> None:
        """Removes the files."""
        if self._staged is not None:
            shutil.rmtree(self._staged, ignore_errors=True)
            self._staged = None

    def close(self) -> None:
        """Removes the files and releases their lock."""
        super().close()
        self._folders.close()


class SharedMemoryTransfer(FileTransfer):
    """Files in `/dev/shm`: trainer and engine on one machine, CPU or GPU. Needs room for one copy of the weights.

    Args:
        shard_gb: as in `FileTransfer`.
        dtype: as in `FileTransfer`.
    """

    def __init__(self, shard_gb: float = 1.0, dtype: str | None = None) -> None:
        super().__init__(folder="/dev/shm", shard_gb=shard_gb, dtype=dtype)


def as_dtype(name: str | None) -> torch.dtype | None:
    """The torch dtype of that name.

    Raises:
        ValueError: there is no such dtype.
    """
    dtype = None if name is None else getattr(torch, name, None)
    if name is not None and not isinstance(dtype, torch.dtype):
        raise ValueError(f"transfer.dtype must be the name of a torch dtype such as bfloat16, got {name!r}")
    return dtype


def chunks(
    weights: Iterable[tuple[str, Tensor]], max_bytes: int, device: str, dtype: torch.dtype | None
) -> Iterator[list[tuple[str, Tensor]]]:
    """Consecutive tensors of together at most `max_bytes`, or a single larger one.

    Each is copied, because a gathered shard is valid only until the next one is requested: to `device` and, if it is
    floating point, to `dtype`.
    """
    chunk: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in weights:
        if chunk and size + tensor.nbytes > max_bytes:
            yield chunk
            chunk, size = [], 0
        kept = dtype if tensor.is_floating_point() else None
        chunk.append((name, tensor.detach().to(device, kept, copy=True).contiguous()))
        size += tensor.nbytes
    if chunk:
        yield chunk
