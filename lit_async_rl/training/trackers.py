"""Loggers: a CSV log that survives a full disk, Trackio, and tables and files of trackers."""

from __future__ import annotations

import contextlib
import csv
import io
import os
import re
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.logger import _convert_params, _flatten_dict
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.loggers.logger import rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_only

from lit_async_rl.errors import InvariantError
from lit_async_rl.runtime.files import FolderLock, absolute, append, check_writable, replacing, tolerate_full_disk
from lit_async_rl.utils.lightning_types import AnyTrainer


class CSVLog(CSVLogger):
    """Lightning's `CSVLogger`, with the same arguments and file format.

    On a full disk it warns once, keeps the file intact, and writes the rows once there is space. With an existing
    `version`, as after a resume, rows are appended. Otherwise the next free folder is created at once, so that runs
    that start together get one each. While a Trainer runs, the folder is locked against other processes.

    Attributes:
        made_folders: folders created for this run, the run's own first.

    Raises:
        OSError: another process writes to the folder.
    """

    made_folders: Sequence[Path] = ()
    _lock: FolderLock | None = None

    @property
    def version(self) -> int | str:
        """The given version, or the next free one."""
        is_rank_zero = getattr(rank_zero_only, "rank", 0) == 0
        if self._version is None and is_rank_zero and "://" not in self.root_dir:
            self._version = self._claim_version()
        return super().version

    def _claim_version(self) -> int:
        version = int(self._get_next_version())
        while True:
            folder = Path(self.root_dir, f"version_{version}")
            missing = [path for path in (folder, *folder.parents) if not path.exists()]
            try:
                folder.mkdir(parents=True)  # atomic: of two runs only one creates it
            except FileExistsError:
                version += 1
            except OSError:  # `check_writable` reports it later, with the name of the setting
                return version
            else:
                self.made_folders = missing
                return version

    @rank_zero_only
    def finalize(self, status: str) -> None:
        super().finalize(status)
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    @property
    @rank_zero_experiment
    def experiment(self) -> ExperimentWriter:
        """Writer of the rows; locks the folder."""
        if self._lock is None and "://" not in self.log_dir:
            check_writable(absolute(self.log_dir), "CSVLog.save_dir")
            self._lock = FolderLock(absolute(self.log_dir), "CSVLog.save_dir")
        if self._experiment is None:
            is_url = "://" in self.log_dir
            self._experiment = _Writer(log_dir=self.log_dir if is_url else str(absolute(self.log_dir)))
        if not isinstance(self._experiment, _Writer):
            raise InvariantError("a logger without its writer")
        return self._experiment


class _Writer(ExperimentWriter):
    def _check_log_dir_exists(self) -> None:
        """Continues an existing table, which Lightning would delete."""
        path = Path(self.metrics_file_path)
        if "://" in self.log_dir or not path.is_file():
            return
        with path.open(newline="") as file:
            self.metrics_keys = next(csv.reader(file), [])
        with path.open("rb+") as table:
            if not table.seek(0, os.SEEK_END):
                return
            table.seek(-1, os.SEEK_END)
            if table.read() != b"\n":
                table.write(b"\n")  # a crash cut off the last row

    def save(self) -> None:
        """Appends all pending rows, or none of them if the disk is full."""
        if "://" in self.log_dir:
            super().save()
            return
        if not self.metrics:
            return
        path = Path(self.metrics_file_path)
        with tolerate_full_disk(str(path)):
            keys = sorted({*self.metrics_keys}.union(*self.metrics))
            if keys != self.metrics_keys:
                self._rewrite_with_header(path, keys)
            text = io.StringIO(newline="")
            csv.DictWriter(text, keys).writerows(self.metrics)
            append(path, text.getvalue())
            self.metrics = []

    def _rewrite_with_header(self, path: Path, keys: list[str]) -> None:
        """Rewrites the table with a new header, atomically."""
        rows: list[dict[str, Any]] = []
        if path.exists():
            with path.open(newline="") as file:
                rows = list(csv.DictReader(file))
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, keys)
        writer.writeheader()
        writer.writerows(rows)
        with replacing(path) as file:
            file.write(text.getvalue().encode())
        self.metrics_keys = keys


# -- Trackio ----------------------------------------------------------------------------------------------------------


class TrackioLogger(Logger):
    """Logs to Trackio, a tracker with a local database: `pip install "lit-async-rl[trackio]"`, `trackio show`.

    Args:
        project: name of the project.
        name: name of the run; None lets Trackio choose one.
        save_dir: folder of the database; None is Trackio's default. `trackio show` needs `TRACKIO_DIR=<folder>` for
            another. A process can use only one.
        settings: other arguments of `trackio.init`.
    """

    def __init__(
        self,
        project: str = "lit-async-rl",
        name: str | None = None,
        save_dir: str | None = None,
        settings: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self._project = project
        self.run_name = name
        self._settings = settings or {}
        self._save_dir = save_dir
        self._run: Any = None
        self._has_begun = False
        self._params: dict[str, Any] = {}

    @property
    def name(self) -> str:
        """Name of the project."""
        return self._project

    @property
    def version(self) -> str | None:
        """Name of the run."""
        return self.run_name

    @property
    def save_dir(self) -> str | None:
        return self._save_dir

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The run of Trackio, started on first use.

        Raises:
            ModuleNotFoundError: Trackio is not installed.
            ValueError: this process already has a database in another folder.
        """
        if self._run is None:
            self._choose_folder()
            try:
                import trackio
            except ModuleNotFoundError as error:
                raise ModuleNotFoundError('TrackioLogger needs pip install "lit-async-rl[trackio]"') from error
            settings = {"embed": False, "config": self._params, **self._settings}
            if self._has_begun:  # Lightning calls `finalize` after every fit and validation
                settings["resume"] = "allow"
            self._run = trackio.init(project=self._project, name=self.run_name, **settings)
            self.run_name = self._run.name
            self._has_begun = True
        return self._run

    def _choose_folder(self) -> None:
        """Sets the folder in the environment, which Trackio reads at its import."""
        if self._save_dir is None:
            return
        before = os.environ.get("TRACKIO_DIR")
        folder = str(Path(self._save_dir).absolute())
        if "trackio" in sys.modules and before != folder:
            raise ValueError(
                f"TrackioLogger.save_dir={self._save_dir!r} cannot be used: Trackio already writes to {before} in this "
                "process"
            )
        os.environ["TRACKIO_DIR"] = folder

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        self._params |= _flatten_dict(_convert_params(params))
        if self._run is not None:
            self._run.config.update(self._params)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.experiment.log(dict(metrics), step=step)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Writes pending metrics and ends the run."""
        if self._run is not None:
            with contextlib.redirect_stdout(sys.stderr):  # stdout belongs to the command's results
                self._run.finish()
            self._run = None


# -- Tables, files and steps of any tracker ---------------------------------------------------------------------------


def step_in_trackers(trainer: AnyTrainer) -> int:
    """Step at which Lightning logs the running optimizer step, from 0."""
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def log_validation(trainer: AnyTrainer, metrics: Mapping[str, float]) -> None:
    """Logs a validation within training at the number of optimizer steps before it.

    Lightning logs it one step earlier, unlike validations before and after training.

    Args:
        trainer: trainer of the run.
        metrics: values by name.
    """
    is_after_step = not trainer.fit_loop.epoch_loop._should_accumulate()
    step = step_in_trackers(trainer) + is_after_step  # Lightning counts a step only after its validation
    for logger in trainer.loggers:
        logger.log_metrics({**metrics, "epoch": trainer.current_epoch}, step=step)
        logger.save()


def log_table(logger: Logger, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
    """Adds a table to a tracker that supports them; TensorBoard gets `prompt`, `completion` and `reward` as text."""
    data = [list(row) for row in rows]
    if isinstance(logger, WandbLogger):
        logger.log_table(name, columns=list(columns), data=data, step=step)
    elif isinstance(logger, MLFlowLogger):
        table = {column: [row[n] for row in data] for n, column in enumerate(columns)}
        logger.experiment.log_dict(logger.run_id, table, f"{name}/step_{step}.json")
    elif isinstance(logger, TrackioLogger):
        import trackio

        logger.experiment.log({name: trackio.Table(columns=list(columns), data=data)}, step=step)
    elif isinstance(logger, TensorBoardLogger):
        prompt = columns.index("prompt")
        completion = columns.index("completion")
        reward = columns.index("reward")
        lines = (f"    {row[prompt]}{row[completion]}   reward {row[reward]:g}" for row in data)
        logger.experiment.add_text(name, "\n".join(lines), step)


def keeps_files(logger: Logger) -> bool:
    """Whether the tracker stores files besides metrics."""
    return isinstance(logger, WandbLogger | MLFlowLogger | TrackioLogger)


def log_file(logger: Logger, path: Path, kind: str) -> None:
    """Uploads a file to a tracker that stores files, as an artifact of type `kind`."""
    if isinstance(logger, WandbLogger):
        import wandb

        artifact = wandb.Artifact(f"{kind}-{logger.experiment.id}", type=kind)
        artifact.add_file(str(path))
        logger.experiment.log_artifact(artifact)
    elif isinstance(logger, MLFlowLogger):
        logger.experiment.log_artifact(logger.run_id, str(path))
    elif isinstance(logger, TrackioLogger):
        logger.experiment.log_artifact(str(path), name=re.sub(r"[^\w.-]+", "-", f"{kind}-{logger.version}"), type=kind)


# -- Folder, name and id of existing loggers: Lightning takes them in constructors only -------------------------------


def move_into_folder(logger: Logger, log: CSVLogger) -> None:
    """Makes TensorBoard or W&B use the folder of a CSV log, before they write anything."""
    if isinstance(logger, WandbLogger):
        logger._save_dir = log.log_dir
        # absolute: W&B's service is another process, and stays in the folder in which the first run started it
        logger._wandb_init["dir"] = os.path.abspath(log.log_dir)
    elif isinstance(logger, TensorBoardLogger):
        logger._root_dir = log.save_dir
        logger._name = log.name
        logger._version = log.version


def identify_wandb_run(logger: WandbLogger, *, name: str | None = None, run_id: str | None = None) -> None:
    """Sets name and id of a W&B run before it starts; None does not change them."""
    if name is not None:
        logger._name = name
        logger._wandb_init["name"] = name
    if run_id is not None:
        logger._id = run_id
        logger._wandb_init["id"] = run_id
