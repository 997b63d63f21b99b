"""One run of the benchmark: the ordinary command line in a process of its own, with a log per step."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from benchmarks.staleness.suite import Cell
from lit_async_rl.cli.app import AsyncRLCLI

RESULT = "result.json"


class CellRecorder(pl.Callback):
    """Logs `bench/cpu_s` of the whole process and `bench/tokens` trained on, for the comparison at equal cost.

    Processor time and not wall time, because several cells share the machine; engine and trainer both count.
    """

    def __init__(self) -> None:
        self._began, self._tokens = 0.0, 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._began = time.process_time()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._tokens += int(batch.loss_mask.sum())
        pl_module.log_dict({"bench/cpu_s": time.process_time() - self._began, "bench/tokens": float(self._tokens)})


def run_cell(cell: Cell, out: Path) -> None:
    """Trains one cell and writes `result.json` last: a folder without it is of a run that did not finish.

    Everything printed goes to `log.txt`. A run that fails (with a non-finite loss, say) has finished: its error is the
    result.
    """
    folder = out / cell.folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    log = (folder / "log.txt").open("w", buffering=1)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    sys.stdout = sys.stderr = log
    began = time.monotonic()
    result: dict[str, Any] = {"command": ["scripts/train.py", *cell.arguments()], "error": None}
    logger = {"class_path": "lit_async_rl.training.csv_logger.CSVLog"}
    logger["init_args"] = {"save_dir": str(folder), "name": "", "version": "", "flush_logs_every_n_steps": 50}  # type: ignore[assignment]
    try:
        cli = AsyncRLCLI([*cell.arguments(), "--trainer.logger", json.dumps(logger)])
        cli.trainer.validate(cli.model, cli.datamodule, verbose=False)
        cli.trainer.fit(cli.model, cli.datamodule)
    except Exception as error:
        result["error"] = f"{type(error).__name__}: {error}"
    result["wall_s"] = time.monotonic() - began
    write_result(folder, result)


def write_result(folder: Path, result: dict[str, Any]) -> None:
    """Writes a result atomically."""
    part = folder / f"{RESULT}.part"
    part.write_text(json.dumps(result, indent=1))
    part.replace(folder / RESULT)
