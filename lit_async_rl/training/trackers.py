"""Tables and files for the trackers of a run: Weights & Biases, MLflow, TensorBoard and Trackio."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.logger import _convert_params, _flatten_dict
from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.logger import rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_only

from lit_async_rl.utils.lightning_types import AnyTrainer


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
        self._project, self.run_name, self._settings = project, name, settings or {}
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
            self.run_name, self._has_begun = self._run.name, True
        return self._run

    def _choose_folder(self) -> None:
        """Trackio reads its folder when it is imported."""
        if self._save_dir is None:
            return
        before, wanted = os.environ.get("TRACKIO_DIR"), str(Path(self._save_dir).absolute())
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
