"""Loggers of a run: the CSV log, which a full disk does not end, and trackers with their tables and files."""

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
from lit_async_rl.utils.files import FolderLock, append, check_writable, replacing, tolerate_full_disk
from lit_async_rl.utils.lightning_types import AnyTrainer


class CSVLog(CSVLogger):
    """Lightning's `CSVLogger`, with the same arguments and file format.

    When the disk is full one line says so, the file stays whole, and the rows are written as soon as there is room.
    With a `version` that there is already, as after a resume, its rows stay, and those of this run come behind them.
    Without one the next folder that is free is made at once, so that two runs that begin together get one each. While a
    Trainer runs no other process can write there.

    Attributes:
        made_folders: those that were made for this run, the run's own first.

    Raises:
        OSError: another process writes there.
    """

    made_folders: Sequence[Path] = ()
    _lock: FolderLock | None = None

    @property
    def version(self) -> int | str:
        """The version that was given, or the next that is free."""
        leads = getattr(rank_zero_only, "rank", 0) == 0
        if self._version is None and leads and "://" not in self.root_dir:
            self._version = self._claim_version()
        return super().version

    def _claim_version(self) -> int:
        version = int(self._get_next_version())
        while True:
            folder = Path(self.root_dir, f"version_{version}")
            missing = [one for one in (folder, *folder.parents) if not one.exists()]
            try:
                folder.mkdir(parents=True)
            except FileExistsError:  # made by another run meanwhile
                version += 1
            except OSError:  # the first file that is written there reports it, with its setting
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
            check_writable(Path(self.log_dir), "CSVLog.save_dir")
            self._lock = FolderLock(self.log_dir, "CSVLog.save_dir")
        if self._experiment is None:
            self._experiment = _Writer(log_dir=self.log_dir)
        if not isinstance(self._experiment, _Writer):
            raise InvariantError("a logger without its writer")
        return self._experiment


class _Writer(ExperimentWriter):
    def _check_log_dir_exists(self) -> None:
        """Goes on with the table that is there, where Lightning would delete it."""
        path = Path(self.metrics_file_path)
        if "://" in self.log_dir or not path.is_file():
            return
        with path.open(newline="") as file:
            self.metrics_keys = next(csv.reader(file), [])
        with path.open("rb+") as table:
            if table.seek(0, os.SEEK_END) and (table.seek(-1, os.SEEK_END), table.read())[1] != b"\n":
                table.write(b"\n")  # the last row was cut off by a crash

    def save(self) -> None:
        """Appends the rows that wait; all or none of them."""
        if "://" in self.log_dir:
            super().save()
            return
        if not self.metrics:
            return
        path = Path(self.metrics_file_path)
        with tolerate_full_disk(str(path)):
            keys = sorted({*self.metrics_keys}.union(*self.metrics))
            if keys != self.metrics_keys:
                self._write_anew(path, keys)
            text = io.StringIO(newline="")
            csv.DictWriter(text, keys).writerows(self.metrics)
            append(path, text.getvalue())
            self.metrics = []

    def _write_anew(self, path: Path, keys: list[str]) -> None:
        """Another header, above the rows that there are."""
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
    """Logs to Trackio, which keeps runs in a local database: `pip install "lit-async-rl[trackio]"`, `trackio show`.

    Args:
        project: name of the project.
        name: of the run; None is Trackio's choice.
        save_dir: folder of the database; None is Trackio's own, which `trackio show` opens. Another one is opened by
            `TRACKIO_DIR=<folder> trackio show`; a process has one.
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
        """The run of Trackio; begun at the first use.

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
            again = {"resume": "allow"} if self._has_begun else {}  # Lightning ends it after every fit and validation
            given = {"embed": False, "config": self._params, **self._settings, **again}
            self._run = trackio.init(project=self._project, name=self.run_name, **given)
            self.run_name = self._run.name
            self._has_begun = True
        return self._run

    def _choose_folder(self) -> None:
        """Trackio reads its folder when it is imported."""
        if self._save_dir is None:
            return
        before = os.environ.get("TRACKIO_DIR")
        wanted = str(Path(self._save_dir).absolute())
        if "trackio" in sys.modules and before != wanted:
            raise ValueError(f"TrackioLogger.save_dir={self._save_dir!r}, but this process already writes to {before}")
        os.environ["TRACKIO_DIR"] = wanted

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
        """Writes the rest."""
        if self._run is not None:
            with contextlib.redirect_stdout(sys.stderr):
                self._run.finish()
            self._run = None


# -- Tables, files and steps of any tracker ---------------------------------------------------------------------------


def step_in_trackers(trainer: AnyTrainer) -> int:
    """The step at which Lightning logs the metrics of the optimizer step that is running; counts from 0."""
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def log_validation(trainer: AnyTrainer, metrics: Mapping[str, float]) -> None:
    """Logs a validation within training at the number of optimizer steps before it.

    Lightning logs it a step earlier, unlike those before and after training.

    Args:
        trainer: that validates.
        metrics: by name.
    """
    is_behind_step = not trainer.fit_loop.epoch_loop._should_accumulate()
    step = step_in_trackers(trainer) + is_behind_step  # Lightning counts the step after its validation
    for logger in trainer.loggers:
        logger.log_metrics({**metrics, "epoch": trainer.current_epoch}, step=step)
        logger.save()


def log_table(logger: Logger, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
    """Adds a table to a tracker that has tables; `prompt`, `completion` and `reward` are text in TensorBoard."""
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
        places = [columns.index(column) for column in ("prompt", "completion", "reward")]
        lines = ("    {}{}   reward {:g}".format(*(row[place] for place in places)) for row in data)
        logger.experiment.add_text(name, "\n".join(lines), step)


def keeps_files(logger: Logger) -> bool:
    """Whether the tracker keeps files beside metrics."""
    return isinstance(logger, WandbLogger | MLFlowLogger | TrackioLogger)


def log_file(logger: Logger, path: Path, kind: str) -> None:
    """Uploads a file to a tracker that keeps files, as an artifact of this kind."""
    if isinstance(logger, WandbLogger):
        import wandb

        artifact = wandb.Artifact(f"{kind}-{logger.experiment.id}", type=kind)
        artifact.add_file(str(path))
        logger.experiment.log_artifact(artifact)
    elif isinstance(logger, MLFlowLogger):
        logger.experiment.log_artifact(logger.run_id, str(path))
    elif isinstance(logger, TrackioLogger):
        logger.experiment.log_artifact(str(path), name=re.sub(r"[^\w.-]+", "-", f"{kind}-{logger.version}"), type=kind)


# -- Folder, name and id of loggers that exist: Lightning has arguments of constructors for them, and no setters -------


def move_into_folder(logger: Logger, log: CSVLogger) -> None:
    """Lets TensorBoard or W&B, which have written nothing yet, write into the folder of a CSV log."""
    if isinstance(logger, WandbLogger):
        logger._save_dir = log.log_dir
        logger._wandb_init["dir"] = log.log_dir
    elif isinstance(logger, TensorBoardLogger):
        logger._root_dir = log.save_dir
        logger._name = log.name
        logger._version = log.version


def identify_wandb_run(logger: WandbLogger, *, name: str | None = None, run_id: str | None = None) -> None:
    """Sets the name or the id of a run of W&B that has not begun; None leaves them."""
    if name is not None:
        logger._name = name
        logger._wandb_init["name"] = name
    if run_id is not None:
        logger._id = run_id
        logger._wandb_init["id"] = run_id
