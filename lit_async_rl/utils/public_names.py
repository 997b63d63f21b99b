"""Public names of packages, imported when they are first used."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import lazy_loader

PACKAGE = "lit_async_rl"


def attach(
    package: str, file: str, *, moved: Sequence[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`lazy_loader.attach_stub`, which also finds what has moved beside the core.

    Args:
        package: `__name__` of the package.
        file: its `__file__`, beside which the stub lies.
        moved: names that are now public in `lit_async_rl` only.

    Returns:
        `__getattr__`, `__dir__` and `__all__` of the package.
    """
    found, directory, names = lazy_loader.attach_stub(package, file)

    def __getattr__(name: str) -> Any:
        if name not in moved:
            return found(name)
        import lit_async_rl

        return getattr(lit_async_rl, name)

    return __getattr__, directory, names


def public(name: str) -> Any:
    """A public name of `lit_async_rl`; None if the part of the package that has it is absent."""
    import lit_async_rl

    return _or_none(lambda: getattr(lit_async_rl, name))


def part(module: str) -> Any:
    """A module of a part beside the core, such as `report.html`; None if that part is absent."""
    return _or_none(lambda: importlib.import_module(f"{PACKAGE}.{module}"))


def _or_none(find: Callable[[], Any]) -> Any:
    try:
        return find()
    except ModuleNotFoundError as error:
        if (error.name or "").startswith(f"{PACKAGE}."):  # not of a library, which a part of this package needs
            return None
        raise
