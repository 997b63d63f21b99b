"""One run of the benchmark: the ordinary command line in a process of its own, with a log per step."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from benchmarks.common.process import RESULT, csv_logger, recorded
from benchmarks.staleness.suite import Cell
from lit_async_rl.cli.app import AsyncRLCLI


class CellRecorder(pl.Callback):
    """Logs `bench/cpu_s` of the whole process and `bench/tokens` trained on, for the comparison at equal cost.

    Processor time and not wall time, because several cells share the machine; engine and trainer both count.
    """

    def __init__(self) -> None:
        self._began = 0.0
        self._cpu_s_before = 0.0  # of the parts of a run that was ended and continued
        self._tokens = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._began = time.process_time() - self._cpu_s_before

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._tokens += int(batch.loss_mask.sum())
        pl_module.log_dict({"bench/cpu_s": time.process_time() - self._began, "bench/tokens": float(self._tokens)})

    def state_dict(self) -> dict[str, Any]:
        return {"cpu_s": time.process_time() - self._began, "tokens": self._tokens}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._cpu_s_before = state_dict["cpu_s"]
        self._tokens = state_dict["tokens"]


def run_cell(
    cell: Cell, out: Path, settings: Sequence[str] = (), *, checkpoint_every_n_steps: int | None = None
) -> None:
    """Trains one cell, with these further arguments of the command line.

    With `checkpoint_every_n_steps` a cell that was ended goes on from its last checkpoint, bit for bit. Such a cell is
    not validated before the first step: all cells of its kind start from the same policy.
    """
    folder = out / cell.folder
    arguments = [*cell.arguments(), *settings]
    last = folder / "checkpoints" / "last.ckpt"
    with recorded(folder, arguments, continues=last.exists()) as result:
        cli = AsyncRLCLI([*arguments, *csv_logger(folder), *_checkpoints(last.parent, checkpoint_every_n_steps)])
        result["device"] = cli.trainer.strategy.root_device.type
        if checkpoint_every_n_steps is None:
            cli.trainer.validate(cli.model, cli.datamodule, verbose=False)
        cli.trainer.fit(cli.model, cli.datamodule, ckpt_path=str(last) if last.exists() else None)
    if checkpoint_every_n_steps is not None and (folder / RESULT).is_file():
        shutil.rmtree(last.parent, ignore_errors=True)


def _checkpoints(folder: Path, every_n_steps: int | None) -> list[str]:
    if every_n_steps is None:
        return []
    settings = {"dirpath": str(folder), "every_n_train_steps": every_n_steps, "save_top_k": 1, "save_last": "link"}
    callback = {"class_path": "LinkedCheckpoint", "init_args": settings}
    return ["--trainer.enable_checkpointing", "true", "--defaults.checkpoint", json.dumps(callback)]
