"""Rewards in a pool of Ray actors: `cluster.rewards`.

Each part of the run's reward is replaced by a `RayReward`, an `async` reward that the scorer awaits like any other; how
parts are combined stays in the trainer's process. A call waits here until an actor has room for it, and only then does
its time begin. What an actor answers is validated; a wrong answer costs it its process.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from lit_async_rl.errors import FinalRewardError, LostRewardError, RewardError, RewardSetupError
from lit_async_rl.ray.pool import ActorPool, PoolSettings, Worker, fail, pack_prompt
from lit_async_rl.ray.pool_worker import find_fault
from lit_async_rl.rewards import hooks
from lit_async_rl.rewards.combined import CombinedReward
from lit_async_rl.rewards.forms import BatchedReward, wants
from lit_async_rl.rewards.scorer import is_async, reward_name
from lit_async_rl.types import Prompt, Score
from lit_async_rl.utils.checks import as_reward
from lit_async_rl.utils.elsewhere import RemoteProxy

ONLY = "reward"  # name of a reward without parts
FORWARDED = ("references", "ask_references", "call_timeout_s", "name")
OF_THE_OWNER = ("metrics", "use_folder", "save_state", "restore_state")


@dataclass(eq=False)
class Call:
    """A completion, or the completions of a group, to be scored."""

    part: Part
    prompt: Prompt
    completions: tuple[str, ...]
    token_ids: Sequence[int]
    is_group: bool
    begun: Callable[[], None]
    future: Future[list[Any]] = field(default_factory=Future)


@dataclass(eq=False)
class Batch:
    """Calls of one part that an actor has; several where the part scores batches."""

    number: int
    calls: list[Call]
    where: str  # the process, for messages
    began: float | None  # None while its time does not count


@dataclass(eq=False)
class Part:
    """A part of the run's reward.

    Attributes:
        name: among the parts.
        reward: as it was configured, in its form for single completions.
        limit: calls under way in one actor.
        owner: what the user wrote: of a batched reward its function.
        waiting: calls for which no actor has had room.
        state: that it has last told, or is to go on from.
        base: metrics of processes that are gone.
        metrics: by actor, with the life of its process.
        informed: number and life of the actor that goes on from `state`.
    """

    name: str
    reward: Any
    limit: int
    owner: Any = None
    waiting: deque[Call] = field(default_factory=deque)
    state: dict[str, Any] | None = None
    base: dict[str, float] = field(default_factory=dict)
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    informed: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        self.owner = hooks.owner_of(self.reward)

    @property
    def is_plain(self) -> bool:
        """Whether its calls take threads of an actor."""
        return not is_async(self.reward)

    @property
    def has_state(self) -> bool:
        """Whether it counts something, such as what a budget allows: it is called in one actor only."""
        return hasattr(self.owner, "save_state")

    @property
    def batch_size(self) -> int:
        """Completions of one call."""
        return int(self.reward.max_batch_size) if isinstance(self.reward, BatchedReward) else 1


class RewardPool(ActorPool):
    """Actors that call the parts of a reward.

    Args:
        settings: of the pool.
        parts: rewards of single completions by name.
        calls: of plain rewards under way in one actor.
        workers: `data.scoring.workers`: calls of an `async` reward under way, in all actors together.
        timeout_s: `data.scoring.timeout_s`, of each call of an actor.
    """

    def __init__(
        self, settings: PoolSettings, parts: Mapping[str, Any], *, calls: int, workers: int, timeout_s: float
    ) -> None:
        super().__init__(settings)
        self._calls = calls
        self._timeout_s = timeout_s
        of_async = -(-workers // settings.actors)
        self.parts = {name: Part(name, reward, self._limit(reward, of_async)) for name, reward in parts.items()}
        self._folder: str | None = None
        self._numbers = itertools.count()
        self._under_way: dict[Worker, dict[int, Batch]] = {}
        self._asks_begun: set[Worker] = set()

    def _limit(self, reward: Any, of_async: int) -> int:
        """Calls of a part that one actor has under way."""
        return int(getattr(reward, "max_concurrent", None) or of_async) if is_async(reward) else self._calls

    @property
    def what(self) -> str:
        return f"reward {', '.join(reward_name(part.reward) for part in self.parts.values())}"

    def make_actor(self, number: int) -> tuple[type, tuple[Any, ...]]:
        from lit_async_rl.ray.reward_worker import RewardWorker

        rewards = {name: part.reward for name, part in self.parts.items()}
        return RewardWorker, (rewards, self._calls, self._folder)

    # -- calls --------------------------------------------------------------------------------------------------------

    def submit(self, call: Call) -> None:
        """Has a call made as soon as an actor has room; its future gets the rewards.

        Raises:
            RewardSetupError: the pool cannot be opened.
        """
        try:
            self.open()
        except Exception as error:
            raise RewardSetupError(str(error)) from error
        with self._lock:
            call.part.waiting.append(call)
            self._place()

    def drop(self, call: Call) -> None:
        """Forgets a call whose answer nobody awaits any more; one of an `async` part is cancelled."""
        with self._lock:
            if call in call.part.waiting:
                call.part.waiting.remove(call)
                return
            for worker, batches in self._under_way.items():
                for batch in batches.values():
                    if call in batch.calls and len(batch.calls) == 1 and not call.part.is_plain:
                        self._cancel(worker, batch.number)
                        return

    def _cancel(self, worker: Worker, number: int) -> None:
        self.call(worker, "cancel", (number,), handle=lambda answer: None)
        self.suspect(worker)

    def _place(self) -> None:
        """Gives waiting calls to actors, as many as there is room for. The lock is held."""
        for part in self.parts.values():
            while part.waiting and (worker := self._free(part)) is not None:
                size = 1 if part.waiting[0].is_group else part.batch_size
                calls = [part.waiting.popleft() for _ in range(min(size, len(part.waiting)))]
                self._send(worker, part, calls)

    def _free(self, part: Part) -> Worker | None:
        """The actor with the fewest calls that has room for another one."""
        ready = self.ready
        if part.has_state:
            ready = [one for one in ready if part.informed == (one.number, one.life)] or ready[:1]
        load = {worker: self._load(worker, part) for worker in ready}
        free = [worker for worker in ready if load[worker] < part.limit]
        return min(free, key=load.__getitem__, default=None)

    def _load(self, worker: Worker, part: Part) -> int:
        batches = self._under_way.get(worker, {}).values()
        if part.is_plain:  # these share the threads
            return sum(batch.calls[0].part.is_plain for batch in batches)
        return sum(batch.calls[0].part is part for batch in batches)

    def _send(self, worker: Worker, part: Part, calls: list[Call]) -> None:
        now = time.monotonic()
        counts_now = not wants(part.reward, "begun")
        batch = Batch(next(self._numbers), calls, where=worker.where, began=now if counts_now else None)
        first = calls[0]
        completions = first.completions if first.is_group else tuple(call.completions[0] for call in calls)
        is_new = part.has_state and part.informed != (worker.number, worker.life)
        arguments = (
            batch.number,
            part.name,
            [pack_prompt(call.prompt) for call in calls],
            list(completions),
            list(first.token_ids),
            first.is_group,
            part.state if is_new else None,
        )
        try:
            self.call(worker, "call", arguments, handle=partial(self._file, worker, worker.life, batch=batch))
        except Exception as error:  # of pickle, of many kinds: metadata of a prompt
            problem = FinalRewardError(f"its prompt cannot be sent to another process: {type(error).__name__}: {error}")
            for call in calls:
                fail(call.future, problem)
            return
        if part.has_state:
            part.informed = (worker.number, worker.life)
        self._under_way.setdefault(worker, {})[batch.number] = batch
        if counts_now:
            for call in calls:
                call.begun()
        else:
            self._ask_begun(worker)

    def _ask_begun(self, worker: Worker) -> None:
        """Has an actor say which calls have begun, of those with a queue of their own. The lock is held."""
        if worker in self._asks_begun:
            return
        self._asks_begun.add(worker)
        self.call(worker, "begun", (), handle=partial(self._note_begun, worker))

    def _note_begun(self, worker: Worker, answer: dict[str, Any]) -> str | None:
        numbers = answer.get("begun")
        if not isinstance(numbers, list) or not all(type(number) is int for number in numbers):
            return f"calls that have begun are {numbers!r:.100}"
        now = time.monotonic()
        with self._lock:
            batches = self._under_way.get(worker, {})
            begun = [batches[number] for number in numbers if number in batches]
            for batch in begun:
                batch.began = batch.began or now
            self._asks_begun.discard(worker)
            if any(batch.began is None for batch in batches.values()):
                self._ask_begun(worker)
        for batch in begun:
            for call in batch.calls:
                call.begun()
        return None

    def _file(self, worker: Worker, life: int, answer: dict[str, Any], *, batch: Batch) -> str | None:
        """Takes an answer; returns what is wrong with it."""
        part = batch.calls[0].part
        number = len(batch.calls[0].completions) if batch.calls[0].is_group else len(batch.calls)
        error = answer.get("error")
        values: list[Any] = []
        if wrong := (find_fault(error) if error is not None else _find_wrong(answer.get("values"), number)):
            return wrong
        if wrong := _find_wrong_notes(answer):
            return wrong
        if error is None:
            values = [Score(one["value"], one["parts"]) if _is_score(one) else one for one in answer["values"]]
        with self._lock:
            if worker.life != life or self._under_way.get(worker, {}).pop(batch.number, None) is None:
                return None
            is_counted = batch.began is not None
            if isinstance(answer.get("state"), dict):
                part.state = dict(answer["state"])
            if isinstance(answer.get("metrics"), dict):
                part.metrics[worker.number] = dict(answer["metrics"])
            self._place()
        for call in batch.calls:
            if not is_counted:  # it was quicker than what says that it has begun
                call.begun()
        if error is not None:
            problem = _as_error(error, worker.where)
            for call in batch.calls:
                fail(call.future, problem)
        elif batch.calls[0].is_group:
            _succeed(batch.calls[0], values)
        else:
            for call, value in zip(batch.calls, values, strict=True):
                _succeed(call, [value])
        return None

    # -- what the pool says -------------------------------------------------------------------------------------------

    def on_ready(self, worker: Worker) -> None:
        self._under_way[worker] = {}
        self._place()

    def on_lost(self, worker: Worker) -> Callable[[str], None]:
        batches = self._under_way.pop(worker, {})
        self._asks_begun.discard(worker)
        for part in self.parts.values():
            if part.informed is not None and part.informed[0] == worker.number:
                part.informed = None
            for name, value in part.metrics.pop(worker.number, {}).items():
                part.base[name] = value if name.endswith("_s") else part.base.get(name, 0.0) + value
        calls = [call for batch in batches.values() for call in batch.calls]

        def fail_all(why: str) -> None:
            for call in calls:
                fail(call.future, LostRewardError(f"its process was lost: {why}"))

        return fail_all

    def on_failed(self, reason: str) -> None:
        with self._lock:
            calls = [call for part in self.parts.values() for call in part.waiting]
            for part in self.parts.values():
                part.waiting.clear()
        for call in calls:
            fail(call.future, RewardSetupError(reason))

    @property
    def has_waiting(self) -> bool:
        return any(part.waiting for part in self.parts.values())

    def on_tick(self) -> None:
        """Ends calls that take too long: a process with a plain reward is killed, an `async` one is cancelled."""
        now = time.monotonic()
        problem = f"did not return within data.scoring.timeout_s={self._timeout_s:g}"
        late: list[tuple[Worker, int, Batch]] = []
        with self._lock:
            for worker, batches in self._under_way.items():
                for batch in batches.values():
                    if batch.began is not None and now - batch.began > self._timeout_s:
                        late.append((worker, worker.life, batch))
            for worker, _, batch in late:
                self._under_way[worker].pop(batch.number, None)
            # before the calls fail, and with the lock: whoever has waited for them may make others, and a process that
            # is about to be killed must not get these
            for worker, life, batch in late:
                if batch.calls[0].part.is_plain:
                    self.lose(worker, life, f"was killed: a reward {problem}", is_running=True)
                elif worker.life == life:
                    self._cancel(worker, batch.number)
            self._place()
        for _, _, batch in late:
            for call in batch.calls:
                fail(call.future, RewardError(f"{problem} ({batch.where})"))

    # -- hooks of rewards ---------------------------------------------------------------------------------------------

    def metrics(self, part: Part) -> dict[str, float]:
        """Totals over the processes of a part, and means of seconds and other names that end with `_s`."""
        with self._lock:
            found: dict[str, list[float]] = {}
            for one in part.metrics.values():
                for name, value in one.items():
                    found.setdefault(name, []).append(value)
            base = dict(part.base)
        names = found.keys() | base.keys()
        totals = {name: base.get(name, 0.0) + sum(found.get(name, [])) for name in names if not name.endswith("_s")}
        means = {name: sum(values) / len(values) for name, values in found.items() if name.endswith("_s")}
        return {name: base[name] for name in names if name.endswith("_s") and name in base} | means | totals

    def use_folder(self, folder: Path) -> None:
        """Tells the rewards the run's folder, now or when their processes start."""
        with self._lock:
            if self._folder == str(folder):
                return
            self._folder = str(folder)
            for worker in self.ready:
                self.call(worker, "use_folder", (self._folder,), handle=lambda answer: None)

    def save_state(self, part: Part) -> dict[str, Any]:
        """Last reported state of a part."""
        with self._lock:
            return dict(part.state) if part.state is not None else dict(part.owner.save_state())

    def restore_state(self, part: Part, state: Mapping[str, Any]) -> None:
        """Has the next call of a part go on from a state."""
        with self._lock:
            part.state = dict(state)
            part.informed = None


class RayReward(RemoteProxy):
    """Stands for a reward, or a part of one, that the actors of a pool call.

    Args:
        pool: the actors.
        part: that this stands for.
    """

    def __init__(self, pool: RewardPool, part: Part) -> None:
        self.pool = pool
        self.original = part.reward
        self._part = part

    @property
    def num_actors(self) -> int:
        """Actors of the pool."""
        return self.pool.settings.actors

    @property
    def max_concurrent(self) -> int:
        """Calls under way in all actors together."""
        return self._part.limit * (1 if self._part.has_state else self.pool.settings.actors)

    def __getattr__(self, name: str) -> Any:
        """Optional attributes for scorer, monitors and `hooks`, if the reward has them."""
        part = self.__dict__.get("_part")
        if part is None:
            raise AttributeError(name)
        if name in OF_THE_OWNER and hasattr(part.owner, name):
            return getattr(self, f"_{name}")
        if name == "score_group" and callable(getattr(part.reward, "score_group", None)):
            return self._score_group
        if name in FORWARDED:
            return getattr(part.reward, name)
        raise AttributeError(f"{type(self).__name__} has no {name}")

    async def __call__(
        self, prompt: Prompt, completion: str, token_ids: Sequence[int] = (), begun: Callable[[], None] = lambda: None
    ) -> Any:
        """Reward of one completion, as the reward itself gives it.

        Args:
            prompt: prompt of the completion.
            completion: text to score.
            token_ids: of the completion.
            begun: called, perhaps from another thread, when the work begins.

        Raises:
            RewardError: the reward raised, or gave no number; or it took too long.
            LostRewardError: the process or its node is gone.
            RewardSetupError: no actor can be had.
        """
        return (await self._make(prompt, (completion,), token_ids, begun=begun))[0]

    async def _score_group(
        self, prompt: Prompt, completions: Sequence[str], begun: Callable[[], None] = lambda: None
    ) -> list[Any]:
        return await self._make(prompt, tuple(completions), (), is_group=True, begun=begun)

    async def _make(
        self,
        prompt: Prompt,
        completions: tuple[str, ...],
        token_ids: Sequence[int],
        *,
        begun: Callable[[], None],
        is_group: bool = False,
    ) -> list[Any]:
        call = Call(self._part, prompt, completions, token_ids=token_ids, is_group=is_group, begun=begun)
        self.pool.submit(call)
        try:
            return await asyncio.wrap_future(call.future)
        except asyncio.CancelledError:
            self.pool.drop(call)
            raise

    def close(self) -> None:
        """Ends the actors; a later call starts new ones."""
        self.pool.close()

    def _metrics(self) -> dict[str, float]:
        return self.pool.metrics(self._part)

    def _use_folder(self, folder: Path) -> None:
        self.pool.use_folder(folder)

    def _save_state(self) -> dict[str, Any]:
        return self.pool.save_state(self._part)

    def _restore_state(self, state: Mapping[str, Any]) -> None:
        self.pool.restore_state(self._part, state)


def in_pool(reward: Any, make_pool: Callable[[Mapping[str, Any]], RewardPool]) -> Any:
    """A reward whose parts are called in a pool, and combined here.

    Args:
        reward: `data.reward`.
        make_pool: makes the pool of the rewards of single completions, by name.
    """
    if not isinstance(reward, CombinedReward):
        pool = make_pool({ONLY: reward})
        return RayReward(pool, pool.parts[ONLY])
    pool = make_pool(reward.rewards)
    return CombinedReward(
        {name: RayReward(pool, part) for name, part in pool.parts.items()},
        weights=reward.weights,
        combine=reward.combine,  # type: ignore[arg-type]
        gates=reward.gates,
        success=reward.success,
    )


def _succeed(call: Call, values: list[Any]) -> None:
    if not call.future.done() and call.future.set_running_or_notify_cancel():
        for value in values:
            if isinstance(value, dict):
                call.future.set_exception(RewardError(f"returned {value['wrong']}"))
                return
        call.future.set_result(values)


def _as_error(error: Mapping[str, Any], where: str) -> RewardError:
    """The error of a reward as it would be raised here, with where it was."""
    kind = RewardSetupError if error["ends_run"] else FinalRewardError if error["is_final"] else RewardError
    message = error["message"] if error["is_ours"] else f"raised {error['type']}: {error['message']}"
    return kind(f"{message} ({', '.join(part for part in (error['at'], where) if part)})")


def _is_score(value: Any) -> bool:
    return isinstance(value, dict) and "value" in value


def _find_wrong(values: Any, number: int) -> str:
    """Fault in the values of an answer, in words; empty if valid."""
    if not isinstance(values, list) or len(values) != number:
        size = f"{len(values)} values" if isinstance(values, list) else f"{values!r:.100}"
        return f"{size} for {number} completions"
    return next((wrong for value in values if (wrong := _find_wrong_value(value))), "")


def _find_wrong_value(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, dict):
        if set(value) == {"wrong"}:
            return "" if isinstance(value["wrong"], str) else f"a reason that is {value['wrong']!r:.100}"
        parts = value.get("parts")
        if set(value) != {"value", "parts"} or not isinstance(parts, dict) or not all(map(_is_text, parts)):
            return f"a reward that is {value!r:.100}"
        return next((wrong for one in (value["value"], *parts.values()) if (wrong := _find_wrong_number(one))), "")
    return _find_wrong_number(value)


def _is_text(value: Any) -> bool:
    return type(value) is str


def _find_wrong_number(value: Any) -> str:
    if type(value) is not float:
        return f"a reward that is {value!r:.100}"
    try:
        as_reward(value)
    except ValueError as error:
        return f"a reward that is {error}"
    return ""


def _find_wrong_notes(answer: Mapping[str, Any]) -> str:
    """Fault in state or metrics of an answer, in words; empty if valid."""
    state = answer.get("state", {})
    if not isinstance(state, dict) or not all(
        type(name) is str and type(value) in (int, float, str, bool) for name, value in state.items()
    ):
        return f"a state that is {state!r:.100}"
    metrics = answer.get("metrics", {})
    if not isinstance(metrics, dict) or not all(
        type(name) is str and type(value) is float for name, value in metrics.items()
    ):
        return f"metrics that are {metrics!r:.100}"
    return ""
