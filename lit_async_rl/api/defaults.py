"""Default callbacks and Trainer settings, read from `configs/defaults.yaml`."""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, ProgressBar

import lit_async_rl
from lit_async_rl.callbacks import GradientClipping, LinkedCheckpoint, Progress
from lit_async_rl.utils.suggestions import meant

FILE = Path(lit_async_rl.__file__).parent / "configs" / "defaults.yaml"
REPLACED_BY: dict[type[Callback], type[Callback]] = {
    Progress: ProgressBar,  # a Trainer has one at most
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
    content: Mapping[str, Any] = yaml.safe_load(FILE.read_text())
    return content


def build(spec: Mapping[str, Any]) -> Any:
    """An object from its `class_path`, a public class of this package or of Lightning, and `init_args`."""
    return pkgutil.resolve_name(full_path(spec["class_path"]))(**spec.get("init_args", {}))


def full_path(name: str) -> str:
    """Dotted path of a class that may be named without one."""
    if "." in name:
        return name
    return f"{'lit_async_rl' if name in lit_async_rl.__all__ else 'lightning.pytorch.callbacks'}.{name}"


def default_callbacks(
    changed: Mapping[str, Callback | None], own: Sequence[Callback], settings: Mapping[str, Any]
) -> list[Callback]:
    """The default callbacks of one run.

    Args:
        changed: other callbacks by key of the default whose place they take; None switches it off.
        own: callbacks beside them; one of the same class as a default takes its place.
        settings: of the Trainer; False for `logger`, `enable_progress_bar` or `enable_checkpointing` takes its
            callbacks along.

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
    return [c for c in chosen if c is not None and not any(_replaces(one, c) for one in own)]


def _replaces(own: Callback, default: Callback) -> bool:
    return isinstance(own, REPLACED_BY.get(type(default), type(default)))


def in_order(callbacks: Sequence[Callback]) -> list[Callback]:
    """With clipping after all others: a list that files append to, and the defaults after them, has no last place."""
    return sorted(callbacks, key=lambda callback: isinstance(callback, GradientClipping))
