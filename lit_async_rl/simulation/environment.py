"""Simulated environment."""

from __future__ import annotations

import asyncio
import random

from lit_async_rl.environments.base import Environment, Episode, Observation
from lit_async_rl.simulation.latency import Latency
from lit_async_rl.types import Prompt


class Sleeping(Environment):
    """Responds to each of `num_turns` turns after a random delay; the last response ends the episode.

    Args:
        latency: seconds of one response.
        num_turns: turns of the policy in an episode.
        seed: of the latencies.
    """

    def __init__(self, latency: Latency, num_turns: int = 2, seed: int = 0) -> None:
        self.latency, self.num_turns = latency, num_turns
        self._rng = random.Random(seed)

    async def start(self, prompt: Prompt) -> SleepingEpisode:
        return SleepingEpisode([self.latency.draw(self._rng) for _ in range(self.num_turns)])


class SleepingEpisode(Episode):
    """Episode with given delays."""

    def __init__(self, seconds: list[float]) -> None:
        self._seconds = seconds

    async def step(self, completion: str) -> Observation:
        await asyncio.sleep(self._seconds.pop())
        return Observation(text="1", done=not self._seconds)
