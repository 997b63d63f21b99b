"""Values of records and settings: what a checkpoint can hold, and empty cells of tables."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

import numpy as np


def plain(value: Any) -> Any:
    """Converts a value, with its items, to Python's containers, numbers and strings; other types become strings.

    Checkpoints hold nothing else: loading them executes no code.
    """
    if isinstance(value, (np.ndarray, np.generic)):
        value = value.tolist()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, (Integral, Real)):
        return int(value) if isinstance(value, Integral) else float(value)
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return str(value)


def as_lists(value: Any) -> Any:
    """Converts NumPy arrays to lists, also within lists and dictionaries.

    A DataFrame has arrays for lists, also after `to_dict("records")`.
    """
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, list):
        return [as_lists(item) for item in value]
    if isinstance(value, dict):
        return {key: as_lists(item) for key, item in value.items()}
    return value


def is_missing(value: Any) -> bool:
    """Whether a table cell is empty: None, NaN, or pandas' NA or NaT."""
    if value is None:
        return True
    if isinstance(value, (str, bytes, Mapping, list, tuple, np.ndarray)):
        return False
    try:
        return bool(value != value)
    except (TypeError, ValueError):  # NA compares as NA, which is neither true nor false
        return type(value).__name__ == "NAType"
