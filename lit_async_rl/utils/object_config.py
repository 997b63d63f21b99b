"""Objects as `class_path` and `init_args`, which YAML and checkpoints can hold, and back."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import os
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sized
from functools import partial
from typing import Any

from torch import nn

from lit_async_rl.utils.secrets import SECRET_NAME

PACKAGE_PREFIX = "lit_async_rl."
PLAIN_TYPES = (bool, int, float, str)


def as_config(settings: Mapping[str, Mapping[str, Any]]) -> tuple[dict[str, Any], dict[str, str]]:
    """(settings that YAML can hold, descriptions of the others by their full name).

    An object of this package is written as `class_path` and `init_args` if it keeps all arguments under their names;
    functions and classes by an importable dotted path. All else is described.
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
        # the command line makes a partial of a parser function; its last argument is the class
        kind = value.args[-1] if value.args else value.func
        if not isinstance(kind, type):
            raise _NotPlainError
        return _with_class(kind, {name: _plain(item) for name, item in value.keywords.items()})
    return _class_path(value)


def _dotted_path(value: Callable[..., Any]) -> str:
    """Path by which any program can import a function or class; the running script's have none."""
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
    """The class of an object, or its first base if that class is private."""
    for kind in type(value).__mro__[:2]:
        if kind.__module__.startswith(PACKAGE_PREFIX) and not kind.__name__.startswith("_"):
            return kind
    raise _NotPlainError


def _with_class(kind: type, arguments: Mapping[str, Any]) -> dict[str, Any]:
    if any(SECRET_NAME.search(name) and isinstance(value, str) for name, value in arguments.items()):
        raise _NotPlainError  # trackers may be public
    path = _dotted_path(kind)
    return {"class_path": path, "init_args": dict(arguments)} if arguments else {"class_path": path}


# -- Back to objects --------------------------------------------------------------------------------------------------


MADE_FROM = (PACKAGE_PREFIX, "torch.optim.")  # a checkpoint names classes, and no others are called
CALLED_LATER = ("optimizer", "scheduler")  # torch classes, called later with parameters or optimizer


def as_objects(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with an object for each `class_path` of this package, or a partial of a torch optimizer.

    Raises:
        ValueError: a class is of another package, or there is none of this name.
    """
    return {name: _as_object(value, name) for name, value in settings.items()}


def _as_object(value: Any, name: str) -> Any:
    is_class = isinstance(value, str) and value.startswith(MADE_FROM)
    if is_class and name in CALLED_LATER:
        return _class(value, name)
    if isinstance(value, list):
        return [_as_object(item, name) for item in value]
    if not isinstance(value, Mapping):
        return value
    if "class_path" not in value:
        return as_objects(value)
    kind = _class(str(value["class_path"]), name)
    arguments = with_members(kind, as_objects(value.get("init_args") or {}))
    is_torchs = kind.__module__.startswith("torch.")
    return partial(kind, **arguments) if is_torchs else kind(**arguments)


def with_members(kind: type, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a class, with the member of an enum for its name where the default is a member."""
    found = dict(arguments)
    for name, parameter in inspect.signature(kind).parameters.items():
        if isinstance(parameter.default, enum.Enum) and isinstance(found.get(name), str):
            found[name] = type(parameter.default)[found[name]]
    return found


def _class(path: str, name: str) -> type:
    problem = f"{name}={path!r} is not a class of this package or of torch.optim: give {name} itself"
    if not path.startswith(MADE_FROM):
        raise ValueError(problem)
    try:
        found = pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError):
        raise ValueError(problem) from None
    if not isinstance(found, type):
        raise ValueError(problem)
    return found
