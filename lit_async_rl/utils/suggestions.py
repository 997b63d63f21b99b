"""Suggestions for misspelt names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def closest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name that is most like this one, or None; letter case does not matter.

    Args:
        name: as it was typed.
        known: names that exist.
        cutoff: least similarity, between 0 and 1 (see `difflib.get_close_matches`).
    """
    by_name = {one.lower(): one for one in known}
    found = difflib.get_close_matches(name.lower(), by_name, n=1, cutoff=cutoff)
    return by_name[found[0]] if found else None


def meant(name: str, known: Iterable[str]) -> str:
    """`; did you mean ...?` where a known name is close, else nothing."""
    close = closest(name, known)
    return f"; did you mean {close}?" if close else ""
