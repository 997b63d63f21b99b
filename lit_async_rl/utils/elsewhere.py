"""Objects that work in another process: what stands for them here, and how they are made again there."""

from __future__ import annotations

from typing import Any


class Elsewhere:
    """Stands for a reward or environment that works in another process.

    Attributes:
        original: that object, which names and identifies what stands for it.
    """

    original: Any

    def prepare(self) -> None:
        """Starts what it works in, and waits for that."""


def original_of(value: Any) -> Any:
    """The object that another stands for; any other object is itself."""
    return value.original if isinstance(value, Elsewhere) else value


class Remade:
    """An object with locks, threads or processes, which is pickled as its class and constructor's arguments."""

    _arguments: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Keeps the constructor's arguments."""
        made = super().__new__(cls)
        made._arguments = (args, kwargs)
        return made

    def __reduce__(self) -> Any:
        return _remake, (type(self), *self._arguments)


def _remake(kind: type, args: tuple[Any, ...], settings: dict[str, Any]) -> Any:
    return kind(*args, **settings)
