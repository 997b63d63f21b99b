"""One run of the benchmark: the ordinary command line in a process of its own, with a log per step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from benchmarks.common.process import csv_logger, recorded
from benchmarks.staleness.suite import Cell
from lit_async_rl.cli.app import AsyncRLCLI


class CellRecorder(pl.Callback):
    """Logs `bench/cpu_s` of the whole process and `bench/tokens` trained on, for the comparison at equal cost.

    Processor time and not wall time, because several cells share the machine; engine and trainer both count.
    """

    def __init__(self) -> None:
        self._began = 0.0
        self._tokens = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._began = time.process_time()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._tokens += int(batch.loss_mask.sum())
        pl_module.log_dict({"bench/cpu_s": time.process_time() - self._began, "bench/tokens": float(self._tokens)})


def run_cell(cell: Cell, out: Path, settings: Sequence[str] = ()) -> None:
    """Trains one cell, with these further arguments of the command line."""
    folder = out / cell.folder
    arguments = [*cell.arguments(), *settings]
    with recorded(folder, arguments):
        cli = AsyncRLCLI([*arguments, *csv_logger(folder)])
        cli.trainer.validate(cli.model, cli.datamodule, verbose=False)
        cli.trainer.fit(cli.model, cli.datamodule)
