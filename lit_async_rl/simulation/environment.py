"""Simulated environments."""

from __future__ import annotations

import asyncio
import random

from lit_async_rl.environments.base import Environment, Episode, Observation
from lit_async_rl.problem import Prompt
from lit_async_rl.simulation.latency import Latency


class Delayed(Environment):
    """Adds random delays to another environment's responses, like slow tools.

    A response that ends the episode is not delayed: it has only the reward.

    Args:
        environment: to delay.
        latency: additional seconds per response; None is 0.
        seed: of the latencies.
    """

    def __init__(self, environment: Environment, latency: Latency | None = None, seed: int = 0) -> None:
        self.environment = environment
        self.latency = latency
        self._rng = random.Random(seed)

    async def start(self, prompt: Prompt) -> DelayedEpisode:
        return DelayedEpisode(await self.environment.start(prompt), self.latency, self._rng)

    async def close(self) -> None:
        await self.environment.close()


class DelayedEpisode(Episode):
    """Episode with random delays."""

    def __init__(self, episode: Episode, latency: Latency | None, rng: random.Random) -> None:
        self._episode = episode
        self._latency = latency
        self._rng = rng

    async def step(self, completion: str) -> Observation:
        observation = await self._episode.step(completion)
        if self._latency is not None and not observation.done:
            await asyncio.sleep(self._latency.draw(self._rng))
        return observation

    async def step_cut(self, completion: str) -> Observation:
        return await self._episode.step_cut(completion)

    async def close(self) -> None:
        await self._episode.close()
