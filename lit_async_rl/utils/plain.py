"""Conversion to values that a checkpoint can hold: checkpoints are loaded without executing code."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

import numpy as np


def plain(value: Any) -> Any:
    """Converts a value, with its items, to Python's containers, numbers and strings; other types become strings."""
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
