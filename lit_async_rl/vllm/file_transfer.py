"""Weight transfer through safetensors files: all weights, or the changes since the last update."""

from __future__ import annotations

import logging
import os
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_async_rl.engines.weight_deltas import ADAPTER, BASE, ID, VALUE, WeightStore
from lit_async_rl.engines.weight_files import SHARED_MEMORY, WeightFolders, chunks, folder_with_room, write_folder
from lit_async_rl.errors import SetupError
from lit_async_rl.models.loading import weight_bytes
from lit_async_rl.runtime.waiting import Wait
from lit_async_rl.utils.checks import check_range
from lit_async_rl.vllm.weight_transfer import EXTENSION, EngineControl, WeightTransfer, as_dtype

log = logging.getLogger(__name__)
POLL_INTERVAL_S = 0.02  # a pause of generation may wait for the workers' loading: not the half second of `Wait`


class FileTransfer(WeightTransfer):
    """Safetensors files in a folder visible to trainer and workers; may be delivered several times.

    With `delta` only changes since the last update are written, compared bit by bit in `dtype`; with `model.lora` these
    are the adapters, which each worker merges. The resulting weights equal those of a full update. The trainer and each
    worker keep a copy of the weights in host memory for the comparison.

    Args:
        folder: of the files, created if missing; on a shared file system for engines on other machines. None is the
            system's temporary folder. Each update has a subfolder, removed after use (after `kill -9`, by the next run
            that uses the folder).
        shard_gb: maximum size of a file in GiB (at least one tensor), and memory needed.
        dtype: of floating-point weights in the files, such as bfloat16 for an engine that computes in it; None does not
            cast.
        delta: write changes only.
        preload: workers load new weights while they generate. Shortens pauses, but takes memory for a second copy (on a
            GPU, host memory).

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
        folder = None if folder is None else os.path.expanduser(folder)
        self.folder = folder
        self.shard_gb = shard_gb
        self._max_bytes = int(shard_gb * 2**30)
        self.dtype = as_dtype(dtype)
        self.delta = delta
        self.preload = preload
        self.takes_adapters = delta
        self._folders = WeightFolders(folder)
        self._staged: Path | None = None
        self._whole: Path | None = None  # folder of the same weights in full
        self._kept = WeightStore()
        self._name = ""
        self._is_first = True
        self._is_prepared = False
        self._needs_whole = False

    @property
    def staged(self) -> str:
        """Folder of the newest weights, or of their changes since the previous update."""
        if self._staged is None:
            raise SetupError("weights were applied before they were staged")
        return str(self._staged)

    def whole(self) -> str:
        """Folder of the newest weights in full, for an engine without the previous ones.

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

    def engine_arguments(self) -> dict[str, Any]:
        return {"worker_extension_cls": EXTENSION}

    def stage(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Writes the files, and removes those staged before.

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
        """Makes every worker load the files beside the weights in use, and waits.

        If a worker fails, it keeps its weights, and `deliver` makes all workers load full weights.

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
            log.warning(
                "vLLM's workers could not load weights during generation, so generation pauses during each load: %s",
                error,
            )
            self._needs_whole = True

    def deliver(self, control: EngineControl) -> None:
        """Makes every worker use the prepared weights, or read the files."""
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
        self._kept = WeightStore()  # the next engine starts from whole weights
        self._name = ""


class SharedMemoryTransfer(FileTransfer):
    """Files in `/dev/shm`: trainer and engine on one machine, CPU or GPU. Needs space for one copy of the weights.

    With less, as in containers without `--shm-size`, falls back to the system's temporary folder, with a warning.

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
        copies = 2 if self.delta else 1  # full weights, for a restarted server, beside an update
        if (folder := folder_with_room(needed, copies)) != SHARED_MEMORY:
            self.folder = folder
            self._folders = WeightFolders(folder)


def _shards(entries: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Shards of consecutive entries, about `max_bytes` each; entries of one tensor stay together."""
    shard: list[tuple[str, Tensor]] = []
    for name, tensor in entries:
        if sum(other.nbytes for _, other in shard) >= max_bytes and not name.startswith(VALUE):
            yield shard
            shard = []
        shard.append((name, tensor))
    if shard:
        yield shard
