"""Segments of processes to be compared: each stops itself after every few steps and records their cost.

A stopped process stops with all its threads, so nothing is prepared while the others run.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

Totals = dict[str, float]


class Segments:
    """Counts steps; a segment is `steps` of them, the first begins after `warmup` steps.

    Args:
        read: totals of the process so far; wall time and CPU seconds are added.
        output: JSON file with one entry of differences for each segment, written after the last.
    """

    def __init__(self, warmup: int, steps: int, num_segments: int, read: Callable[[], Totals], output: str) -> None:
        self.warmup = warmup
        self.steps = steps
        self.num_segments = num_segments
        self.read = read
        self.output = Path(output)
        self.num_steps = 0
        self.found: list[Totals] = []
        self._began: Totals | None = None

    @property
    def max_steps(self) -> int:
        """Steps of the whole run."""
        return self.warmup + self.steps * self.num_segments

    def end_of_step(self) -> None:
        """Records a finished segment, and stops until the driver sends SIGCONT."""
        self.num_steps += 1
        if self.num_steps < self.warmup or (self.num_steps - self.warmup) % self.steps:
            return
        now = self._now()
        if self._began is not None:
            self.found.append({name: now[name] - self._began[name] for name in now})
        if len(self.found) == self.num_segments:
            self.output.write_text(json.dumps(self.found))
            return
        os.kill(os.getpid(), signal.SIGSTOP)
        self._began = self._now()

    def _now(self) -> Totals:
        """CPU seconds of this thread and of all others: with one torch thread each, the longer of the two is what the
        wall time would be on cores that nobody else uses.
        """  # noqa: D205
        mine = time.thread_time()
        return {
            "wall_s": time.perf_counter(),
            "main_cpu_s": mine,
            "other_cpu_s": time.process_time() - mine,
            "steps": float(self.num_steps),
            **self.read(),
        }
