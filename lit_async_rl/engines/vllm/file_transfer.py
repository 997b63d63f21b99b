"""Weight transfer through safetensors files: whole, or what has changed."""

from __future__ import annotations

import logging
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_async_rl.engines.vllm.weight_deltas import ADAPTER, BASE, ID, VALUE, KeptWeights
from lit_async_rl.engines.vllm.weight_transfer import EXTENSION, EngineControl, WeightTransfer, as_dtype
from lit_async_rl.engines.weight_files import SHARED_MEMORY, WeightFolders, chunks, folder_with_room, write_folder
from lit_async_rl.errors import SetupError
from lit_async_rl.models.loading import weight_bytes
from lit_async_rl.utils.checks import check_range
from lit_async_rl.utils.waiting import Wait

log = logging.getLogger(__name__)
POLL_INTERVAL_S = 0.02  # a pause of generation may wait for the workers' loading: not the half second of `Wait`


class FileTransfer(WeightTransfer):
    """Safetensors files in a folder visible to trainer and workers; may be delivered several times.

    With `delta` only what has changed since the last update is written, compared bit by bit in `dtype`; with
    `model.lora` that is the adapters, which each worker merges. Nothing is approximated: the weights that generate
    are those of a whole update. The trainer and each worker keep a copy of the weights in host memory for it.

    Args:
        folder: created if missing; each update has a subfolder, removed after use, or after `kill -9` by the next run
            that uses the folder. None is the system's temporary folder. For engines on other machines, a path on a
            shared file system.
        shard_gb: maximum size of a file (at least one tensor), which is also the memory needed.
        dtype: floating-point weights are cast to it, such as bfloat16 for an engine that computes in it; None keeps
            theirs.
        delta: write only what has changed.
        preload: workers load new weights while they generate, which makes pauses short and takes the memory of a second
            copy meanwhile (on a GPU, host memory).

    Raises:
        ValueError: `shard_gb` is not positive, or `dtype` is not a torch dtype.
    """

    def __init__(
        self,
        folder: str | None = None,
        shard_gb: float = 1.0,
        dtype: str | None = None,
        delta: bool = False,
        preload: bool = True,
    ) -> None:
        check_range("transfer", "positive", shard_gb=shard_gb)
        self.folder = folder
        self.shard_gb = shard_gb
        self.dtype = as_dtype(dtype)
        self.delta = delta
        self.preload = preload
        self.takes_adapters = delta
        self._folders = WeightFolders(folder)
        self._staged: Path | None = None
        self._whole: Path | None = None  # the same weights, not only what has changed
        self._kept = KeptWeights()
        self._name = ""
        self._is_first = True
        self._is_prepared = False
        self._needs_whole = False

    @property
    def staged(self) -> str:
        """Folder of the newest weights, or of what they change in those before."""
        if self._staged is None:
            raise SetupError("weights are applied before they were staged")
        return str(self._staged)

    def whole(self) -> str:
        """Folder of all of the newest weights, for an engine that does not have those before.

        Raises:
            OSError: the files cannot be written.
        """
        if not self._kept.tensors or self._is_first:
            return self.staged
        if self._whole is None:
            self._whole = self._folders.make()
            shards = _shards(self._kept.tensors.items(), self._max_bytes)
            write_folder(self._whole, shards, {BASE: "", ID: self._name})
        return str(self._whole)

    @property
    def _max_bytes(self) -> int:
        return int(self.shard_gb * 2**30)

    def engine_arguments(self) -> dict[str, Any]:
        return {"worker_extension_cls": EXTENSION}

    def stage(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Writes the files, in place of those staged before.

        Raises:
            OSError: the files cannot be written.
        """
        self.release()
        self._staged = self._folders.make()
        self._is_prepared = False
        if not self.delta:
            self.staged_bytes = write_folder(self._staged, chunks(weights, self._max_bytes, "cpu", dtype=self.dtype))
            return
        self._is_first = not self._kept.tensors
        base = self._name
        self._name = uuid.uuid4().hex
        shards = _shards(self._changes(weights), self._max_bytes)
        self.staged_bytes = write_folder(self._staged, shards, {BASE: base, ID: self._name})

    def _changes(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            dtype = self.dtype if tensor.is_floating_point() and not name.endswith(ADAPTER) else None
            yield from self._kept.encode(name, tensor.detach().to("cpu", dtype).contiguous()).items()

    def prepare(self, control: EngineControl) -> None:
        """Has every worker load the files beside the weights with which it generates, and waits for them.

        A worker that cannot still has the weights it had; then `deliver` has all workers load whole ones.

        Raises:
            StalledError: it took too long.
        """
        if not self.preload:
            return
        try:
            control.collective_rpc("begin_policy_weights", {"folder": self.staged})
            limit = f"data.engine.update_timeout_s={control.update_timeout_s:g}"
            wait = Wait(control.update_timeout_s, f"vLLM's workers did not load weights within {limit}")
            while not all(state["loaded"] for state in control.collective_rpc("policy_weights_state", {})):
                wait.raise_if_over()
                time.sleep(POLL_INTERVAL_S)
            self._is_prepared = True
        except RuntimeError as error:
            log.warning("vLLM's workers could not load weights while they generate, and do so in a pause: %s", error)
            self._needs_whole = True

    def deliver(self, control: EngineControl) -> None:
        """Has every worker use the weights that it was prepared with, or read the files."""
        if self._is_prepared:
            control.collective_rpc("swap_policy_weights", {})
            return
        folder = self.whole() if self._needs_whole else self.staged
        control.collective_rpc("load_policy_weights", {"folder": folder})
        self._needs_whole = False

    def release(self) -> None:
        """Removes the files."""
        for folder in (self._staged, self._whole):
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
        self._staged = self._whole = None

    def close(self) -> None:
        """Removes the files and releases their lock."""
        super().close()
        self._folders.close()
        self._kept = KeptWeights()  # the next engine starts from whole weights
        self._name = ""


class SharedMemoryTransfer(FileTransfer):
    """Files in `/dev/shm`: trainer and engine on one machine, CPU or GPU. Needs room for one copy of the weights.

    Where there is less, as in containers that were started without `--shm-size`, files in the system's temporary folder
    take its place, with a warning.

    Args:
        shard_gb: as in `FileTransfer`.
        dtype: as in `FileTransfer`.
        delta: as in `FileTransfer`.
        preload: as in `FileTransfer`.
    """

    def __init__(
        self, shard_gb: float = 1.0, dtype: str | None = None, delta: bool = False, preload: bool = True
    ) -> None:
        super().__init__(SHARED_MEMORY, shard_gb, dtype, delta=delta, preload=preload)

    def check_room(self, model: str) -> None:
        """Falls back to files elsewhere if the weights do not fit."""
        needed = weight_bytes(model, self.dtype or torch.float32)
        copies = 2 if self.delta else 1  # whole weights, for a server that comes back, beside an update
        if (folder := folder_with_room(needed, copies)) != SHARED_MEMORY:
            self.folder = folder
            self._folders = WeightFolders(folder)


def _shards(entries: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Consecutive entries of together about `max_bytes`; those of one tensor stay together."""
    shard: list[tuple[str, Tensor]] = []
    for name, tensor in entries:
        if sum(other.nbytes for _, other in shard) >= max_bytes and not name.startswith(VALUE):
            yield shard
            shard = []
        shard.append((name, tensor))
    if shard:
        yield shard
