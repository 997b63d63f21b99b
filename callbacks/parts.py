"""Access to the run's `PolicyModule`, `RolloutDataModule` and folder, with errors that name the callback."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lit_async_rl.data.module import RolloutDataModule
from lit_async_rl.rollouts.totals import ProducerStats
from lit_async_rl.runtime.files import absolute
from lit_async_rl.training.module import PolicyModule
from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer


def policy_module(pl_module: AnyModule, owner: str) -> PolicyModule:
    """Returns the module as a `PolicyModule`, for the callback `owner`.

    Raises:
        ValueError: it is not a `PolicyModule`.
    """
    if not isinstance(pl_module, PolicyModule):
        raise ValueError(f"{owner} needs a PolicyModule as the LightningModule, got {type(pl_module).__name__}")
    return pl_module


def rollout_data(trainer: AnyTrainer, owner: str) -> RolloutDataModule:
    """Returns the trainer's `RolloutDataModule`, for the callback `owner`.

    Raises:
        ValueError: there is no data module, or it is not a `RolloutDataModule`.
    """
    data = trainer.datamodule
    if not isinstance(data, RolloutDataModule):
        got = "no data module" if data is None else type(data).__name__
        raise ValueError(f"{owner} needs a RolloutDataModule, got {got}")
    return data


def stats_of(trainer: AnyTrainer) -> ProducerStats | None:
    """Statistics of the run's rollouts so far; None on ranks without the producer, and with other data modules."""
    data = trainer.datamodule  # type: ignore[attr-defined]
    return data.stats() if isinstance(data, RolloutDataModule) else None


Found = TypeVar("Found")


def callbacks_of(trainer: AnyTrainer, kind: type[Found]) -> list[Found]:
    """The run's callbacks of a class, in their order."""
    return [one for one in trainer.callbacks if isinstance(one, kind)]  # type: ignore[attr-defined]


def run_folder(trainer: AnyTrainer) -> Path | None:
    """Folder of the run's files and checkpoints; None without a logger. A collective: all ranks call."""
    folder: str | None = None
    if trainer.loggers:
        logger = trainer.loggers[0]
        if isinstance(logger, CSVLogger | TensorBoardLogger):
            folder = logger.log_dir
        elif trainer.is_global_zero and logger.save_dir is not None:  # as `ModelCheckpoint` does
            version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
            folder = str(Path(logger.save_dir, str(logger.name), version))
        folder = trainer.strategy.broadcast(folder)  # loggers of other ranks are dummies without a folder
    return None if folder is None else Path(folder)


def own_log_dir(trainer: AnyTrainer) -> str | None:
    """Folder of the run's files on rank 0. No collective, unlike `run_folder`: other ranks may be gone."""
    logs = trainer.loggers if trainer.is_global_zero else []
    return next((log.log_dir for log in logs if isinstance(log, CSVLogger | TensorBoardLogger)), None)


def writing_folder(trainer: AnyTrainer) -> Path | None:
    """As `run_folder`, made absolute: user code may change the working folder before something is written."""
    folder = run_folder(trainer)
    return None if folder is None or "://" in str(folder) else absolute(folder)


def signs_of(trainer: AnyTrainer) -> dict[str, str]:
    """Signs of reward hacking that hold now, with the words for them; none without a `RewardHackingMonitor`."""
    found: dict[str, str] = {}
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        signs = getattr(callback, "signs", None)  # not by class: monitors import from here
        if isinstance(signs, dict):
            found |= signs
    return found
