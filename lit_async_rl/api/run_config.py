"""Settings of a run from Python as YAML, for trackers, and for comparing ranks."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sized
from typing import Any

import lightning.pytorch as pl
import torch
import yaml
from lightning.pytorch.loggers import CSVLogger

from lit_async_rl.callbacks.parts import run_folder
from lit_async_rl.runtime.files import replacing, tolerate_full_disk
from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer
from lit_async_rl.utils.object_config import as_config
from lit_async_rl.utils.secrets import concealed

CONFIG_FILE = "config.yaml"
LEADING_RANK_SETTINGS = (
    *("logger", "callbacks", "defaults", "plugins", "profiler", "enable_progress_bar", "enable_model_summary"),
    *("engine", "prompts", "reward", "limits"),
)
HEADER = """\
The settings of a run that began with lit_async_rl.fit, in the sections of the command line: what YAML can hold is
repeated by `lit-async-rl train --config THIS_FILE`."""
NAMED_HEADER = "These are objects of Python, which must be given again (they are left out below):"


class SaveSettings(pl.Callback):
    """Writes the settings of `fit` to `config.yaml` in the run's folder, and to trackers, once.

    Args:
        settings: given to `fit`, by section of the command line (`model`, `data`, `trainer`, `defaults`).
        ckpt_path: checkpoint to go on from.
    """

    def __init__(self, settings: Mapping[str, Mapping[str, Any]], ckpt_path: str | None) -> None:
        held, self._named = as_config(settings)  # now: callbacks change in a run
        self._settings = concealed({**_process_settings(), "ckpt_path": ckpt_path, **held})
        self._is_saved = False

    def setup(self, trainer: AnyTrainer, pl_module: AnyModule, stage: str) -> None:
        """Writes them on rank 0; nothing without a logger."""
        is_due = not self._is_saved
        self._is_saved = True
        if not is_due or not trainer.loggers or getattr(trainer, "fast_dev_run", False):
            return
        folder = run_folder(trainer)  # a collective: asked for on all ranks
        if not trainer.is_global_zero:
            return
        if folder is not None and "://" not in str(folder):
            with tolerate_full_disk(str(folder / CONFIG_FILE)):
                folder.mkdir(parents=True, exist_ok=True)
                with replacing(folder / CONFIG_FILE) as file:
                    file.write(as_yaml(self._settings, self._named).encode())
        for logger in trainer.loggers:
            if not isinstance(logger, CSVLogger):
                logger.log_hyperparams(_with_names(self._settings, self._named))


def as_yaml(settings: Mapping[str, Any], named: Mapping[str, str]) -> str:
    """The settings as YAML text, under comments that name what YAML cannot hold."""
    lines = HEADER.splitlines()
    if named:
        lines += [NAMED_HEADER, *(f"  {name}: {text}" for name, text in named.items())]
    head = "".join(f"# {line}\n" for line in lines)
    return head + yaml.safe_dump(dict(settings), sort_keys=False, allow_unicode=True, width=120)


def comparable(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Numbers and classes of objects by full name: what must be the same on all ranks.

    Texts (folders) may differ between machines, and so may what only the leading rank needs: `LEADING_RANK_SETTINGS`
    and lists.
    """
    found: dict[str, str] = {}
    for name, value in settings.items():
        if name in LEADING_RANK_SETTINGS:
            continue
        full = f"{prefix}{name}"
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        if isinstance(value, Mapping):
            found |= comparable(value, f"{full}.")
        elif value is None or isinstance(value, bool | int | float) or name == "class_path":
            found[full] = str(value)
        elif not isinstance(value, str | os.PathLike | Sized) and not callable(value):
            found[full] = type(value).__name__
    return found


def _process_settings() -> dict[str, Any]:
    """Settings of the whole process, which the command line sets."""
    seed = os.environ.get("PL_GLOBAL_SEED", "")  # of Lightning's `seed_everything`
    return {"seed_everything": int(seed) if seed.isdigit() else False, "num_threads": torch.get_num_threads()}


def _with_names(settings: Mapping[str, Any], named: Mapping[str, str]) -> dict[str, Any]:
    """The settings with descriptions in place of the objects that YAML cannot hold."""
    tree = {name: dict(value) if isinstance(value, Mapping) else value for name, value in settings.items()}
    for full, text in named.items():
        section, _, name = full.partition(".")
        tree.setdefault(section, {})[name] = text
    return tree
