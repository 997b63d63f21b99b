"""One folder for one run: whatever the logger, metrics, samples, checkpoints and settings lie in the CSV log's."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import Namespace
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger

from lit_async_rl.api.run_folders import WANDB_ID
from lit_async_rl.cli.config_check import config_files
from lit_async_rl.training.csv_logger import CSVLog
from lit_async_rl.training.trackers import TrackioLogger
from lit_async_rl.utils.lightning_types import AnyTrainer


def gather_loggers(trainer: AnyTrainer, args: Sequence[str], seed: Any, ckpt_path: str | None) -> None:
    """Puts a CSV log before all other loggers, and what they write into its folder.

    A run that goes on from a checkpoint goes on in the folder of the run that saved it, if the logger's settings place
    it beside that one.

    Args:
        trainer: that has not run yet.
        args: of the command line; files of `--config` name the run.
        seed: of the run.
        ckpt_path: checkpoint to go on from.
    """
    if not trainer.loggers or getattr(trainer, "fast_dev_run", False):
        return
    given, name = list(trainer.loggers), run_name(args)
    found = next((logger for logger in given if isinstance(logger, CSVLogger)), None)
    log = found or CSVLog(given[0].save_dir or "runs", name)
    if goes_on := ckpt_path is not None and _goes_on(log, Path(ckpt_path)):
        _overwrite_checkpoints(trainer)
    for logger in given:
        if isinstance(logger, WandbLogger):
            logger._save_dir = logger._wandb_init["dir"] = log.log_dir
            logger._wandb_init.pop("anonymous", None)  # W&B warns of it, whatever it is
            if trainer.is_global_zero:
                _remember_wandb_run(logger, Path(log.log_dir, WANDB_ID), goes_on)
            if not _is_named(args):
                logger._name = logger._wandb_init["name"] = f"{name}, seed {seed}"
        elif isinstance(logger, TrackioLogger):
            logger.run_name = logger.run_name or f"{name}, seed {seed}, {log.version}"
        elif isinstance(logger, TensorBoardLogger):
            logger._root_dir, logger._name, logger._version = log.save_dir, log.name, log.version
    trainer.loggers = [log, *(logger for logger in given if logger is not log)]


def _remember_wandb_run(logger: WandbLogger, file: Path, goes_on: bool) -> None:
    """Gives a W&B run an id of its own, or that of the run that it goes on with."""
    known = file.read_text().strip() if goes_on and file.is_file() else ""
    from wandb.sdk.lib.runid import generate_id  # costs a second, and only such a run needs it

    logger._id = logger._wandb_init["id"] = known or logger._id or generate_id()
    with contextlib.suppress(OSError):  # said by what writes there
        file.write_text(f"{logger._id}\n")


def run_name(args: Sequence[str]) -> str:
    """Names of the configuration files, but those of loggers."""
    files = [file for file in config_files(args) if file.parent.name != "loggers"]
    return "-".join(dict.fromkeys(file.stem for file in files)) or "run"


def _is_named(args: Sequence[str]) -> bool:
    """Whether a name was chosen for W&B's logger, and not left over from another logger, whose place it took."""
    if any(re.match(r"--trainer\.logger(\.init_args)?\.name\b", word) for word in args):
        return True
    kind = ""  # that settings without a class are for
    for chosen in _chosen_loggers(args):
        kind = str(chosen.get("class_path", kind))
        if "Wandb" in kind and "name" in {**chosen, **(chosen.get("init_args") or {})}:
            return True
    return False


def _chosen_loggers(args: Sequence[str]) -> Iterator[dict[str, Any]]:
    """What the files say of `trainer.logger`: classes, alone or in lists, and settings of the class before."""
    for file in config_files(args):
        trainer = yaml.safe_load(file.read_text()).get("trainer") or {}
        for given in (trainer.get("logger"), trainer.get("logger+")):
            for one in given if isinstance(given, list) else [given]:
                if isinstance(one, (dict, str)):
                    yield one if isinstance(one, dict) else {"class_path": one}


def _goes_on(log: CSVLogger, checkpoint: Path) -> bool:
    folder = checkpoint.parent.parent
    is_beside = folder.parent.resolve() == Path(log.root_dir).resolve()
    if log._version is not None or checkpoint.parent.name != "checkpoints" or not is_beside:
        return False
    match = re.fullmatch(r"version_(\d+)", folder.name)
    log._version = int(match[1]) if match else folder.name
    return True


def _overwrite_checkpoints(trainer: AnyTrainer) -> None:
    """Later checkpoints of the run that is gone on with give way, as rows of its tables do, and not to `last-v1`."""
    for callback in trainer.callbacks:  # type: ignore[union-attr]
        if isinstance(callback, ModelCheckpoint) and callback.dirpath is None:
            callback._enable_version_counter = False


class SaveConfig(SaveConfigCallback):
    """Writes all settings to `config.yaml` in the run's folder, and to other loggers; nothing without a logger."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if trainer.loggers and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            super().setup(trainer, pl_module, stage)

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Called once, on rank 0."""
        settings = json.loads(self.parser.dump(Namespace(self.config), format="json", skip_none=False))
        for logger in trainer.loggers:
            if not isinstance(logger, CSVLogger):
                logger.log_hyperparams(settings)
