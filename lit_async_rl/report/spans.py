"""Arithmetic of time spans: how much of a window they cover, one by one or together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Spans:
    """Intervals of time in seconds, as arrays; they may overlap."""

    begin: np.ndarray
    end: np.ndarray

    def union(self) -> Spans:
        """The same times as disjoint intervals, in order."""
        if not len(self.begin):
            return self
        order = np.argsort(self.begin, kind="stable")
        begin, end = self.begin[order], np.maximum.accumulate(self.end[order])
        first = np.concatenate([[True], begin[1:] > end[:-1]])
        return Spans(begin[first], end[np.concatenate([first[1:], [True]])])

    def covered(self, times: np.ndarray) -> np.ndarray:
        """Seconds of all spans before each of some times: F(t) = sum of (t - begin)+ - (t - end)+."""
        return _before(self.begin, times) - _before(self.end, times)

    def within(self, begin: float, end: float) -> float:
        """Seconds of all spans within a window."""
        low, high = self.covered(np.array([begin, end]))
        return float(high - low)

    def without(self, hidden: Spans) -> Spans:
        """The parts of disjoint spans that lie outside of other disjoint spans."""
        if not len(hidden.begin) or not len(self.begin):
            return self
        cuts = np.unique(np.concatenate([self.begin, self.end, hidden.begin, hidden.end]))
        middle = (cuts[:-1] + cuts[1:]) / 2
        kept = self._has(middle) & ~hidden._has(middle)
        return Spans(cuts[:-1][kept], cuts[1:][kept])

    def _has(self, times: np.ndarray) -> np.ndarray:
        at = np.searchsorted(self.begin, times, side="right") - 1
        return (at >= 0) & (times < self.end[np.maximum(at, 0)])


def _before(points: np.ndarray, times: np.ndarray) -> np.ndarray:
    if not len(points):
        return np.zeros(len(times))
    origin = points.min()  # seconds since 1970 would leave few digits to their sums
    ordered, times = np.sort(points) - origin, times - origin
    sums = np.concatenate([[0.0], np.cumsum(ordered)])
    number = np.searchsorted(ordered, times)
    return number * times - sums[number]
