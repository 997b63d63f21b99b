"""Spans of a reward worker in the timeline of a run."""

from __future__ import annotations

from lit_async_rl.utils.spans import FIRST_REWARD, Lane, Spans

MAX_LANES = 8  # workers that a timeline shows


class ScoreSpans:
    """Records when one worker scores: a span for all completions that it scores without a pause.

    A cheap reward takes less time than a span of its own would. A span has the sum of the seconds, the group of the
    first completion and their number; it ends when the worker waits, or with the window in which a timeline merges.

    Args:
        spans: of the timeline.
        worker: its number.
    """

    def __init__(self, spans: Spans, worker: int) -> None:
        self._spans, self._worker = spans, worker
        self._lane: Lane | None = None
        self._number, self._seconds, self._began, self._is_ok = 0, 0.0, 0.0, True
        self._group: int | None = None

    def add(self, began: float, seconds: float, group: int | None, is_ok: bool) -> None:
        """One completion was scored, or failed to be; `began` is of `time.monotonic`."""
        if self._number and began + seconds - self._began > self._spans.window_s:
            self.flush()
        if not self._number:
            self._began, self._group, self._is_ok = began, group, True
        self._number += 1
        self._seconds += seconds
        self._is_ok &= is_ok
        if seconds > self._spans.window_s:
            self.flush()

    def flush(self) -> None:
        """Passes on the span."""
        if not self._number:
            return
        if self._lane is None:
            self._lane = self._spans.lane(0, FIRST_REWARD + self._worker, "reward", f"reward {self._worker}")
        done = dict(group=self._group, ok=self._is_ok, completions=self._number)
        self._lane.add("score", self._began, self._seconds, **done)
        self._number, self._seconds = 0, 0.0
