"""Totals since the start of a run, for monitors: sampling, scoring, and how long the trainer waited for rollouts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from lit_async_rl.rollouts.intake import FateTotals
from lit_async_rl.runtime.spans import TRAINER, recorder


class WaitTimer:
    """Seconds since the start, and those that the trainer waited.

    Attributes:
        wait_s: seconds waited so far.
    """

    def __init__(self) -> None:
        self.wait_s = 0.0
        self._began = time.monotonic()
        self._lane = recorder().lane(TRAINER)

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
            self._lane.add("wait", began, seconds)


@dataclass(frozen=True, kw_only=True)
class ProducerStats:
    """Totals since the start; without arguments, those before it.

    Attributes:
        wait_s: seconds the trainer waited for groups; `run_s`: seconds since the start.
        engine_busy_s: seconds of generation; `num_tokens`: tokens generated.
        scoring_s: seconds of scoring, the mean over workers; `scoring_cpu_share`: share of it spent computing.
        num_finished: groups finished and scored; `num_queued`: those not yet taken; `num_unfinished`: being sampled.
        num_lost: groups dropped unasked-for: redundant, fallen out of a ring buffer, too old.
        fates: what became of the groups, and how long they were.
        num_sampled: groups that got their rewards; `num_dropped`: those that filters dropped.
        sampled_reward: sum over all of them of a group's mean reward, before filters.
        dropped_tokens: sampled tokens not trained on, by what dropped them; `trained_tokens`: those trained on. What is
            neither is being sampled, waits, or is of a validation.
        threshold: least reward of a success.
    """

    wait_s: float = 0.0
    run_s: float = 0.0
    engine_busy_s: float = 0.0
    scoring_s: float = 0.0
    num_tokens: int = 0
    num_finished: int = 0
    num_queued: int = 0
    num_unfinished: int = 0
    num_lost: int = 0
    fates: Mapping[str, FateTotals] = field(default_factory=dict)
    num_sampled: int = 0
    num_dropped: int = 0
    sampled_reward: float = 0.0
    scoring_cpu_share: float = 0.0
    dropped_tokens: Mapping[str, int] = field(default_factory=dict)
    trained_tokens: int = 0
    threshold: float = 0.5

    def dropped_share(self, before: ProducerStats | None = None) -> dict[str, float]:
        """Share of the tokens that was dropped, by what dropped them, most first; since `before`, or the start."""
        then = ProducerStats() if before is None else before
        dropped = {cause: number - then.dropped_tokens.get(cause, 0) for cause, number in self.dropped_tokens.items()}
        total = sum(dropped.values()) + self.trained_tokens - then.trained_tokens
        ordered = sorted(dropped.items(), key=lambda item: -item[1])
        return {cause: number / total for cause, number in ordered if number > 0 and total > 0}
