"""The CSV log that every run has, in the run's folder, whatever its other loggers are."""

from __future__ import annotations

import os

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lit_async_rl.training.csv_logger import CSVLog


def add_csv_log(trainer: Trainer) -> None:
    """Adds a CSV log to a Trainer with other loggers, so that `metrics.csv` lies in the folder of `run_folder`.

    With TensorBoard that is TensorBoard's. Other loggers know theirs only when they have begun: a CSV log in `runs/`
    of their `save_dir`, or the one that is among them, comes first, and its folder is the run's.

    Args:
        trainer: that has not run yet.
    """
    if not trainer.loggers or trainer.fast_dev_run:  # type: ignore[attr-defined]
        return
    given = list(trainer.loggers)
    first = next((one for one in given if isinstance(one, CSVLogger)), given[0])
    if not isinstance(first, CSVLogger | TensorBoardLogger):
        first = CSVLog(first.save_dir or ".", name="runs")
    trainer.loggers = [first, *(one for one in given if one is not first)]
    if isinstance(first, TensorBoardLogger):
        folder, version = os.path.split(first.log_dir)
        trainer.loggers = [*trainer.loggers, CSVLog(folder, name="", version=version)]
