"""One folder for one run: whatever the logger, metrics, samples, checkpoints and settings lie in the CSV log's."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import yaml
from jsonargparse import Namespace
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger

from lit_async_rl.api.loggers import go_on_in_folder
from lit_async_rl.cli.config_words import config_files
from lit_async_rl.training.csv_logger import CSVLog
from lit_async_rl.training.trackers import TrackioLogger
from lit_async_rl.utils.lightning_types import AnyTrainer


def gather_loggers(trainer: AnyTrainer, args: Sequence[str], seed: Any, ckpt_path: str | None) -> None:
    """Puts a CSV log before all other loggers, and what they write into its folder.

    Args:
        trainer: that has not run yet.
        args: of the command line; files of `--config` name the run.
        seed: of the run.
        ckpt_path: checkpoint to go on from, see `go_on_in_folder`.
    """
    if not trainer.loggers or getattr(trainer, "fast_dev_run", False):
        return
    given, name = list(trainer.loggers), run_name(args)
    found = next((logger for logger in given if isinstance(logger, CSVLogger)), None)
    log = found or CSVLog(given[0].save_dir or "runs", name)
    go_on_in_folder(trainer, log, ckpt_path)
    for logger in given:
        if isinstance(logger, WandbLogger):
            logger._save_dir = logger._wandb_init["dir"] = log.log_dir
            logger._wandb_init.pop("anonymous", None)  # W&B warns of it, whatever it is
            if not _is_named(args):
                logger._name = logger._wandb_init["name"] = f"{name}, seed {seed}"
        elif isinstance(logger, TrackioLogger):
            logger.run_name = logger.run_name or f"{name}, seed {seed}, {log.version}"
        elif isinstance(logger, TensorBoardLogger):
            logger._root_dir, logger._name, logger._version = log.save_dir, log.name, log.version
    trainer.loggers = [log, *(logger for logger in given if logger is not log)]


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
    """Entries of `trainer.logger` in files and flags: classes, alone or in lists, and settings of the class before."""
    files = [yaml.safe_load(file.read_text()).get("trainer") or {} for file in config_files(args)]
    for trainer in [*files, *_flags(args)]:
        for given in (trainer.get("logger"), trainer.get("logger+")):
            for one in given if isinstance(given, list) else [given]:
                if isinstance(one, (dict, str)):
                    yield one if isinstance(one, dict) else {"class_path": one}


def _flags(args: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The values of `--trainer.logger VALUE` and the like, as in a file."""
    for word, following in zip(args, [*args[1:], ""], strict=True):
        flag, has_value, value = word.partition("=")
        if flag in ("--trainer.logger", "--trainer.logger+"):
            yield {flag.removeprefix("--trainer."): yaml.safe_load(value if has_value else following)}


class SaveConfig(SaveConfigCallback):
    """Writes all settings to `config.yaml` in the run's folder, and to other loggers; nothing without a logger."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if trainer.loggers and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            super().setup(trainer, pl_module, stage)

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Called once, on rank 0."""
        others = [logger for logger in trainer.loggers if not isinstance(logger, CSVLogger)]
        if not others:
            return  # writing out all settings takes a while
        settings = json.loads(self.parser.dump(Namespace(self.config), format="json", skip_none=False))
        for logger in others:
            logger.log_hyperparams(settings)
