"""Environments in a pool of Ray actors: `cluster.environments`.

An episode lives in the actor that has started it. If that process is lost, the next answer of the episode is an
`EnvironmentFailure`, and `EpisodeEngine` plays it again from the first turn, in another actor.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from lit_async_rl.environments.base import Environment, Episode, Observation
from lit_async_rl.errors import EnvironmentFailure, LostEnvironment, SetupError
from lit_async_rl.ray.pool import ActorPool, PoolSettings, Worker, fail, pack_prompt
from lit_async_rl.ray.pool_worker import find_fault
from lit_async_rl.rewards.scorer import reward_name
from lit_async_rl.types import Prompt
from lit_async_rl.utils.checks import as_reward
from lit_async_rl.utils.elsewhere import RemoteProxy

FIELDS = {"text": str, "reward": float, "done": bool}


class EnvironmentPool(ActorPool):
    """Actors that play the episodes of an environment.

    Args:
        settings: of the pool.
        environment: of the run.
    """

    def __init__(self, settings: PoolSettings, environment: Environment) -> None:
        super().__init__(settings)
        self._environment = environment
        self._numbers = itertools.count()
        self._waiting: list[Future[Worker]] = []
        self._episodes: dict[Worker, set[int]] = {}
        self._calls: dict[Worker, dict[int, Future[dict[str, Any]]]] = {}

    @property
    def what(self) -> str:
        return f"environment {reward_name(self._environment)}"

    def make_actor(self, number: int) -> tuple[type, tuple[Any, ...]]:
        from lit_async_rl.ray.environment_worker import EnvironmentWorker

        return EnvironmentWorker, (self._environment,)

    def new_number(self) -> int:
        """Number of an episode or of a call."""
        return next(self._numbers)

    def claim(self, number: int) -> Future[tuple[Worker, int]]:
        """The actor with the fewest episodes and the life of its process, as soon as there is one; it has one more.

        Args:
            number: of the episode.
        """
        claimed: Future[tuple[Worker, int]] = Future()

        def take(got: Future[Worker]) -> None:  # called with the lock, by whoever sets the result
            if got.exception() is not None:
                fail(claimed, got.exception())
            elif claimed.set_running_or_notify_cancel():
                worker = got.result()
                self._episodes[worker].add(number)
                claimed.set_result((worker, worker.life))

        waiting: Future[Worker] = Future()
        waiting.add_done_callback(take)
        with self._lock:
            self._waiting.append(waiting)
            self._hand_out()
        return claimed

    def _hand_out(self) -> None:
        """Gives those who wait for an actor the one with the fewest episodes. The lock is held."""
        while self._waiting and (ready := self.ready):
            self._waiting.pop(0).set_result(min(ready, key=lambda worker: len(self._episodes[worker])))

    def release(self, worker: Worker, number: int) -> None:
        """An episode has ended, or its process has."""
        with self._lock:
            self._episodes.get(worker, set()).discard(number)

    def ask(
        self, worker: Worker, life: int, method: str, *args: Any, check: Callable[[dict[str, Any]], str]
    ) -> Future[dict[str, Any]]:
        """Answer of an actor.

        Args:
            worker: that has the episode.
            life: the process that it lives in.
            method: of the actor.
            args: of the method.
            check: says what is wrong with an answer; empty if nothing.
        """
        answered: Future[dict[str, Any]] = Future()
        key = self.new_number()

        def handle(answer: dict[str, Any]) -> str | None:
            error = answer.get("error")
            if wrong := check(answer) if error is None else find_fault(error):
                return wrong
            with self._lock:
                is_late = self._calls.get(worker, {}).pop(key, None) is None
            if not is_late and answered.set_running_or_notify_cancel():
                answered.set_result(answer)
            return None

        with self._lock:
            if worker.life != life or not worker.is_ready:
                answered.set_exception(LostEnvironment(f"was lost with its process ({worker.where})"))
                return answered
            self._calls[worker][key] = answered
            try:
                self.call(worker, method, args, handle=handle)
            except Exception as error:  # of pickle, of many kinds: metadata of a prompt
                del self._calls[worker][key]
                answered.set_exception(
                    EnvironmentFailure(f"cannot be sent to another process: {type(error).__name__}: {error}")
                )
        return answered

    def begin_end(self, worker: Worker, life: int, number: int) -> None:
        """Has an actor close an episode, without waiting for it; its process may be gone, and the episode with it."""
        self._order(worker, life, "end", number=number)
        self.release(worker, number)

    def cancel(self, worker: Worker, life: int, number: int) -> None:
        """Has an actor cancel the call of an episode."""
        self._order(worker, life, "cancel", number=number)

    def _order(self, worker: Worker, life: int, method: str, *, number: int) -> None:
        """Says something because a call was cancelled, and looks whether that blocks the actor."""
        with self._lock:
            if worker.life == life and worker.is_ready:
                self.call(worker, method, (number,), handle=lambda answer: None)
                self.suspect(worker)

    # -- what the pool says -------------------------------------------------------------------------------------------

    def on_ready(self, worker: Worker) -> None:
        self._episodes[worker] = set()
        self._calls[worker] = {}
        self._hand_out()

    def on_lost(self, worker: Worker) -> Callable[[str], None]:
        self._episodes.pop(worker, None)
        calls = list(self._calls.pop(worker, {}).values())

        def fail_all(why: str) -> None:
            for call in calls:
                fail(call, LostEnvironment(f"was lost with its process: {why}"))

        return fail_all

    def on_failed(self, reason: str) -> None:
        with self._lock:
            waiting = self._waiting
            self._waiting = []
        for one in waiting:
            failure = EnvironmentFailure(reason)
            failure.ends_run = True
            fail(one, failure)

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)


class RayEnvironment(RemoteProxy, Environment):
    """Stands for an environment whose episodes the actors of a pool play.

    Args:
        pool: the actors.
        environment: as it was configured.
    """

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
        number = self.pool.new_number()
        try:
            worker, _ = self.pool.claim(number).result()  # the pool fails it after `cluster.start_timeout_s`
        except EnvironmentFailure as error:
            raise SetupError(str(error)) from error
        self.pool.release(worker, number)

    async def start(self, prompt: Prompt) -> RayEpisode:
        """Starts an episode in the actor with the fewest.

        Raises:
            EnvironmentFailure: the environment raised, or there is no actor.
        """
        pool = self.pool
        pool.open()
        number = pool.new_number()
        claim = pool.claim(number)
        try:
            worker, life = await asyncio.wrap_future(claim)
        except asyncio.CancelledError:
            if claim.done() and not claim.cancelled() and claim.exception() is None:
                pool.release(claim.result()[0], number)
            raise
        try:
            answer = await asyncio.wrap_future(
                pool.ask(worker, life, "begin", number, pack_prompt(prompt), check=lambda answer: "")
            )
            _raise(answer, worker)
        except asyncio.CancelledError:
            pool.begin_end(worker, life, number)  # also of one that has begun meanwhile
            raise
        except EnvironmentFailure:
            pool.release(worker, number)
            raise
        return RayEpisode(pool, worker, life, number=number)

    async def close(self) -> None:
        """Closes the environment in each actor, and ends them; a later `start` has new ones."""
        await asyncio.get_running_loop().run_in_executor(None, self.pool.close)


class RayEpisode(Episode):
    """An episode in an actor.

    Args:
        pool: of the actor.
        worker: that plays it.
        life: of its process.
        number: of the episode.
    """

    def __init__(self, pool: EnvironmentPool, worker: Worker, life: int, *, number: int) -> None:
        self._pool = pool
        self._worker = worker
        self._life = life
        self._number = number

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
        ask = partial(self._pool.ask, self._worker, self._life)
        try:
            answer = await asyncio.wrap_future(ask("step", self._number, completion, is_cut, check=_find_wrong))
        except asyncio.CancelledError:
            self._pool.cancel(self._worker, self._life, self._number)
            raise
        _raise(answer, self._worker)
        return Observation(text=answer["text"], reward=answer["reward"], done=answer["done"], state=answer["state"])

    async def close(self) -> None:
        """Closes it in its process; nothing where that is gone.

        Raises:
            EnvironmentFailure: its `close` raised.
        """
        try:
            ended = self._pool.ask(self._worker, self._life, "end", self._number, check=lambda answer: "")
            _raise(await asyncio.wrap_future(ended), self._worker)
        except LostEnvironment:
            pass
        finally:
            self._pool.release(self._worker, self._number)


def _raise(answer: dict[str, Any], worker: Worker) -> None:
    """Raises the error of an answer, if it has one."""
    if (error := answer.get("error")) is not None:
        where = ", ".join(part for part in (error["at"], worker.where) if part)
        raise EnvironmentFailure(f"raised {error['type']}: {error['message']} ({where})")


def _find_wrong(answer: dict[str, Any]) -> str:
    """Fault in an observation, in words; empty if valid."""
    for name, kind in FIELDS.items():
        if type(answer.get(name)) is not kind:
            return f"an observation whose {name} is {answer.get(name)!r:.100}"
    state = answer.get("state")
    if state is not None and type(state) is not str:
        return f"an observation whose state is {state!r:.100}"
    try:
        as_reward(answer["reward"])
    except ValueError as error:
        return f"an observation whose reward is {error}"
    return ""
