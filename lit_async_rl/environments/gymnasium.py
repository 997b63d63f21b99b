"""Adapter for text environments with Gymnasium's interface."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any

from lit_async_rl.environments.base import Environment, Episode, Observation
from lit_async_rl.problem import Prompt
from lit_async_rl.prompts.sources import PromptSource
from lit_async_rl.runtime.guarded_calls import in_thread, without_exit
from lit_async_rl.runtime.threads import ThreadPool
from lit_async_rl.utils.checks import check_range


class GymnasiumEpisode(Episode):
    """Episode of a Gymnasium text environment: `step(text)` -> (text, reward, terminated, truncated, info).

    Calls run in threads, because they block.

    Args:
        env: environment of this episode only, already reset.
        threads: executor of the calls.
    """

    def __init__(self, env: Any, threads: Executor) -> None:
        self.env = env
        self._threads = threads
        self._call_lock = threading.Lock()  # a cancelled call continues in its thread, and must end before the next

    async def step(self, completion: str) -> Observation:
        answer = await in_thread(self._threads, partial(self._step, completion))
        text, reward, terminated, truncated, _ = answer
        return Observation(text=str(text), reward=float(reward), done=bool(terminated or truncated))

    def _step(self, completion: str) -> Any:
        with self._call_lock:
            return self.env.step(completion)

    async def close(self) -> None:
        """Closes the environment, after a step that still runs."""
        await in_thread(self._threads, self._close)

    def _close(self) -> None:
        with self._call_lock:
            close_env(self.env)


class GymnasiumEnvironment(Environment):
    """Gymnasium text environments created by a function, one per rollout.

    The prompt's text must be the first observation, as with `GymnasiumPrompts`, so that all rollouts of a group start
    alike. The environment is reset with the seed in the prompt's metadata, and closed after its episode.

    Args:
        make: function that returns an environment for a prompt; a dotted path in YAML.
        max_threads: concurrent calls; the wait of further ones counts towards `step_timeout_s`.

    Raises:
        ValueError: `max_threads` is not positive.
    """

    def __init__(self, make: Callable[[Prompt], Any], max_threads: int = 256) -> None:
        check_range("GymnasiumEnvironment", "integer >= 1", max_threads=max_threads)
        self.make = make
        self.max_threads = max_threads
        self._threads: ThreadPool | None = None

    async def start(self, prompt: Prompt) -> GymnasiumEpisode:
        if self._threads is None:
            self._threads = ThreadPool(self.max_threads, name="gymnasium")
        making = self._threads.submit(without_exit, partial(self._make, prompt))
        try:
            env = await asyncio.wrap_future(making)
        except asyncio.CancelledError:  # a running thread continues, and its environment has no episode to close it
            making.add_done_callback(_close_late)
            raise
        return GymnasiumEpisode(env, self._threads)

    def _make(self, prompt: Prompt) -> Any:
        env = self.make(prompt)
        try:
            env.reset(seed=prompt.metadata.get("seed"))
        except BaseException:
            close_env(env)
            raise
        return env

    async def close(self) -> None:
        """Ends the threads after their running calls, without waiting for them."""
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None


def _close_late(making: Future[Any]) -> None:
    if not making.cancelled() and making.exception() is None:
        close_env(making.result())


def close_env(env: Any) -> None:
    """Closes a Gymnasium environment, if it has a `close`."""
    if (close := getattr(env, "close", None)) is not None:
        close()


class GymnasiumPrompts(PromptSource):
    """First observations of Gymnasium environments as prompts; prompt n has seed `first_seed` + n.

    Args:
        make: function that returns an environment for a prompt, which has only a seed in its metadata.
        size: number of seeds.
        first_seed: seed of prompt 0; use disjoint ranges for training and validation.

    Raises:
        ValueError: `size` is not positive.
    """

    def __init__(self, make: Callable[[Prompt], Any], size: int = 1000, first_seed: int = 0) -> None:
        check_range("GymnasiumPrompts", "integer >= 1", size=size)
        check_range("GymnasiumPrompts", "integer", first_seed=first_seed)
        self.make = make
        self.size = size
        self.first_seed = first_seed

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Prompt:
        if not 0 <= index < self.size:
            raise IndexError(index)
        seed = {"seed": self.first_seed + index}
        env = self.make(Prompt(text="", metadata=seed))
        try:
            text, _ = env.reset(**seed)
        finally:
            close_env(env)
        return Prompt(text=str(text), metadata=seed)
