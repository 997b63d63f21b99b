"""Metrics of a run: every column of `metrics.csv` by optimizer step, thinned for drawing."""

from __future__ import annotations

import csv
import io
import math
from array import array
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from lit_async_rl.report.tail import Tail

MAX_POINTS = 1500  # of a curve; more pixels than a chart has
NOT_METRICS = {"step", "epoch"}
VALIDATION = ("val/", "eval/")


class Curves:
    """Incremental reader of `metrics.csv`.

    Steps count from 1 for values of a step, as in `samples.jsonl`; Lightning writes them from 0. Validations are at the
    number of steps before them; those within training that Lightning itself logged are one too early in the table.
    """

    def __init__(self, folder: Path) -> None:
        self._tail = Tail(folder / "metrics.csv")
        self._header: list[str] = []
        self._generation, self._last_step = 0, -1.0
        self._series: defaultdict[str, tuple[array[float], array[float]]] = defaultdict(_series)

    def refresh(self) -> bool:
        """Reads new rows; whether there were any."""
        if not self._tail.begin():
            return False
        if self._tail.generation != self._generation:
            self._generation, self._header, self._last_step = self._tail.generation, [], -1.0
            self._series.clear()
        for _, line in self._tail.lines():
            row = next(csv.reader(io.StringIO(line.decode(errors="replace"))), [])
            if not self._header:
                self._header = row
            elif row != self._header:
                self._add(dict(zip(self._header, row, strict=False)))
        return True

    def _add(self, row: dict[str, str]) -> None:
        step = _number(row.get("step"))
        if step is None:
            return
        found = {name: _number(text) for name, text in row.items() if text and name not in NOT_METRICS}
        if any(not name.startswith(VALIDATION) for name in found):
            self._last_step = step
        x = step + (step <= self._last_step)  # rows of step n come before those of a validation after it
        for name, value in found.items():
            if value is not None:
                steps, values = self._series[name]
                steps.append(x)
                values.append(value)

    def values(self, name: str) -> np.ndarray:
        """All finite values of a metric, in order."""
        values = np.asarray(self._series[name][1]) if name in self._series else np.empty(0)
        return values[np.isfinite(values)]

    def has_all_steps(self, name: str) -> bool:
        """Whether every step from the first to the last of a metric is there, as with `log_every_n_steps: 1`."""
        steps = self._series[name][0] if name in self._series else ()
        return len(steps) > 0 and max(steps) - min(steps) < len(steps)

    @property
    def num_steps(self) -> int:
        """Optimizer steps that logged anything."""
        return int(max((max(steps) for steps, _ in self._series.values() if steps), default=0))

    def payload(self) -> dict[str, Any]:
        """Curves for the page; metrics that were logged at the same steps share their list of steps."""
        axes: dict[tuple[float, ...], int] = {}
        series = {}
        for name, (steps, values) in sorted(self._series.items()):
            x, y = thinned(np.asarray(steps), np.asarray(values))
            axis = axes.setdefault(tuple(x.tolist()), len(axes))
            series[name] = {"axis": axis, "y": [_short(value) for value in y.tolist()]}
        return {"axes": [[int(step) for step in axis] for axis in axes], "series": series}


def thinned(x: np.ndarray, y: np.ndarray, most: int = MAX_POINTS) -> tuple[np.ndarray, np.ndarray]:
    """At most about `most` points of a curve: the lowest and the highest of each of `most / 2` parts."""
    if len(x) <= most:
        return x, y
    finite = np.where(np.isfinite(y), y, np.nanmean(np.where(np.isfinite(y), y, np.nan)) if len(y) else 0.0)
    kept: set[int] = {0, len(x) - 1}
    for part in np.array_split(np.arange(len(x)), most // 2):
        kept |= {int(part[finite[part].argmin()]), int(part[finite[part].argmax()])}
    kept |= {int(n) for n in np.flatnonzero(~np.isfinite(y))[:100]}
    order = np.array(sorted(kept))
    return x[order], y[order]


def _series() -> tuple[array[float], array[float]]:
    return array("d"), array("d")


def _number(text: str | None) -> float | None:
    try:
        return float(text or "")
    except ValueError:
        return None


def _short(value: float) -> float | None:
    return float(f"{value:.5g}") if math.isfinite(value) else None
