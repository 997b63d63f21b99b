"""Ranks that a cluster places: input of each, and results for the process that started the run."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from lit_async_rl.api.cluster import Place
from lit_async_rl.callbacks.run.save_on_sigterm import checkpoint_folder
from lit_async_rl.training.checkpoint_io import check_checkpoint
from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer

log = logging.getLogger(__name__)


class TellFolder(pl.Callback):
    """Tells the process that started the ranks where checkpoints are, for a start after a failure."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def on_fit_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        folder = checkpoint_folder(trainer)  # a collective: asked for on all ranks
        if trainer.is_global_zero:
            self._place.tell_folder(str(folder.absolute()))


def placed_flags(place: Place) -> list[str]:
    """Options of the command line that a rank adds."""
    flags = ["--trainer.devices", str(place.num_local), "--trainer.num_nodes", str(place.num_nodes)]
    return flags if place.resume_from is None else [*flags, "--ckpt_path", place.resume_from]


def placed_settings(place: Place | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The Trainer's settings in a rank."""
    if place is None:
        return dict(settings)
    return {**settings, "devices": place.num_local, "num_nodes": place.num_nodes}


def metrics_of(trainer: pl.Trainer) -> dict[str, float]:
    """Last logged values, as plain data."""
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def load_trained(module: pl.LightningModule, folder: str | None) -> None:
    """Loads a run's last checkpoint, if it is a single file, into a module of this process."""
    path = None if folder is None else Path(folder) / "last.ckpt"
    if path is None or not path.is_file():
        log.warning(
            "`fit` returns the module with its initial weights, because the run saved no last.ckpt, or saved it as a "
            "folder (sharded)"
        )
        return
    check_checkpoint(str(path))
    checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    module.on_load_checkpoint(checkpoint)
    module.load_state_dict(checkpoint["state_dict"], strict=module.strict_loading)


def uses_gpus(accelerator: Any) -> bool:
    """Whether a Trainer with this accelerator may compute on GPUs."""
    return accelerator in (None, "auto", "gpu", "cuda") or (accelerator != "cpu" and not isinstance(accelerator, str))
