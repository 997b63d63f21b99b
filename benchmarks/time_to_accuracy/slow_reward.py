"""A reward that takes its time, as a judge or a code runner does; while it does, it sleeps."""

from __future__ import annotations

import asyncio
import random

from lit_async_rl.problem import Prompt
from lit_async_rl.rewards.functions import last_number
from lit_async_rl.simulation.latency import LogNormal


class SlowReward:
    """`last_number`, after a log-normal time.

    Args:
        mean_s: mean of the time, in seconds.
        sigma: spread of its logarithm.
        seed: seed of the times.
    """

    def __init__(self, mean_s: float, sigma: float = 1.0, seed: int = 0) -> None:
        self._latency = LogNormal(mean_s, sigma)
        self._seed = seed
        self._rng = random.Random(seed)

    async def __call__(self, prompt: Prompt, completion: str) -> float:
        """1 if the last number is the answer, else 0."""
        await asyncio.sleep(self._latency.draw(self._rng))
        return last_number(prompt, completion)

    def settings(self) -> dict[str, float]:
        """The times, for a program that draws them itself: `mu` and `sigma` of their logarithm, and the seed."""
        return {"mu": self._latency.mu, "sigma": self._latency.sigma, "seed": self._seed}
