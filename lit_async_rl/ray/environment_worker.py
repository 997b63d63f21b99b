"""The actor of a pool for environments: all its episodes run in one event loop, as without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any

from lit_async_rl.environments.base import Observation, close_one
from lit_async_rl.ray.pool import unpack_prompt
from lit_async_rl.ray.pool_worker import PoolWorker, closed, described
from lit_async_rl.utils.checks import as_reward


class EnvironmentWorker(PoolWorker):
    """Plays episodes; the pool has one call of each under way at a time.

    Args:
        environment: pickled when this actor is made, in the trainer's process.
    """

    def __init__(self, environment: Any) -> None:
        super().__init__()
        self._environment = environment
        self._episodes: dict[int, Any] = {}
        self._running: set[asyncio.Task[Any]] = set()

    async def begin(self, number: int, prompt: Mapping[str, Any]) -> dict[str, Any]:
        """Starts an episode of this number."""

        async def begin() -> dict[str, Any]:
            self._episodes[number] = await self._environment.start(unpack_prompt(prompt))
            return {}

        return await self._run(begin())

    async def step(self, number: int, completion: str, is_cut: bool) -> dict[str, Any]:
        """Responds to a turn."""

        async def step() -> dict[str, Any]:
            episode = self._episodes[number]
            call = getattr(episode, "step_cut", episode.step) if is_cut else episode.step
            return _packed(await call(completion))

        return await self._run(step())

    async def _run(self, coroutine: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
        task = asyncio.current_task()
        self._running.add(task)  # type: ignore[arg-type]  # there is one
        try:
            return await coroutine
        except (Exception, asyncio.CancelledError, SystemExit, KeyboardInterrupt) as error:
            return {"error": described(error)}
        finally:
            self._running.discard(task)  # type: ignore[arg-type]

    async def end(self, number: int) -> dict[str, Any]:
        """Closes an episode; nothing if it was never begun."""
        episode = self._episodes.pop(number, None)
        if episode is None or episode is self._environment:  # that one is closed at the end of the run
            return {}
        return await closed(close_one(episode))

    async def stop(self) -> dict[str, Any]:
        """Closes the environment, after the episodes that are left; then the actor may be killed."""
        running = list(self._running)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
        for number in list(self._episodes):
            await self.end(number)
        return await closed(close_one(self._environment))


def _packed(observation: Observation) -> dict[str, Any]:
    """An observation as plain data.

    Raises:
        TypeError: its text is none, or its reward is no number.
        ValueError: its reward is not finite.
    """
    text = observation.text
    state = observation.state
    for name, value in (("text", text), ("state", state)):
        if not isinstance(value, str) and not (name == "state" and value is None):
            raise TypeError(f"Observation.{name} must be a string, got {value!r:.100}")
    reward = as_reward(observation.reward)
    return {
        "text": str(text),
        "reward": reward,
        "done": bool(observation.done),
        "state": None if state is None else str(state),
    }
