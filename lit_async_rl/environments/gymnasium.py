"""Adapter for text environments with Gymnasium's interface."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import Any

from lit_async_rl.environments.base import Environment, Episode, Observation
from lit_async_rl.prompts.sources import PromptSource
from lit_async_rl.types import Prompt
from lit_async_rl.utils.checks import check_range


class GymnasiumEpisode(Episode):
    """Episode of a Gymnasium text environment: `step(text)` -> (text, reward, terminated, truncated, info).

    Calls run in threads, because they block.

    Args:
        env: environment of this episode alone, reset.
        threads: that call it; None is the event loop's own, a few more than there are cores.
    """

    def __init__(self, env: Any, threads: Executor | None = None) -> None:
        self.env, self._threads = env, threads

    async def step(self, completion: str) -> Observation:
        loop = asyncio.get_running_loop()
        text, reward, terminated, truncated, _ = await loop.run_in_executor(self._threads, self.env.step, completion)
        return Observation(text=str(text), reward=float(reward), done=bool(terminated or truncated))


class GymnasiumEnvironment(Environment):
    """Gymnasium text environments created by a function, one per rollout.

    The prompt's text must be the environment's first observation, so that all rollouts of a group start alike, as with
    `GymnasiumPrompts`. The environment is reset with the seed in the prompt's metadata.

    Args:
        make: `make(prompt)` returns an environment; given by its dotted path in a YAML.
        max_threads: calls at a time; others wait, which counts for `step_timeout_s`.

    Raises:
        ValueError: `max_threads` is not positive.
    """

    def __init__(self, make: Callable[[Prompt], Any], max_threads: int = 256) -> None:
        check_range("GymnasiumEnvironment", "integer >= 1", max_threads=max_threads)
        self.make = make
        self._threads = ThreadPoolExecutor(max_threads, thread_name_prefix="gymnasium")

    async def start(self, prompt: Prompt) -> GymnasiumEpisode:
        loop = asyncio.get_running_loop()
        env = await loop.run_in_executor(self._threads, self.make, prompt)
        await loop.run_in_executor(self._threads, partial(env.reset, seed=prompt.metadata.get("seed")))
        return GymnasiumEpisode(env, self._threads)


class GymnasiumPrompts(PromptSource):
    """First observations of Gymnasium environments as prompts; prompt n has seed `first_seed` + n.

    Args:
        make: `make(prompt)` returns an environment; the prompt holds only its seed.
        size: number of seeds.
        first_seed: seed of prompt 0; use disjoint ranges for training and validation.

    Raises:
        ValueError: `size` is not positive.
    """

    def __init__(self, make: Callable[[Prompt], Any], size: int = 1000, first_seed: int = 0) -> None:
        check_range("GymnasiumPrompts", "integer >= 1", size=size)
        check_range("GymnasiumPrompts", "integer", first_seed=first_seed)
        self.make, self.size, self.first_seed = make, size, first_seed

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Prompt:
        if not 0 <= index < self.size:
            raise IndexError(index)
        seed = {"seed": self.first_seed + index}
        text, _ = self.make(Prompt(text="", metadata=seed)).reset(**seed)
        return Prompt(text=str(text), metadata=seed)
