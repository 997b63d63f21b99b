"""The settings of a run that began in Python, as YAML, for trackers, and for comparing ranks."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import os
import pkgutil
import re
from collections.abc import Callable, Iterator, Mapping, Sized
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import yaml
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from lit_async_rl.callbacks.parts import run_folder
from lit_async_rl.utils.files import replacing, tolerate_full_disk
from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer

CONFIG_FILE = "config.yaml"
PACKAGE_PREFIX = "lit_async_rl."
PLAIN_TYPES = (bool, int, float, str)
LEADING_RANK_SETTINGS = (
    *("logger", "callbacks", "defaults", "plugins", "profiler", "enable_progress_bar", "enable_model_summary"),
    *("engine", "prompts", "reward", "limits"),
)
SECRET_NAME = re.compile(r"(?i)(api_?key|token|secret|password)$")
HEADER = """\
The settings of a run that began with lit_async_rl.fit, in the sections of the command line: what YAML can hold is
repeated by `lit-async-rl train --config THIS_FILE`."""
NAMED_HEADER = "These are objects of Python, which must be given again (they are left out below):"


class SaveSettings(pl.Callback):
    """Writes the settings of a run of `fit` to `config.yaml` in the run's folder, and to trackers, once.

    Args:
        settings: given to `fit`, by section of the command line (`model`, `data`, `trainer`, `defaults`).
        ckpt_path: checkpoint to go on from.
    """

    def __init__(self, settings: Mapping[str, Mapping[str, Any]], ckpt_path: str | None) -> None:
        held, self._named = as_config(settings)  # now: callbacks change in a run
        self._settings = {**_process_settings(), "ckpt_path": ckpt_path, **held}
        self._is_saved = False

    def setup(self, trainer: AnyTrainer, pl_module: AnyModule, stage: str) -> None:
        """Writes them when the loggers have begun, on rank 0; nothing without a logger."""
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


def as_config(settings: Mapping[str, Mapping[str, Any]]) -> tuple[dict[str, Any], dict[str, str]]:
    """(settings that YAML can hold, descriptions of the others by their full name).

    An object of this package is written as `class_path` and `init_args` if it keeps all of its arguments under their
    names; functions and classes by their dotted path, if they can be imported by it. All else is described.
    """
    named: dict[str, str] = {}
    held = {section: _held(dict(given), section, named) for section, given in settings.items()}
    return {section: found for section, found in held.items() if found}, named


def _held(value: Any, name: str, named: dict[str, str]) -> Any:
    """The part of a value that YAML can hold; the rest is added to `named`, and left out.

    Raises:
        _NotPlainError: nothing of it can be held.
    """
    if isinstance(value, Mapping):
        parts = [(str(key), item) for key, item in value.items()]
        return dict(_parts(parts, f"{name}.", named))
    if name.endswith("callbacks") and isinstance(value, list | tuple):
        return [item for _, item in _parts([(f"[{n}]", item) for n, item in enumerate(value)], name, named)]
    if dataclasses.is_dataclass(value) and type(value).__module__.startswith(PACKAGE_PREFIX):
        fields = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value) if field.init]
        return _with_class(type(value), dict(_parts(fields, f"{name}.", named)))
    if name.endswith("prompts") and isinstance(value, list | tuple):  # data, and no setting
        raise _NotPlainError
    return _plain(value)


def _parts(parts: list[tuple[str, Any]], prefix: str, named: dict[str, str]) -> Iterator[tuple[str, Any]]:
    for key, item in parts:
        try:
            yield key, _held(item, f"{prefix}{key}", named)
        except _NotPlainError:
            named[f"{prefix}{key}"] = describe_object(item)


def comparable(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Numbers, and the classes of objects, by their full names: what must be the same on all ranks of a run.

    Texts may differ between machines (folders), and so may what only the leading rank needs: `LEADING_RANK_SETTINGS`
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


def describe_object(value: Any) -> str:
    """Describes an object in one line, by its type and source."""
    if isinstance(value, partial):
        return f"partial of {describe_object(value.func)}"
    if inspect.isroutine(value) or isinstance(value, type):
        kind = "class" if isinstance(value, type) else "function"
        text = f"{kind} {getattr(value, '__qualname__', value)} of {getattr(value, '__module__', '?')}"
        code = getattr(value, "__code__", None)
        return text if code is None else f"{text} ({code.co_filename}, line {code.co_firstlineno})"
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    if isinstance(value, list | tuple) and value and not all(isinstance(item, dict | str) for item in value):
        return f"{kind} of {', '.join(describe_object(item) for item in value)}"
    try:
        return f"{kind} of {len(value)} items" if isinstance(value, Sized) else kind
    except TypeError:  # `__len__` is there and not implemented
        return kind


def _process_settings() -> dict[str, Any]:
    """Settings of the whole process: the command line sets them, and a run from Python reads them."""
    seed = os.environ.get("PL_GLOBAL_SEED", "")  # of Lightning's `seed_everything`
    return {"seed_everything": int(seed) if seed.isdigit() else False, "num_threads": torch.get_num_threads()}


def _with_names(settings: Mapping[str, Any], named: Mapping[str, str]) -> dict[str, Any]:
    """The settings with descriptions in place of the objects that YAML cannot hold."""
    tree = {name: dict(value) if isinstance(value, Mapping) else value for name, value in settings.items()}
    for full, text in named.items():
        section, _, name = full.partition(".")
        tree.setdefault(section, {})[name] = text
    return tree


class _NotPlainError(Exception):
    """A value that YAML cannot hold."""


MAX_LIST_ITEMS = 100  # a longer list is data, and no setting


def _plain(value: Any) -> Any:
    """Converts a value to types that YAML holds.

    Raises:
        _NotPlainError: it cannot be held.
    """
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or type(value) in PLAIN_TYPES:
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, bool | int | float | str):  # of a subclass, such as NumPy's float64
        return next(kind(value) for kind in PLAIN_TYPES if isinstance(value, kind))
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise _NotPlainError
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        if len(value) > MAX_LIST_ITEMS or any(isinstance(item, Mapping) for item in value):
            raise _NotPlainError
        return [_plain(item) for item in value]
    if inspect.isroutine(value) or isinstance(value, type):
        return _dotted_path(value)
    if isinstance(value, nn.Module):
        raise _NotPlainError
    if isinstance(value, partial):
        if value.args or not isinstance(value.func, type):
            raise _NotPlainError
        return _with_class(value.func, {name: _plain(item) for name, item in value.keywords.items()})
    return _class_path(value)


def _dotted_path(value: Callable[..., Any]) -> str:
    """Path by which any program can import a function or class; those of the running script have none."""
    module = getattr(value, "__module__", None)
    name = getattr(value, "__qualname__", "")
    path = f"{module}.{name}"
    if module in (None, "__main__", "builtins"):
        raise _NotPlainError
    try:
        is_there = pkgutil.resolve_name(path) is value
    except (ImportError, AttributeError, ValueError):
        raise _NotPlainError from None
    if not is_there:
        raise _NotPlainError
    return path


def _class_path(value: Any) -> dict[str, Any]:
    """`class_path` and `init_args` of an object of this package."""
    kind: Any = _public_class(value)
    if hasattr(value, "_made_with"):  # engines keep the arguments that they were made with
        args, kwargs = value._made_with
        bound = inspect.signature(kind.__init__).bind(value, *args, **kwargs)
        bound.apply_defaults()
        given = dict(list(bound.arguments.items())[1:])
        for rest in inspect.signature(kind.__init__).parameters.values():
            if rest.kind is rest.VAR_KEYWORD:  # such as `VLLMReplicas(**settings)`: those of the class that it extends
                extended = inspect.signature(kind.__mro__[1].__init__).parameters.values()
                defaults = {one.name: one.default for one in extended if one.default is not one.empty}
                given = defaults | given.pop(rest.name) | given
        return _with_class(kind, {name: _plain(item) for name, item in given.items()})
    if kind.__init__ is object.__init__:
        return _with_class(kind, {})
    arguments = {}
    for name, parameter in list(inspect.signature(kind.__init__).parameters.items())[1:]:
        found = vars(value).get(name, vars(value).get(f"_{name}", value))
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or found is value:
            raise _NotPlainError
        arguments[name] = _plain(found)
    return _with_class(kind, arguments)


def _public_class(value: Any) -> type:
    """The class of an object, or its first base where that class is private."""
    for kind in type(value).__mro__:
        if kind.__module__.startswith(PACKAGE_PREFIX) and not kind.__name__.startswith("_"):
            _dotted_path(kind)
            return kind
        if kind is not type(value).__mro__[0]:
            break
    raise _NotPlainError


def _with_class(kind: type, arguments: Mapping[str, Any]) -> dict[str, Any]:
    if any(SECRET_NAME.search(name) and isinstance(value, str) for name, value in arguments.items()):
        raise _NotPlainError  # trackers may be public
    path = _dotted_path(kind)
    return {"class_path": path, "init_args": dict(arguments)} if arguments else {"class_path": path}
