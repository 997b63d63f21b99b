"""How new weights reach vLLM's worker processes: from `(name, tensor)` pairs, one tensor at a time, in three steps.

| step | engine | files (`SharedMemoryTransfer`, `FileTransfer`) | GPU to GPU (`IpcTransfer`, `NcclTransfer`) |
|---|---|---|---|
| `stage` | generates | write safetensors files | keep the stream for `deliver` |
| `deliver` | is paused | tell the workers to read them | send the stream |
| `release` | generates again | delete the files | nothing |

Every rank of a sharded policy must read the stream to its end, so whoever calls `stage` reads what is left of it after
an error.
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
    """What a transfer asks of an engine, or of several as one. Which version the weights are is not said here.

    Attributes:
        num_workers: worker processes that take part (tensor-parallel size, times the number of engines).
    """

    num_workers: int

    @abstractmethod
    def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> None:
        """Calls a method of vLLM's worker, or of our extension of it, in every worker; returns when all have done it.

        Raises:
            RuntimeError: a worker raised.
        """


class WeightTransfer(ABC):
    """One way to move weights; see the table above."""

    @abstractmethod
    def engine_arguments(self) -> dict[str, Any]:
        """Fields of vLLM's `AsyncEngineArgs` that this way needs (a server's flags, with dashes)."""

    def environment(self) -> dict[str, str]:
        """Environment variables that the engine's processes need."""
        return {}

    @abstractmethod
    def stage(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Takes the weights; the engine may still generate."""

    @abstractmethod
    def deliver(self, control: EngineControl) -> None:
        """Makes the engine load what was staged; it must be paused. An error leaves its model half loaded."""

    @abstractmethod
    def release(self) -> None:
        """Forgets what was staged."""

    def close(self) -> None:
        """Frees everything. Safe to call twice."""
        self.release()


class FileTransfer(WeightTransfer):
    """Safetensors files in a folder that trainer and workers both see; may be delivered any number of times.

    Args:
        folder: made if it is missing; each update has a subfolder of its own, deleted after use, or after `kill -9` by
            the next run that uses the folder. None is the system's temporary folder. For engines on other machines, a
            path on a shared file system.
        shard_gb: a file holds at most this much (or one tensor), which is also what is held in memory.
        dtype: floating-point weights travel in this dtype, such as bfloat16 for an engine that computes in it; None
            leaves them as they are.

    Raises:
        ValueError: `shard_gb` is not positive, or `dtype` is no torch dtype.
    """

    def __init__(self, folder: str | None = None, shard_gb: float = 1.0, dtype: str | None = None) -> None:
        check_range("transfer", "positive", shard_gb=shard_gb)
        self.folder, self.shard_gb, self.dtype = folder, shard_gb, as_dtype(dtype)
        self._folders = WeightFolders(folder)
        self._staged: Path | None = None

    @property
    def staged(self) -> str:
        """Folder with the newest weights."""
        if self._staged is None:
            raise SetupError("weights are applied before they were staged")
        return str(self._staged)

    def engine_arguments(self) -> dict[str, Any]:
        """The workers need our extension."""
        return {"worker_extension_cls": EXTENSION}

    def stage(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replaces what was staged before.

        Raises:
            OSError: the files cannot be written.
        """
        self.release()
        self._staged = self._folders.make()
        for number, shard in enumerate(chunks(weights, int(self.shard_gb * 2**30), "cpu", self.dtype)):
            save_file(dict(shard), self._staged / f"{number:05}.safetensors")

    def deliver(self, control: EngineControl) -> None:
        """Each worker reads the files."""
        control.collective_rpc("load_policy_weights", {"folder": self.staged})

    def release(self) -> None:
        """Deletes the files."""
        if self._staged is not None:
            shutil.rmtree(self._staged, ignore_errors=True)
            self._staged = None

    def close(self) -> None:
        """Deletes the files, and the lock that says that they are in use."""
        super().close()
        self._folders.close()


class SharedMemoryTransfer(FileTransfer):
    """Files in memory (`/dev/shm`): trainer and engine on one machine, CPU or GPU. Needs room for one set of weights.

    Args:
        shard_gb: as in `FileTransfer`.
        dtype: as in `FileTransfer`.
    """

    def __init__(self, shard_gb: float = 1.0, dtype: str | None = None) -> None:
        super().__init__(folder="/dev/shm", shard_gb=shard_gb, dtype=dtype)


def as_dtype(name: str | None) -> torch.dtype | None:
    """The torch dtype of that name.

    Raises:
        ValueError: there is none.
    """
    dtype = None if name is None else getattr(torch, name, None)
    if name is not None and not isinstance(dtype, torch.dtype):
        raise ValueError(f"transfer.dtype must be the name of a torch dtype such as bfloat16, got {name!r}")
    return dtype


def chunks(
    weights: Iterable[tuple[str, Tensor]], max_bytes: int, device: str, dtype: torch.dtype | None
) -> Iterator[list[tuple[str, Tensor]]]:
    """Consecutive tensors of together at most `max_bytes`, or a single larger one.

    Each is copied, because a gathered shard lives only until the next is asked for: to `device` and, if it is floating
    point, to `dtype`.
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
