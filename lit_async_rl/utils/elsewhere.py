"""Proxies of objects that work in another process, and objects that can be rebuilt there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class RemoteProxy:
    """Proxy of a reward or environment that works in another process.

    Attributes:
        original: the object itself, which gives the proxy its name and identity.
    """

    original: Any

    def prepare(self) -> None:
        """Starts the other process, and waits until it is ready."""


def original_of(value: Any) -> Any:
    """The original of a proxy; any other object itself."""
    return value.original if isinstance(value, RemoteProxy) else value


class Rebuildable:
    """Object with locks, threads or processes, pickled as its class and constructor arguments."""

    _arguments: tuple[tuple[Any, ...], dict[str, Any]]
    _once_made: Callable[[Any], None] | None = None  # called with the copy: what was set after construction

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Records the constructor arguments."""
        made = super().__new__(cls)
        made._arguments = (args, kwargs)
        return made

    def __reduce__(self) -> Any:
        return _remake, (type(self), *self._arguments, self._once_made)


def _remake(
    kind: type, args: tuple[Any, ...], settings: dict[str, Any], once_made: Callable[[Any], None] | None
) -> Any:
    made = kind(*args, **settings)
    if once_made is not None:
        once_made(made)
    return made
