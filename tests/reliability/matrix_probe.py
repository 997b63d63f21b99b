"""Callback of the runs of `kill_matrix.py`: a journal of each micro-batch and each step, one JSON object per line."""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

RAISE = "raise"  # a file of this name in the journal's folder: the step in which all ranks raise


class Journal(pl.Callback):
    """Writes `<segment>.<rank>.jsonl`, line by line into the page cache, so that it survives SIGKILL.

    Args:
        folder: of the journals of all processes of a run; a process takes the next free number.
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self._step = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Records the first step of this process."""
        self._file = os.open(self.folder / f"{os.environ['SEGMENT']}.{trainer.global_rank}.jsonl", os.O_WRONLY | 0o100)
        self._step = trainer.global_step
        self._write(at="start", step=self._step)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Records the rollouts of a micro-batch, the policy's version and that of its oldest token."""
        rows = [
            (int(group), zlib.crc32(ids[mask].numpy().tobytes()))
            for group, ids, mask in zip(batch.group_index, batch.input_ids, batch.attention_mask, strict=True)
            if group >= 0
        ]
        trained = batch.versions[batch.loss_mask]
        oldest = int(trained.min()) if len(trained) else pl_module.version
        self._write(at="micro", step=trainer.global_step, version=pl_module.version, oldest=oldest, rows=rows)

    def on_before_backward(self, trainer: pl.Trainer, pl_module: Any, loss: torch.Tensor) -> None:
        """Raises on request."""
        request = self.folder / RAISE
        if request.exists() and trainer.global_step == int(request.read_text() or -1):
            raise RuntimeError("injected: an exception within a step")

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Records a digest of all parameters after each optimizer step."""
        if trainer.global_step != self._step:
            self._write(at="step", step=self._step, digest=digest(pl_module))
            self._step = trainer.global_step

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._write(at="end", step=trainer.global_step, digest=digest(pl_module))

    def _write(self, **record: Any) -> None:
        os.write(self._file, (json.dumps(record) + "\n").encode())


def digest(module: torch.nn.Module) -> str:
    """Digest of all parameters."""
    content = hashlib.sha256()
    for parameter in module.parameters():
        content.update(parameter.detach().numpy().tobytes())
    return content.hexdigest()[:16]
