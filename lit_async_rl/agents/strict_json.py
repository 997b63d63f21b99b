"""JSON that every reader takes: Python's own parser and writer also take NaN, Infinity and half surrogate pairs."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

MAX_DEPTH = 100  # of values that come as they are: Python writes and reads no more than some hundred levels


def is_too_deep(value: Any) -> bool:
    """Whether JSON has more than `MAX_DEPTH` levels, found without recursion, which deep JSON would exhaust."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        inner = [one for one in level if isinstance(one, (dict, list, tuple))]
        level = [part for one in inner for part in (one.values() if isinstance(one, dict) else one)]
    return bool(level)


def refuse_constant(name: str) -> Any:
    """Refuses NaN and Infinity, which Python's parser takes for JSON."""
    raise ValueError(f"{name} is not JSON")


def checked_json(value: Any, default: Callable[[Any], str] | None = None) -> str:
    """The JSON of a value.

    Args:
        value: to write.
        default: writes what JSON has no form for; None refuses it.

    Raises:
        TypeError: it has a value that JSON has no form for.
        ValueError: it has a number that is not finite or half a surrogate pair, or is nested too deeply.
    """
    try:
        written = json.dumps(value, ensure_ascii=False, allow_nan=False, default=default)
        written.encode()
    except UnicodeEncodeError:
        raise ValueError("it has half a surrogate pair, which is not text") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return written


def read_object(text: str) -> dict[str, Any]:
    """The object that JSON has.

    Raises:
        ValueError: it is none, or `checked_json` refuses it.
    """
    try:
        value = json.loads(text, parse_constant=refuse_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    checked_json(value)  # `1e999` is infinite, and an escape may be half a surrogate pair
    return value
