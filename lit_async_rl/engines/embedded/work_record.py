"""Busy time and tokens of the embedded engine, for metrics and for a timeline."""

from __future__ import annotations

import time

from lit_async_rl.engines.embedded.slots import Slots
from lit_async_rl.utils.spans import ENGINE, Lane, Spans


class WorkRecord:
    """Adds up seconds and tokens of prefills and decode steps.

    Attributes:
        busy_s: seconds.
        num_tokens: tokens sampled.
    """

    def __init__(self) -> None:
        self.busy_s, self.num_tokens = 0.0, 0
        self._lane: Lane | None = None

    def observe(self, spans: Spans) -> None:
        """Records spans from now on."""
        self._lane = spans.lane(0, ENGINE, "engine", "engine", shows_idle=True)

    def add(self, name: str, began: float, slots: Slots, version: int) -> None:
        """A step ends now, that began at `began` of `time.monotonic`."""
        num_tokens, self.num_tokens = slots.num_tokens - self.num_tokens, slots.num_tokens
        seconds = time.monotonic() - began
        self.busy_s += seconds
        if self._lane is not None:
            self._lane.add(name, began, seconds, version, version=version, slots=slots.num_active, tokens=num_tokens)
