"""Folders of a run: checked, locked and cleaned before anything is computed."""

from __future__ import annotations

import contextlib
import csv
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger

from lit_async_rl.callbacks import RolloutTape
from lit_async_rl.callbacks.parts import run_folder
from lit_async_rl.runtime.checkpoint_files import read_safely
from lit_async_rl.runtime.files import check_writable, locked, remove_stale_parts, replacing
from lit_async_rl.training.trackers import CSVLog, identify_wandb_run, move_into_folder
from lit_async_rl.training.wandb_runs import prepare_logging
from lit_async_rl.utils.lightning_types import AnyTrainer

WANDB_ID = "wandb_id.txt"  # of the W&B run, which a resumed run goes on with
CHECKPOINTS = "ModelCheckpoint.dirpath"  # Lightning warns where it is not empty
LOCKS = (".run.lock", ".run.json", ".checkpoints.run.lock", ".checkpoints.run.json")
ONLY_SETTINGS = (*LOCKS, "config.yaml", "hparams.yaml", WANDB_ID)
TABLES = ("metrics.csv", "samples.jsonl", "held_out.jsonl", "verdicts.jsonl")
log = logging.getLogger(__name__)


@contextmanager
def run_folders(trainer: Trainer, resumed_from: str | None = None) -> Iterator[None]:
    """Keeps other runs out of this one's folders.

    Args:
        trainer: of the run; only its leading process does anything.
        resumed_from: checkpoint from whose step tables in the folder go on: later rows are set aside, and in a new run
            all rows of an earlier one.

    Raises:
        OSError: a folder cannot be written to, or is in use; names the setting and the folder.
    """
    log_dir = run_folder(trainer)  # a collective where the ranks are connected already: all of them come here
    folders = _folders(trainer, log_dir)
    if not trainer.is_global_zero:
        yield
        return
    try:
        for what, folder in folders:
            check_writable(folder, what)
        with locked(folders, beside=[CHECKPOINTS]):
            if log_dir is not None:
                _prepare_tables(log_dir, resumed_from)
                _remember_wandb_run(trainer, log_dir, resumed_from)
            yield
    except BaseException:
        remove_unused(trainer)
        raise


def _prepare_tables(log_dir: Path, resumed_from: str | None) -> None:
    for earlier in {path.parent for path in log_dir.parent.glob("*/checkpoints/.*.part")}:
        remove_stale_parts(earlier)
    step = None if resumed_from is None else checkpoint_step(resumed_from)
    if step is not None:
        for name in TABLES:
            drop_later_rows(log_dir / name, step)
    elif resumed_from is None:
        older = [set_aside(log_dir / name) for name in (*TABLES, "config.yaml")]
        if any(older):
            log.warning("trainer.logger: %s holds an earlier run; its files are kept as metrics.1.csv ...", log_dir)


def _remember_wandb_run(trainer: Trainer, folder: Path, resumed_from: str | None) -> None:
    """Gives a W&B run a new id, or in a resumed run's folder that run's; a chosen id stays."""
    file = folder / WANDB_ID
    goes_on = resumed_from is not None and Path(resumed_from).absolute().parent.parent.resolve() == folder.resolve()
    for logger in trainer.loggers:
        if isinstance(logger, WandbLogger):
            from wandb.sdk.lib.runid import generate_id  # costs a second, and only such a run needs it

            known = file.read_text().strip() if goes_on and file.is_file() else ""
            run_id = logger.version or known or generate_id()
            identify_wandb_run(logger, run_id=run_id)
            prepare_logging(logger, Path(logger.save_dir or ".") if goes_on else None, run_id=run_id)
            with contextlib.suppress(OSError):  # reported by the loggers and callbacks that write there
                file.write_text(f"{run_id}\n")


def remove_unused(trainer: Trainer) -> None:
    """Removes folders that this run made, if they hold only its settings and the timeline of its start."""
    made = [folder for log in trainer.loggers if isinstance(log, CSVLog) for folder in log.made_folders]
    files = [file for folder in made[:1] for file in folder.rglob("*") if file.is_file()]
    if not made or any(file.name not in ONLY_SETTINGS and file.parent.name != "timeline" for file in files):
        return
    shutil.rmtree(made[0], ignore_errors=True)
    for parent in made[1:]:
        with contextlib.suppress(OSError):  # not empty: another run is there by now
            parent.rmdir()


def checkpoint_step(path: str) -> int | None:
    """Optimizer steps at a checkpoint; None for addresses such as `s3://`, not read here."""
    if "://" in path:
        return None
    file = Path(path, "meta.pt") if Path(path).is_dir() else Path(path)
    return int(read_safely(file, f"ckpt_path={path!r}")["global_step"])


def drop_later_rows(path: Path, step: int) -> None:
    """Drops any rows of a table after the first `step` steps; the whole table is set aside.

    Lightning counts rows of `metrics.csv` from 0, and a validation after the last step is one more, which a resumed run
    repeats. `Evaluation` counts from 1, and evaluations ended at the checkpoint are not repeated.
    """
    if not path.exists():
        return
    with path.open(newline="") as file:
        lines = file.readlines()
    if path.suffix == ".csv":
        table = zip(lines[1:], csv.DictReader(lines), strict=False)
        kept = [lines[0], *(line for line, row in table if row_step(row) < step + _is_evaluation(row))]
    else:
        kept = [line for line in lines if _number(_step_of(line)) <= step]
    if len(kept) < len(lines):
        set_aside(path)
        with replacing(path) as new:
            new.write("".join(kept).encode())


def row_step(row: Mapping[Any, object]) -> float:
    """Step of a row of `metrics.csv`, see `drop_later_rows`; infinite for a row cut off by a crash."""
    return _number(row.get("step"))


def _is_evaluation(row: Mapping[str | None, object]) -> bool:
    return all(str(name).startswith("eval/") for name, value in row.items() if value and name != "step")


def _step_of(line: str) -> object:
    try:
        return json.loads(line).get("step")
    except (ValueError, AttributeError):  # cut off by a crash
        return None


def _number(step: object) -> float:
    try:
        return float(str(step))
    except ValueError:
        return math.inf


def set_aside(path: Path) -> bool:
    """Renames an existing file to `name.1.suffix`, or the next free number; whether there was one."""
    if not path.exists():
        return False
    number = 1
    while (target := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    path.rename(target)
    return True


def _folders(trainer: Trainer, log_dir: Path | None) -> list[tuple[str, Path]]:
    folders: list[tuple[str, str | Path | None]] = [("trainer.logger's folder", log_dir)]
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, ModelCheckpoint):
            folders.append((CHECKPOINTS, callback.dirpath))
        if isinstance(callback, RolloutTape):
            folders.append(("RolloutTape.folder", callback.folder))
    return [(what, Path(folder)) for what, folder in folders if folder is not None]


# -- The run's folder: that of its CSV log, whatever its other loggers are, and after a resume that of before ---------


def gather_loggers(trainer: AnyTrainer, ckpt_path: str | None = None, run_name: str | None = None) -> None:
    """Adds a CSV log, unless there is one, to a Trainer that has not run yet. Its folder is the run's.

    Loggers made in Python keep their folders: a CSV log goes into TensorBoard's, and beside others into `runs/` of
    their `save_dir`. On the command line, where a logger takes the place of the one before, TensorBoard and W&B write
    into the folder of the CSV log.

    Args:
        trainer: without loggers, or with `fast_dev_run`, it is left as it is.
        ckpt_path: checkpoint to go on from, see `resume_in_folder`.
        run_name: of a run of the command line and its CSV log; None is a run from Python.
    """
    if not trainer.loggers or getattr(trainer, "fast_dev_run", False):
        return
    given = list(trainer.loggers)
    first = next((logger for logger in given if isinstance(logger, CSVLogger)), given[0])
    if run_name is not None and not isinstance(first, CSVLogger):
        first = CSVLog(first.save_dir or "runs", run_name)
    elif not isinstance(first, CSVLogger | TensorBoardLogger):
        first = CSVLog(first.save_dir or ".", name="runs")
    resume_in_folder(trainer, first, ckpt_path)
    others = [logger for logger in given if logger is not first]
    trainer.loggers = [first, *others]
    if isinstance(first, TensorBoardLogger):
        folder, version = os.path.split(first.log_dir)
        trainer.loggers = [*trainer.loggers, CSVLog(folder, name="", version=version)]
    elif run_name is not None:
        for logger in others:
            move_into_folder(logger, first)


def resume_in_folder(trainer: AnyTrainer, log: CSVLogger | TensorBoardLogger, ckpt_path: str | None) -> None:
    """Continues in the folder of the checkpoint's run, if the folders of `log` lie beside it.

    Later checkpoints there are overwritten: there is no `last-v1.ckpt`. Nothing happens if `log` has a chosen version,
    or is Lightning's `CSVLogger`, which would delete the table there.
    """
    if ckpt_path is None or log._version is not None or not isinstance(log, CSVLog | TensorBoardLogger):
        return
    checkpoints = Path(ckpt_path).absolute().parent
    folder = checkpoints.parent
    if checkpoints.name != "checkpoints" or folder.parent.resolve() != Path(log.root_dir).resolve():
        return
    match = re.fullmatch(r"version_(\d+)", folder.name)
    log._version = int(match[1]) if match else folder.name
    for callback in trainer.callbacks:  # type: ignore[union-attr]
        if isinstance(callback, ModelCheckpoint) and callback.dirpath is None:
            callback._enable_version_counter = False
