"""How long the trainer waits for rollouts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from lit_async_rl.utils.spans import TRAINER, Lane, Spans


class WaitTimer:
    """Seconds since the start, and those of them in which the trainer waited.

    Attributes:
        wait_s: seconds waited so far.
    """

    def __init__(self) -> None:
        self.wait_s, self._began = 0.0, time.monotonic()
        self._lane: Lane | None = None  # of a timeline

    def observe(self, spans: Spans) -> None:
        """Records in a timeline when the trainer waits."""
        self._lane = spans.lane(0, TRAINER, "trainer", "trainer", merges=False)

    def start(self) -> None:
        """Counts `run_s` from now on."""
        self._began = time.monotonic()

    @property
    def run_s(self) -> float:
        """Seconds since the start."""
        return max(1e-9, time.monotonic() - self._began)  # clocks may be coarse

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Context that counts as waiting."""
        began = time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - began
            self.wait_s += seconds
            if self._lane is not None:
                self._lane.add("wait", began, seconds)
