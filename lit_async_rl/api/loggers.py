"""The run's folder: that of its CSV log, whatever its other loggers are, and after a resume that of before."""

from __future__ import annotations

import os
import re
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lit_async_rl.training.csv_logger import CSVLog
from lit_async_rl.utils.lightning_types import AnyTrainer


def add_csv_log(trainer: Trainer, ckpt_path: str | None = None) -> None:
    """Adds a CSV log to a Trainer with other loggers, so that `metrics.csv` lies in the folder of `run_folder`.

    With TensorBoard that is TensorBoard's. Other loggers know theirs only when they have begun: a CSV log in `runs/`
    of their `save_dir`, or the one that is among them, comes first, and its folder is the run's.

    Args:
        trainer: that has not run yet.
        ckpt_path: checkpoint to go on from, see `go_on_in_folder`.
    """
    if not trainer.loggers or trainer.fast_dev_run:  # type: ignore[attr-defined]
        return
    given = list(trainer.loggers)
    first = next((one for one in given if isinstance(one, CSVLogger)), given[0])
    if not isinstance(first, CSVLogger | TensorBoardLogger):
        first = CSVLog(first.save_dir or ".", name="runs")
    go_on_in_folder(trainer, first, ckpt_path)
    trainer.loggers = [first, *(one for one in given if one is not first)]
    if isinstance(first, TensorBoardLogger):
        folder, version = os.path.split(first.log_dir)
        trainer.loggers = [*trainer.loggers, CSVLog(folder, name="", version=version)]


def go_on_in_folder(trainer: AnyTrainer, log: CSVLogger | TensorBoardLogger, ckpt_path: str | None) -> None:
    """Lets a run go on in the folder of the run that saved its checkpoint, if `log` would place it beside that one.

    Later checkpoints there give way, as rows of its tables do, and not to `last-v1.ckpt`. Nothing happens if a version
    was chosen for `log`, or if it is Lightning's `CSVLogger`, which would delete the table that is there.
    """
    if ckpt_path is None or log._version is not None or not isinstance(log, CSVLog | TensorBoardLogger):
        return
    checkpoints = Path(ckpt_path).parent
    folder = checkpoints.parent
    if checkpoints.name != "checkpoints" or folder.parent.resolve() != Path(log.root_dir).resolve():
        return
    match = re.fullmatch(r"version_(\d+)", folder.name)
    log._version = int(match[1]) if match else folder.name
    for callback in trainer.callbacks:  # type: ignore[union-attr]
        if isinstance(callback, ModelCheckpoint) and callback.dirpath is None:
            callback._enable_version_counter = False
