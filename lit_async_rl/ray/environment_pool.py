"""Environments in a pool of Ray actors: `cluster.environments`.

An episode lives in the actor that has started it. If that process is lost, the episode's next call raises an
`EnvironmentFailure`, and `EpisodeEngine` plays it again from the first turn, in another actor.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from lit_async_rl.environments.base import Environment, Episode, Observation
from lit_async_rl.errors import EnvironmentFailure, LostEnvironment, SetupError
from lit_async_rl.problem import Prompt
from lit_async_rl.ray.pool import (
    ActorPool,
    CallError,
    LostProcess,
    NoActors,
    PoolSettings,
    Process,
    find_wrong_reward,
    new_future,
    nothing_wrong,
    pack_prompt,
)
from lit_async_rl.rewards.calls import reward_name
from lit_async_rl.utils.checks import find_other_kind
from lit_async_rl.utils.elsewhere import RemoteProxy

FIELDS = {"text": str, "done": bool}
EPISODES = "episodes"  # that a process has


class EnvironmentPool(ActorPool):
    """Actors that play the episodes of the run's environment."""

    def __init__(self, settings: PoolSettings, environment: Environment) -> None:
        super().__init__(settings)
        self._environment = environment
        self.numbers = itertools.count()  # of episodes
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def what(self) -> str:
        return f"environment {reward_name(self._environment)}"

    def actor(self) -> tuple[type, tuple[Any, ...]]:
        from lit_async_rl.ray.environment_worker import EnvironmentWorker

        return EnvironmentWorker, (self._environment,)

    def hand_out(self) -> None:
        while self._waiting:
            if not (one := self._waiting.popleft()).done():
                one.set_result(None)

    def fail_waiting(self, error: NoActors) -> None:
        while self._waiting:
            if not (one := self._waiting.popleft()).done():
                one.set_exception(error)

    async def find(self) -> Process:
        """Waits for an actor; returns the one with the fewest episodes.

        Raises:
            NoActors: there will be none.
        """
        while (process := self.least_loaded(EPISODES)) is None:
            waiting = new_future()
            self._waiting.append(waiting)
            await waiting
        return process


class RayEnvironment(RemoteProxy, Environment):
    """Stands for an environment whose episodes the actors of a pool play."""

    def __init__(self, pool: EnvironmentPool, environment: Environment) -> None:
        self.pool = pool
        self.original = environment
        self.references = getattr(environment, "references", None)  # type: ignore[misc]

    def prepare(self) -> None:
        """Opens the pool and waits for one of its actors.

        Raises:
            SetupError: Ray cannot be reached, the environment cannot be sent, or there is no room for an actor.
        """
        self.pool.open()
        try:
            self.pool.begin(self.pool.find()).result()  # the pool fails it after `cluster.start_timeout_s`
        except CallError as error:
            raise SetupError(str(error)) from error

    async def start(self, prompt: Prompt) -> RayEpisode:
        """Starts an episode in the actor with the fewest.

        Raises:
            EnvironmentFailure: the environment raised, or there is no actor.
        """
        self.pool.open()
        episode = RayEpisode(self.pool)
        try:
            await episode.begin(prompt)
        except BaseException:
            episode.begin_end()  # it may have begun, with nobody there to hear of it
            raise
        return episode

    async def close(self) -> None:
        """Closes the environment in each actor, and ends them; a later `start` has new ones."""
        await asyncio.get_running_loop().run_in_executor(None, self.pool.close)


class RayEpisode(Episode):
    """An episode in an actor of a pool."""

    def __init__(self, pool: EnvironmentPool) -> None:
        self._pool = pool
        self._number = next(pool.numbers)
        self._process: Any = None  # the `Process` that plays it
        self._turn = asyncio.Lock()  # of the pool's loop: a call waits until one that was cancelled has ended

    async def begin(self, prompt: Prompt) -> None:
        """Starts it. Errors as of `RayEnvironment.start`."""
        await self._run(self._begin(prompt))

    async def step(self, completion: str) -> Observation:
        """Responds to a turn.

        Raises:
            EnvironmentFailure: the episode raised, or its process is gone.
        """
        return await self._step(completion, is_cut=False)

    async def step_cut(self, completion: str) -> Observation:
        """Rewards a turn that was cut."""
        return await self._step(completion, is_cut=True)

    async def _step(self, completion: str, is_cut: bool) -> Observation:
        answer = await self._run(self._ask("step", completion, is_cut, check=_find_wrong))
        return Observation(text=answer["text"], reward=answer["reward"], done=answer["done"], state=answer["state"])

    async def close(self) -> None:
        """Closes it in its process, if that still exists.

        Raises:
            EnvironmentFailure: its `close` raised.
        """
        with contextlib.suppress(LostEnvironment):
            await self._run(self._end())

    def begin_end(self) -> None:
        """Closes it without waiting."""
        with contextlib.suppress(LostProcess):
            self._pool.begin(self._end())

    async def _run(self, coroutine: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
        """Answer of the actor, from one of the coroutines below, which run in the pool's loop."""
        try:
            answer = await self._pool.run(coroutine)
        except LostProcess as error:
            raise LostEnvironment(f"was lost with its process: {error}") from error
        except CallError as error:
            failure = EnvironmentFailure(str(error))
            failure.ends_run = isinstance(error, NoActors)
            raise failure from error
        if (raised := answer.get("error")) is not None:
            where = ", ".join(part for part in (raised["at"], self._process.where) if part)
            raise EnvironmentFailure(f"raised {raised['type']}: {raised['message']} ({where})")
        return answer

    async def _begin(self, prompt: Prompt) -> dict[str, Any]:
        self._process = await self._pool.find()
        self._process.load[EPISODES] += 1
        return await self._ask("begin", pack_prompt(prompt))

    async def _ask(
        self, method: str, *args: Any, check: Callable[[dict[str, Any]], str] = nothing_wrong
    ) -> dict[str, Any]:
        async with self._turn:
            return await self._pool.ask(self._process, method, self._number, *args, check=check)

    async def _end(self) -> dict[str, Any]:
        if self._process is None:
            return {}
        try:
            return await self._ask("end")
        finally:
            self._process.load[EPISODES] -= 1


def _find_wrong(answer: dict[str, Any]) -> str:
    """Fault in an observation, in words; empty if it is valid, or an error."""
    if answer.get("error") is not None:
        return ""
    kinds = FIELDS if answer.get("state") is None else FIELDS | {"state": str}
    if wrong := find_other_kind(answer, kinds):
        return f"an observation whose {wrong}"
    wrong = find_wrong_reward(answer.get("reward"))
    return f"an observation whose reward is {wrong}" if wrong else ""
