"""Rewards in a pool of Ray actors: `cluster.rewards`.

A `RayReward`, an `async` reward that the scorer awaits like any other, replaces each part of the run's reward; the
trainer's process combines the parts. The time of a call begins when an actor has room for it. Answers are validated; a
wrong one costs the actor its process.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

from lit_async_rl.errors import FinalRewardError, LostRewardError, RewardError, RewardSetupError
from lit_async_rl.problem import Prompt, Score
from lit_async_rl.ray.pool import (
    ActorPool,
    CallError,
    LostProcess,
    NoActors,
    NotSent,
    PoolSettings,
    Process,
    find_wrong_reward,
    first_of,
    new_future,
    pack_prompt,
)
from lit_async_rl.rewards import hooks
from lit_async_rl.rewards.calls import is_async, reward_name
from lit_async_rl.rewards.combined import CombinedReward
from lit_async_rl.rewards.forms import BatchedReward, wants
from lit_async_rl.utils.elsewhere import RemoteProxy

ONLY = "reward"  # name of a reward without parts
FORWARDED = ("references", "ask_references", "call_timeout_s", "name")
OF_THE_OWNER = ("metrics", "use_folder", "save_state", "restore_state")
CALLED_HERE = ("check_prompt", "end_check")  # of the owner, in the trainer's process, before training starts


@dataclass(eq=False)
class Call:
    """A completion, or the completions of a group, to be scored.

    Attributes:
        values: their rewards.
        task: in which an actor makes it.
    """

    prompt: Prompt
    completions: tuple[str, ...]
    token_ids: Sequence[int]
    is_group: bool
    begun: Callable[[], None]
    values: asyncio.Future[list[Any]] = field(init=False)
    task: asyncio.Task[None] | None = None

    def fail(self, error: Exception) -> None:
        """Ends it with an error, unless nobody awaits it any more."""
        if not self.values.done():
            self.values.set_exception(error)

    def succeed(self, values: list[Any]) -> None:
        """Ends it with its rewards, unless nobody awaits it any more."""
        wrong = next((value["wrong"] for value in values if isinstance(value, dict)), None)
        if wrong is not None:
            self.fail(RewardError(f"returned {wrong}"))
        elif not self.values.done():
            self.values.set_result(values)


class RewardPool(ActorPool):
    """Actors that call the parts of a reward.

    Args:
        settings: of the pool.
        parts: rewards of single completions by name.
        calls: concurrent calls of plain rewards in one actor.
        workers: concurrent calls of an `async` reward in all actors together, see `data.scoring.workers`.
        timeout_s: `data.scoring.timeout_s`, of each call of an actor.

    Attributes:
        parts: the `RayReward` of each part, by name.
    """

    def __init__(
        self, settings: PoolSettings, parts: Mapping[str, Any], *, calls: int, workers: int, timeout_s: float
    ) -> None:
        super().__init__(settings)
        self.timeout_s = timeout_s
        self._calls = calls
        of_async = -(-workers // settings.actors)
        self.parts = {
            name: RayReward(self, name, reward, limit=self._limit(reward, of_async)) for name, reward in parts.items()
        }
        self._folder: str | None = None

    def _limit(self, reward: Any, of_async: int) -> int:
        """Concurrent calls of a part in one actor."""
        return int(getattr(reward, "max_concurrent", None) or of_async) if is_async(reward) else self._calls

    @property
    def what(self) -> str:
        return f"reward {', '.join(reward_name(part) for part in self.parts.values())}"

    def actor(self) -> tuple[type, tuple[Any, ...]]:
        from lit_async_rl.ray.reward_worker import RewardWorker

        return RewardWorker, ({name: part.original for name, part in self.parts.items()}, self._calls)

    @property
    def given(self) -> tuple[Any, ...]:
        return (self._folder,)

    def hand_out(self) -> None:
        for part in self.parts.values():
            part.hand_out()

    def on_lost(self, process: Process) -> None:
        for part in self.parts.values():
            part.on_lost(process)

    def fail_waiting(self, error: NoActors) -> None:
        for part in self.parts.values():
            part.fail_waiting(error)

    def use_folder(self, folder: Path) -> None:
        """Tells the rewards the run's folder, now or when their processes start."""
        if self._folder == str(folder):
            return
        self._folder = str(folder)
        with contextlib.suppress(LostProcess):  # the pool is not open
            self.begin(self._tell_folder())

    async def _tell_folder(self) -> None:
        for process in self.ready:
            self.spawn(self.ask(process, "use_folder", self._folder))


class RayReward(RemoteProxy):
    """Stands for a part of a reward that the actors of a pool call.

    Args:
        pool: the actors.
        part: name among the parts.
        reward: as it was configured, in its form for single completions.
        limit: concurrent calls in one actor.
    """

    def __init__(self, pool: RewardPool, part: str, reward: Any, limit: int) -> None:
        self.pool = pool
        self.original = reward
        self._name = part
        self._limit = limit
        self._owner = hooks.owner_of(reward)  # what the user wrote: of a batched reward its function
        self._is_plain = not is_async(reward)  # its calls take threads of an actor
        self._kind = "" if self._is_plain else part  # by which its calls count for an actor: the plain ones together
        self._waiting: deque[Call] = deque()  # for which no actor has had room
        self._state: dict[str, Any] | None = None  # last reported, or to go on from
        self._home: Process | None = None  # that goes on from it
        self._num_homes = 0
        self._start: dict[str, Any] | None = None  # the state with its number, until that process has answered
        self._base: dict[str, float] = {}  # metrics of processes that are gone
        self._metrics_of: dict[int, dict[str, float]] = {}  # by number of the actor

    @property
    def num_actors(self) -> int:
        """Actors of the pool."""
        return self.pool.settings.actors

    @property
    def max_concurrent(self) -> int:
        """Concurrent calls in all actors together."""
        return self._limit * (1 if self._has_state else self.pool.settings.actors)

    @property
    def _has_state(self) -> bool:
        """Whether it counts something, such as a budget, and is called in one actor only."""
        return hasattr(self._owner, "save_state")

    def __getattr__(self, name: str) -> Any:
        """Optional attributes for scorer, monitors and `hooks`, if the reward has them."""
        if "_metrics_of" not in self.__dict__:  # it is being made
            raise AttributeError(name)
        if name in OF_THE_OWNER and hasattr(self._owner, name):
            return getattr(self, f"_{name}")
        if name in CALLED_HERE and hasattr(self._owner, name):
            return getattr(self._owner, name)
        if name == "score_group" and callable(getattr(self.original, "score_group", None)):
            return self._score_group
        if name in FORWARDED:
            return getattr(self.original, name)
        raise AttributeError(f"{type(self).__name__} has no {name}")

    async def __call__(
        self, prompt: Prompt, completion: str, token_ids: Sequence[int] = (), begun: Callable[[], None] = lambda: None
    ) -> Any:
        """Reward of one completion, as the reward itself gives it.

        `begun` is called, perhaps from another thread, when the work begins.

        Raises:
            RewardError: the reward raised, or gave no number; or it took too long.
            LostRewardError: the process or its node is gone.
            RewardSetupError: no actor can be had.
        """
        return (await self._call(Call(prompt, (completion,), token_ids, is_group=False, begun=begun)))[0]

    async def _score_group(
        self, prompt: Prompt, completions: Sequence[str], begun: Callable[[], None] = lambda: None
    ) -> list[Any]:
        return await self._call(Call(prompt, tuple(completions), (), is_group=True, begun=begun))

    async def _call(self, call: Call) -> list[Any]:
        try:
            self.pool.open()
        except Exception as error:
            raise RewardSetupError(str(error)) from error
        try:
            return await self.pool.run(self._score(call))
        except LostProcess as error:
            raise LostRewardError(f"its process was lost: {error}") from error
        except NotSent as error:
            raise FinalRewardError(f"its prompt was not sent: {error}") from error
        except NoActors as error:
            raise RewardSetupError(str(error)) from error

    # -- in the pool's loop -------------------------------------------------------------------------------------------

    async def _score(self, call: Call) -> list[Any]:
        """Rewards of a call, made as soon as an actor has room."""
        call.values = new_future()
        self._waiting.append(call)
        self.hand_out()
        try:
            return await call.values
        except asyncio.CancelledError:
            if call in self._waiting:
                self._waiting.remove(call)
            elif call.task is not None and not self._is_plain:
                call.task.cancel()
            raise

    def hand_out(self) -> None:
        """Gives waiting calls to processes with room."""
        while self._waiting and (process := self._find()) is not None:
            size = self.original.max_batch_size if isinstance(self.original, BatchedReward) else 1
            calls = [self._waiting.popleft() for _ in range(min(size, len(self._waiting)))]
            if self._has_state and self._home is not process:
                self._home = process
                self._num_homes += 1
                self._start = None if self._state is None else {"number": self._num_homes, "state": self._state}
            process.load[self._kind] += 1
            # Ray may begin with any of the calls that are under way: each has the state until one was answered
            task = self.pool.spawn(self._make(process, calls, self._start))
            for call in calls:
                call.task = task

    def _find(self) -> Process | None:
        """The process for the next call, if one has room."""
        if not self._has_state:
            return self.pool.least_loaded(self._kind, self._limit)
        home = self._home or next(iter(self.pool.ready), None)
        return home if home is not None and home.load[self._kind] < self._limit else None

    async def _make(self, process: Process, calls: Sequence[Call], start: Mapping[str, Any] | None) -> None:
        """Has a process make a call, or the calls of a batch; first the reward goes on from the state in `start`."""
        try:
            await self._ask(process, calls, start)
        except CallError as error:
            for call in calls:
                call.fail(error)
        finally:
            process.load[self._kind] -= 1
            self.pool.hand_out()

    async def _ask(self, process: Process, calls: Sequence[Call], start: Mapping[str, Any] | None) -> None:
        first = calls[0]
        completions = [text for call in calls for text in call.completions]
        has_queue = wants(self.original, "begun")
        got_on = asyncio.Event()
        asking = self.pool.ask(
            process,
            "call_in_turn" if has_queue else "call",
            self._name,
            [pack_prompt(call.prompt) for call in calls],
            completions,
            list(first.token_ids),
            first.is_group,
            start,
            check=partial(_find_fault, number=len(completions)),
            begun=got_on.set if has_queue else None,
        )
        if not has_queue:
            got_on.set()
        asked = self.pool.spawn(asking)
        timeout_s = self.pool.timeout_s
        try:
            await self._wait(asked, process, got_on, calls=calls)
        except asyncio.CancelledError:
            asked.cancel()
            raise
        if asked.done() or process.lost.done():
            self._file(await asked, process, calls)
            return
        problem = f"did not return within data.scoring.timeout_s={timeout_s:g}"
        if self._is_plain:
            # before the calls fail: whoever has waited for them may make others, which this process must not get
            self.pool.lose(process, f"was killed: a reward {problem}", is_running=True)
        else:
            asked.cancel()
        for call in calls:
            call.fail(RewardError(f"{problem} ({process.where})"))

    async def _wait(
        self, asked: asyncio.Future[Any], process: Process, got_on: asyncio.Event, *, calls: Sequence[Call]
    ) -> None:
        """Waits for an answer, at most the time limit since its work began or last got on."""
        limit_s: float | None = None
        while True:
            waiting = self.pool.spawn(got_on.wait())
            try:
                await first_of(asked, waiting, process.lost, timeout_s=limit_s)
            finally:
                waiting.cancel()
            if not got_on.is_set():
                return
            got_on.clear()
            limit_s = self.pool.timeout_s
            for call in calls:
                call.begun()

    def _file(self, answer: Mapping[str, Any], process: Process, calls: Sequence[Call]) -> None:
        """Takes a valid answer."""
        if "state" in answer:
            self._state = dict(answer["state"])
            if process is self._home:
                self._start = None
        if "metrics" in answer:
            # what came with the state counts already, in those of the process that has saved it
            restored = {name: value for name, value in answer.get("restored", {}).items() if name in self._base}
            metrics = {name: float(value) for name, value in answer["metrics"].items()}
            since = {
                name: metrics.get(name, value) - value for name, value in restored.items() if not name.endswith("_s")
            }
            self._metrics_of[process.number] = metrics | since
        if (error := answer.get("error")) is not None:
            for call in calls:
                call.fail(_as_error(error, process.where))
            return
        values = [Score(**one) if isinstance(one, dict) and "value" in one else one for one in answer["values"]]
        for call in calls:
            call.succeed([values.pop(0) for _ in call.completions])

    def on_lost(self, process: Process) -> None:
        """Keeps the metrics of a lost process; another goes on from the state."""
        if self._home is process:
            self._home = None
        for name, value in self._metrics_of.pop(process.number, {}).items():
            self._base[name] = value if name.endswith("_s") else self._base.get(name, 0.0) + value

    def fail_waiting(self, error: NoActors) -> None:
        """Fails all calls that wait."""
        while self._waiting:
            self._waiting.popleft().fail(error)

    # -- hooks of rewards, in the trainer's thread --------------------------------------------------------------------

    def close(self) -> None:
        """Ends the actors; a later call starts new ones."""
        self.pool.close()

    def _metrics(self) -> dict[str, float]:
        """Totals over the processes; means of names that end with `_s`."""
        found: dict[str, list[float]] = {}
        for one in list(self._metrics_of.values()):
            for name, value in one.items():
                found.setdefault(name, []).append(value)
        base = dict(self._base)
        names = found.keys() | base.keys()
        totals = {name: base.get(name, 0.0) + sum(found.get(name, [])) for name in names if not name.endswith("_s")}
        means = {name: sum(values) / len(values) for name, values in found.items() if name.endswith("_s")}
        return base | means | totals

    def _use_folder(self, folder: Path) -> None:
        self.pool.use_folder(folder)

    def _save_state(self) -> dict[str, Any]:
        """Last reported state."""
        return dict(self._owner.save_state() if self._state is None else self._state)

    def _restore_state(self, state: Mapping[str, Any]) -> None:
        """Has the next call go on from a state."""
        self._state = dict(state)
        self._home = None


def in_pool(reward: Any, settings: PoolSettings, **limits: Any) -> Any:
    """A reward whose parts are called in a pool, and combined here; `limits` are other arguments of `RewardPool`."""
    if not isinstance(reward, CombinedReward):
        return RewardPool(settings, {ONLY: reward}, **limits).parts[ONLY]
    return CombinedReward(
        RewardPool(settings, reward.rewards, **limits).parts,
        weights=reward.weights,
        combine=reward.combine,  # type: ignore[arg-type]
        gates=reward.gates,
        success=reward.success,
    )


def _as_error(error: Mapping[str, Any], where: str) -> RewardError:
    """The error of a reward as it would be raised here, with its place."""
    kind = RewardSetupError if error["ends_run"] else FinalRewardError if error["is_final"] else RewardError
    message = error["message"] if error["is_ours"] else f"raised {error['type']}: {error['message']}"
    return kind(f"{message} ({', '.join(part for part in (error['at'], where) if part)})")


def _find_fault(answer: Mapping[str, Any], number: int) -> str:
    """Fault in an answer to a call for so many completions, in words; empty if valid."""
    wrong = "" if answer.get("error") is not None else _find_wrong(answer.get("values"), number)
    return wrong or _find_wrong_notes(answer)


def _find_wrong(values: Any, number: int) -> str:
    """Fault in the values of an answer, in words; empty if valid."""
    if not isinstance(values, list) or len(values) != number:
        size = f"{len(values)} values" if isinstance(values, list) else f"{values!r:.100}"
        return f"{size} for {number} completions"
    return next((wrong for value in values if (wrong := _find_wrong_value(value))), "")


def _find_wrong_value(value: Any) -> str:
    if value is None:
        return ""
    numbers = [value]
    if isinstance(value, dict):
        if set(value) == {"wrong"}:
            return "" if isinstance(value["wrong"], str) else f"a reason that is {value['wrong']!r:.100}"
        parts = value.get("parts")
        if set(value) != {"value", "parts"} or not _is_named(parts):
            return f"a reward that is {value!r:.100}"
        numbers = [value["value"], *parts.values()]
    return next((f"a reward that is {wrong}" for one in numbers if (wrong := find_wrong_reward(one))), "")


def _find_wrong_notes(answer: Mapping[str, Any]) -> str:
    """Fault in state or metrics of an answer, in words; empty if valid."""
    if not _is_named(answer.get("state", {}), int, float, str, bool):
        return f"a state that is {answer['state']!r:.100}"
    for name in ("metrics", "restored"):
        if not _is_named(answer.get(name, {}), float):
            return f"metrics that are {answer[name]!r:.100}"
    return ""


def _is_named(values: Any, *kinds: type) -> TypeGuard[dict[str, Any]]:
    """Whether it is a dictionary by name, with values of exactly these kinds if any are given."""
    return isinstance(values, dict) and all(
        type(name) is str and (not kinds or type(value) in kinds) for name, value in values.items()
    )
