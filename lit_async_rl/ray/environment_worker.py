"""The actor of a pool for environments: its episodes, all in one event loop, as in a run without Ray."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Mapping
from typing import Any

from lit_async_rl.environments.base import Observation, close_one
from lit_async_rl.ray.pool import unpack_prompt
from lit_async_rl.ray.pool_worker import PoolWorker, described
from lit_async_rl.utils.checks import as_reward

NUM_CLOSED = 10_000  # remembered: a close may overtake the start of its episode


class EnvironmentWorker(PoolWorker):
    """Plays episodes.

    Args:
        environment: pickled when this actor is made, in the trainer's process.
    """

    def __init__(self, environment: Any) -> None:
        super().__init__()
        self._environment = environment
        self._episodes: dict[int, Any] = {}
        self._running: dict[int, asyncio.Task[Any]] = {}  # one call of each episode at a time
        self._closed: deque[int] = deque(maxlen=NUM_CLOSED)

    async def begin(self, number: int, prompt: Mapping[str, Any]) -> dict[str, Any]:
        """Starts an episode of this number."""

        async def begin() -> dict[str, Any]:
            episode = await self._environment.start(unpack_prompt(prompt))
            self._episodes[number] = episode
            return {}

        if number in self._closed:
            return {}
        return await self._run(number, begin())

    async def step(self, number: int, completion: str, is_cut: bool) -> dict[str, Any]:
        """Responds to a turn."""

        async def step() -> dict[str, Any]:
            episode = self._episodes[number]
            call = getattr(episode, "step_cut", episode.step) if is_cut else episode.step
            return _packed(await call(completion))

        return await self._run(number, step())

    async def _run(self, number: int, coroutine: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._running[number] = task
        try:
            await asyncio.wait({task})
            return task.result()
        except (Exception, asyncio.CancelledError, SystemExit, KeyboardInterrupt) as error:
            return {"error": described(error)}
        finally:
            self._running.pop(number, None)

    async def cancel(self, number: int) -> dict[str, Any]:
        """Cancels the call of an episode that is under way."""
        if (task := self._running.get(number)) is not None:
            task.cancel()
        return {}

    async def end(self, number: int) -> dict[str, Any]:
        """Closes an episode once its call, which is cancelled, has ended; also one that was never asked for."""
        self._closed.append(number)
        if (task := self._running.get(number)) is not None:
            task.cancel()
            await asyncio.wait({task})
        episode = self._episodes.pop(number, None)
        if episode is None or episode is self._environment:  # that one is closed at the end of the run
            return {}
        return await _close(episode)

    async def stop(self) -> dict[str, Any]:
        """Closes the environment, after the episodes that are left; then the actor may be killed."""
        for number in list({*self._episodes, *self._running}):
            await self.end(number)
        return await _close(self._environment)


async def _close(owner: Any) -> dict[str, Any]:
    """Closes an episode or environment; what it raised, as plain data."""
    try:
        await close_one(owner)
    except Exception as error:
        return {"error": described(error), "warning": f"raised {type(error).__name__}: {error}"}
    return {}


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
            raise TypeError(f"Observation.{name} must be a text, got {value!r:.100}")
    reward = as_reward(observation.reward)
    return {
        "text": str(text),
        "reward": reward,
        "done": bool(observation.done),
        "state": None if state is None else str(state),
    }
