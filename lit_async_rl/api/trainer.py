"""Lightning's Trainer with the default callbacks and settings of `configs/defaults.yaml`."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import pkgutil
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import yaml
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, ProgressBar, Timer
from lightning.pytorch.loggers import CSVLogger, Logger
from lightning.pytorch.utilities.model_helpers import is_overridden
from transformers.utils import logging as transformers_logging

import lit_async_rl
from lit_async_rl import rules
from lit_async_rl.api.precision import gpu_precision
from lit_async_rl.api.run_folders import gather_loggers
from lit_async_rl.callbacks import GradientClipping, LinkedCheckpoint, LiveView
from lit_async_rl.errors import describe
from lit_async_rl.training.checkpoint_io import BackgroundCheckpointIO
from lit_async_rl.utils.checks import check_range, meant
from lit_async_rl.utils.object_config import with_members

OF_THE_DEVICE = ("accelerator", "devices", "precision", "strategy", "num_nodes", "plugins")
TRAINER_SETTINGS = tuple(inspect.signature(pl.Trainer.__init__).parameters)[1:]


class Trainer(pl.Trainer):
    """A Lightning Trainer that synchronizes weights, monitors the run and saves checkpoints.

    The default callbacks stand in `configs/defaults.yaml`; one of the same class among `callbacks` replaces a default.
    Unless `logger=False`, a CSV log is written into the run's folder: TensorBoard's, or `runs/version_N` in another
    logger's `save_dir`. Checkpoints are written atomically, in the background; `plugins=[AtomicCheckpointIO()]` writes
    them while training waits. On a GPU the default precision is `bf16-mixed`, see `lit_async_rl.api.precision`.

    Example:
        ```python
        import lit_async_rl as rl

        trainer = rl.Trainer(
            max_steps=200,
            callbacks=[rl.GradientAlignmentControl(low=0.05, high=0.5)],
            defaults={"gradients": None, "samples": rl.SampleLogger(every_n_steps=5)},
            accelerator="cpu",
        )
        ```

    Args:
        callbacks: beside the defaults.
        defaults: callbacks by the key of the default that they replace; None switches it off.
        logger: one or several; None is a CSV log in `runs/`, False none.
        adds_csv_log: whether to write a CSV log besides other logs.
        **settings: of `lightning.pytorch.Trainer`.

    Raises:
        ValueError: Lightning refuses a setting, there is no default of that name, or two callbacks with state cannot
            be told apart.
        TypeError: the Trainer has no such setting.
    """

    def __init__(
        self,
        *,
        callbacks: Callback | Sequence[Callback] | None = None,
        defaults: Mapping[str, Callback | None] | None = None,
        logger: Logger | Iterable[Logger] | bool | None = None,
        adds_csv_log: bool = True,
        **settings: Any,
    ) -> None:
        quiet()
        for name in settings:
            if name not in TRAINER_SETTINGS:
                raise TypeError(f"Trainer has no setting {name!r}{meant(name, TRAINER_SETTINGS)}")
        settings = _with_defaults(settings)
        settings |= gpu_precision(settings)
        own: list[Any] = [] if callbacks is None else [callbacks]
        if isinstance(callbacks, Iterable) and not isinstance(callbacks, str):
            own = list(callbacks)
        for callback in own:
            if not isinstance(callback, Callback):
                hint = f": write {callback.__name__}(...)" if isinstance(callback, type) else ""
                raise ValueError(f"trainer.callbacks must hold callbacks, got {callback!r:.100}{hint}")
        if isinstance(logger, str | type | int) and not isinstance(logger, bool):
            raise ValueError(
                f"trainer.logger must be a logger such as CSVLog('runs'), True, False or None, got {logger!r}"
            )
        _check_limits(settings)
        rules.refuse(rules.of_callbacks(own), rules.of_limits(settings))
        own += default_callbacks(changed_defaults(defaults), own, {**settings, "logger": logger})
        if repeated := repeated_callback(own):
            raise ValueError(
                f"trainer.callbacks has {repeated} twice, but a checkpoint stores only one state for it: remove one"
            )
        for one in logger if isinstance(logger, Sequence) else [logger]:
            if isinstance(one, CSVLogger):  # which would make a folder of the name `~`; TensorBoard's does not
                one._save_dir = os.path.expanduser(one._save_dir)
        if logger is None or logger is True:
            logger = build(defaults_file()["trainer"]["logger"])
        try:
            super().__init__(callbacks=with_clipping_last(own), logger=logger, **settings)
        except (MisconfigurationException, ImportError, TypeError, ValueError) as error:
            raise ValueError(f"{_setting_in(str(error), settings)}: {_sentence(error)}") from error
        rules.refuse(rules.of_processes(self))
        if type(self.strategy.checkpoint_io) is TorchCheckpointIO:
            self.strategy.checkpoint_io = BackgroundCheckpointIO()
        if adds_csv_log:
            gather_loggers(self)


def _with_defaults(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The Trainer's settings over those of `configs/defaults.yaml`; validation steps are counted across epochs.

    Raises:
        ValueError: `val_check_interval` is 0.
    """
    interval = settings.get("val_check_interval")
    if interval is not None and not interval:
        raise ValueError(f"trainer.val_check_interval must be positive, got {interval}")
    given = {name: value for name, value in defaults_file()["trainer"].items() if name != "logger"} | dict(settings)
    # Lightning's default of 1, which the command line always gives, refuses an interval longer than the run: after the
    # first measurement of held-out accuracy, by minutes late. Counted across epochs, such a run validates at its end.
    if isinstance(interval, int) and given.get("check_val_every_n_epoch", 1) == 1:
        given["check_val_every_n_epoch"] = None
    return given


def _check_limits(settings: Mapping[str, Any]) -> None:
    """Refuses limits that Lightning takes, or about which it says less."""
    get = settings.get
    check_range("trainer", "integer >= -1", max_steps=get("max_steps"), max_epochs=get("max_epochs"))
    check_range("trainer", "integer >= -1", num_sanity_val_steps=get("num_sanity_val_steps"))
    check_range("trainer", "integer >= 0", min_steps=get("min_steps"), min_epochs=get("min_epochs"))
    check_range("trainer", "integer >= 0", log_every_n_steps=get("log_every_n_steps"))
    check_range("trainer", "integer >= 1", check_val_every_n_epoch=get("check_val_every_n_epoch"))
    check_range("trainer", ">= 0", gradient_clip_val=get("gradient_clip_val"))
    if (longest := get("max_time")) is not None:
        try:
            Timer(duration=longest)
        except (MisconfigurationException, TypeError, ValueError) as error:
            raise ValueError(f"trainer.max_time must be DD:HH:MM:SS, such as 00:12:00:00, got {longest!r}") from error


def _setting_in(text: str, settings: Mapping[str, Any]) -> str:
    """The setting, with its value, that Lightning's refusal names; device settings together."""
    for name in TRAINER_SETTINGS:
        if name not in OF_THE_DEVICE and settings.get(name) is not None and re.search(rf"\b{name}\b", text):
            return f"trainer.{name}={settings[name]!r}"
    chosen = ", ".join(f"{name}={settings.get(name)!r}" for name in OF_THE_DEVICE[:3])
    return f"trainer ({chosen})"


def repeated_callback(callbacks: Iterable[Callback]) -> str:
    """Class name of a callback with state whose `state_key` another has, too; empty if there is none."""
    seen = set[str]()
    for callback in callbacks:
        if is_overridden("state_dict", callback):
            if callback.state_key in seen:
                return type(callback).__name__
            seen.add(callback.state_key)
    return ""


def _sentence(error: Exception) -> str:
    return describe(error).removeprefix("MisconfigurationException: ").removeprefix("TypeError: ")


# -- Default callbacks and Trainer settings, read from `configs/defaults.yaml` ----------------------------------------


CONFIGS = Path(lit_async_rl.__file__).parent / "configs"
REPLACED_BY: dict[type[Callback], type[Callback]] = {
    LiveView: ProgressBar,  # a Trainer has one at most
    LinkedCheckpoint: ModelCheckpoint,
}
SWITCHES = {
    "logger": ["samples"],  # which are written to its folder
    "enable_progress_bar": ["progress"],
    "enable_checkpointing": ["checkpoint", "save_on_failure", "save_on_sigterm"],
}


@functools.cache
def defaults_file() -> Mapping[str, Any]:
    """The file's content: `trainer` has settings, `defaults` callbacks by key."""
    content: Mapping[str, Any] = yaml.safe_load((CONFIGS / "defaults.yaml").read_text())
    return content


def build(spec: Mapping[str, Any]) -> Any:
    """An object from its `class_path`, a public class of this package or of Lightning, and `init_args`.

    Enum members are given by name where the default is a member.
    """
    kind = pkgutil.resolve_name(full_path(spec["class_path"]))
    return kind(**with_members(kind, spec.get("init_args", {})))


def full_path(name: str) -> str:
    """Dotted path of a class that may be named without one."""
    if "." in name:
        return name
    return f"{'lit_async_rl' if name in lit_async_rl.NAMES else 'lightning.pytorch.callbacks'}.{name}"


def changed_defaults(given: Any) -> Mapping[str, Any]:
    """`defaults` as given; None changes none.

    Raises:
        ValueError: it is no mapping.
    """
    if not isinstance(given, Mapping | None):
        raise ValueError(f"defaults must be a mapping from keys to callbacks, got {given!r:.100}")
    return given or {}


def default_callbacks(
    changed: Mapping[str, Callback | None], own: Sequence[Callback], settings: Mapping[str, Any]
) -> list[Callback]:
    """The default callbacks of one run.

    Args:
        changed: callbacks by key of the default that they replace; None switches it off.
        own: callbacks beside them; one of the same class replaces a default.
        settings: of the Trainer; False for `logger`, `enable_progress_bar` or `enable_checkpointing` removes its
            callbacks.

    Raises:
        ValueError: there is no such key, or its value is no callback.
    """
    specs = defaults_file()["defaults"]
    for key, callback in changed.items():
        if key not in specs:
            raise ValueError(f"defaults has no {key!r}{meant(key, specs)} (there are {', '.join(specs)})")
        if callback is not None and not isinstance(callback, Callback):
            raise ValueError(f"defaults[{key!r}] must be a callback or None, got {callback!r}")
    off = {key for switch, keys in SWITCHES.items() if settings.get(switch) is False for key in keys}
    chosen = [changed[key] if key in changed else specs[key] and build(specs[key]) for key in specs if key not in off]
    made = [callback for callback in chosen if callback is not None]
    return [c for c in made if not any(isinstance(one, REPLACED_BY.get(type(c), type(c))) for one in own)]


def with_clipping_last(callbacks: Sequence[Callback]) -> list[Callback]:
    """Callbacks with clipping last, behind those that files append and the defaults."""
    return sorted(callbacks, key=lambda callback: isinstance(callback, GradientClipping))


# -- Messages of libraries that say nothing to the user ---------------------------------------------------------------


IRRELEVANT_WARNINGS = (
    ".*treespec.*",
    ".*does not have many workers.*",
    ".*in eval mode at the start of training.*",
    ".*Total length of `list` across ranks is zero.*",  # there are no held-out prompts
    ".*The dirpath has changed.*",
    ".*Checkpoint directory .* exists and is not empty.*",  # `api.run_folders` reports it for the run's folder
    ".*your dataloader is not resumable.*",
    ".*sync_dist=True.*",  # held-out accuracy is reduced over ranks already
    ".*method of metric .* was called before the ``update`` method.*",  # a rank without held-out prompts
    ".*`weights_only`.*",
    ".*MLFlow only allows.*",  # the @ of pass@1
    ".*weights_only=.*",
)


IRRELEVANT_LOG_MESSAGES = (
    "💡",
    "`weights_only` was not set",
    "TPU available: False",
    "`Trainer.fit` stopped: `max_steps=",  # twice, and the summary has it
    "Restoring states from the checkpoint",  # twice; `resumed: ...` and the summary have it
    "Restored all states from the checkpoint",
    "Loaded model weights from the checkpoint",
)


def quiet() -> None:
    """Keeps messages about internals out of the user's terminal."""
    _filter_log()
    transformers_logging.disable_progress_bar()
    for message in IRRELEVANT_WARNINGS:
        warnings.filterwarnings("ignore", message=message)


@functools.cache  # once: filters add up
def _filter_log() -> None:
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.rank_zero"):
        logging.getLogger(name).addFilter(_is_relevant)


def _is_relevant(record: logging.LogRecord) -> bool:
    return not any(part in record.getMessage() for part in IRRELEVANT_LOG_MESSAGES)
