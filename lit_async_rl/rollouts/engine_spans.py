"""Spans of the engine in the timeline of a run: generation, weight updates, restarts."""

from __future__ import annotations

import time

from lit_async_rl.engines.base import RolloutEngine
from lit_async_rl.utils.spans import ENGINE, WEIGHTS, Spans


class EngineSpans:
    """Records updates of the weights, restarts, and generation of engines that do not record it themselves.

    Of those only the totals `busy_s` and `num_tokens` are known; what they gained during a call of `poll` is drawn at
    its end.

    Args:
        spans: of the timeline.
        engine: the engine in use.
    """

    def __init__(self, spans: Spans, engine: RolloutEngine) -> None:
        self._spans = spans
        self._updates = spans.lane(0, WEIGHTS, "engine", "weight updates")
        self._watch(engine)

    def _watch(self, engine: RolloutEngine) -> None:
        self._is_silent = not engine.observe(self._spans)
        self._busy_s, self._num_tokens = 0.0, 0
        if self._is_silent:
            self._lane = self._spans.lane(0, ENGINE, "engine", "engine", shows_idle=True)

    def loaded(self, version: int, began: float) -> None:
        """The engine has taken these weights."""
        self._updates.add("update_weights", began, time.monotonic() - began, version, version=version)

    def restarted(self, engine: RolloutEngine) -> None:
        """Another engine takes the place of one that failed."""
        self._updates.instant("engine restarted")
        self._watch(engine)

    def polled(self, engine: RolloutEngine, began: float, version: int | None) -> None:
        """`poll` has returned; it was called at `began`."""
        if not self._is_silent:
            return
        busy_s, num_tokens = engine.busy_s - self._busy_s, engine.num_tokens - self._num_tokens
        self._busy_s, self._num_tokens = engine.busy_s, engine.num_tokens
        if busy_s > 0:
            ended = time.monotonic()
            self._lane.add("decode", ended - busy_s, busy_s, version, version=version, tokens=num_tokens)
