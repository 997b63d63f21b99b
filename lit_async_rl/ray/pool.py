"""A pool of Ray actors for rewards or environments: how they start, end, come back, and are found to hang.

The life of an actor is one coroutine, `_live`:

    STARTING   its process makes the reward or environment; nothing else is asked of it
        |  `start` has answered
        v
    READY      a `Process`: calls go to it
        |  it died, did not return in time, or answered what cannot be right: `lose`, which fails all its calls
        v
    STARTING   in a new process, which Ray makes
        |  `start` has failed: it raised, or its process ended again and again
        v
    GIVEN UP   the others go on; without any the pool has failed, with the last reason

All of it runs in one event loop, in a thread of the pool, which alone changes the state.

| who | waits for | woken by |
|---|---|---|
| a coroutine that calls, in any loop | one in the pool's loop, until `TryPolicy` cancels it | the pool's loop |
| a coroutine in the pool's loop | the answer of a call, or the loss of its process | Ray, `lose` |
| `close` | actors that close what they have made, at most `STOP_S` | Ray |

A lost call fails; only its caller tries again, by its `TryPolicy`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from lit_async_rl.errors import SetupError, StalledError
from lit_async_rl.problem import Prompt
from lit_async_rl.ray import runtime
from lit_async_rl.ray.actors import RETRY_S, Resources, first_line, is_refused, kill_actor, last_line, log_of
from lit_async_rl.ray.logs import describe_place, read_place
from lit_async_rl.ray.pool_worker import find_fault
from lit_async_rl.runtime.limited_log import LimitedLog
from lit_async_rl.runtime.loop import LoopThread
from lit_async_rl.runtime.waiting import clock
from lit_async_rl.utils.checks import as_reward

TICK_S = 0.2  # between two looks whether an actor is there
PING_S = 5.0  # for a process to answer while none of its calls blocks it
CANCEL_S = 1.0  # between two tries to cancel a call: Ray loses one that overtakes its call
STOP_S = 3.0  # for all processes together to close what they have made
MAX_STARTS = 4  # in which a process may end while it starts
MAX_CALLS = 2000  # of one actor under way, from Ray's point of view
CLOSED = "the pool was closed"
T = TypeVar("T")
log = logging.getLogger(__name__)


class CallError(Exception):
    """A call of an actor without an answer."""


class LostProcess(CallError):
    """The process is gone; the message says which, why, and ends with its log."""


class NotSent(CallError):
    """The arguments of a call cannot be pickled."""


class NoActors(CallError):
    """There is no actor, and there will be none."""


def nothing_wrong(answer: Any) -> str:
    """Finds no fault in an answer that nobody reads."""
    return ""


def new_future() -> asyncio.Future[Any]:
    """A future of the loop that calls."""
    return asyncio.get_running_loop().create_future()


@dataclass(eq=False)
class Process:
    """A process of an actor that has started.

    Attributes:
        number: of the actor in the pool.
        actor: handle.
        place: answer of `start`: `pid`, `host`, `node`, `logs`.
        load: its calls or episodes, by the limit that they share.
        lost: done when no more calls go to it.
        reason: of its loss, with the end of its log.
        ping: whether it still answers.
    """

    number: int
    actor: Any
    place: Mapping[str, Any]
    load: Counter[str] = field(default_factory=Counter)
    lost: asyncio.Future[None] = field(default_factory=new_future)
    reason: asyncio.Future[str] = field(default_factory=new_future)
    ping: asyncio.Task[None] | None = None

    @property
    def where(self) -> str:
        """For messages."""
        return describe_place(self.place)


@dataclass(frozen=True)
class PoolSettings:
    """Number and needs of the actors of a pool.

    Args:
        name: of the setting, such as `cluster.rewards`.
        actors: how many.
        resources: of each.
        address: of the cluster, see `RayCluster`.
        start_timeout_s: longest time without a ready actor while calls wait.
    """

    name: str
    actors: int
    resources: Resources
    address: str | None
    start_timeout_s: float


class ActorPool(ABC):
    """Actors that all do the same, opened by the first call, also after `close`.

    `open`, `close`, `begin` and `run` may be called from any thread, all else from the pool's loop.

    Attributes:
        ready: processes that take calls.
        num_lost: processes that were lost.
    """

    def __init__(self, settings: PoolSettings) -> None:
        self.settings = settings
        self.ready: list[Process] = []
        self.num_lost = 0
        self._lock = threading.Lock()  # of `open` and `close`
        self._loop: LoopThread | None = None
        self._ray: Any = None
        self._actors: list[Any] = []
        self._tasks: set[asyncio.Task[Any]] = set()  # a loop forgets those that nobody keeps
        self._lives: list[asyncio.Task[None]] = []
        self._num_given_up = 0
        self._none_since: float | None = None  # since when no process is ready
        self._why = ""  # the last failure of a start
        self._warnings = LimitedLog(log)

    # -- what a pool is for -------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def what(self) -> str:
        """Task of the actors, for messages: `reward my_rewards.judge`."""

    @abstractmethod
    def actor(self) -> tuple[type, tuple[Any, ...]]:
        """Class and arguments of an actor; imports ray."""

    @property
    def given(self) -> tuple[Any, ...]:
        """Arguments of each start."""
        return ()

    @abstractmethod
    def hand_out(self) -> None:
        """Gives waiting calls to ready processes, as far as they have room."""

    @abstractmethod
    def fail_waiting(self, error: NoActors) -> None:
        """Fails all calls that wait for a process."""

    def on_lost(self, process: Process) -> None:  # noqa: B027  (most of what a pool knows of it is in the process)
        """Forgets a process; its calls fail by themselves."""

    # -- opening and closing ------------------------------------------------------------------------------------------

    @property
    def pids(self) -> list[int]:
        """Processes that are ready."""
        return [int(process.place["pid"]) for process in list(self.ready)]

    def open(self) -> None:
        """Has Ray make the actors, unless it has done so, without waiting for them.

        Raises:
            SetupError: Ray cannot be reached, or what the actors need cannot be sent to them.
        """
        with self._lock:
            if self._loop is not None:
                return
            settings = self.settings
            num_cpus = settings.actors * settings.resources.num_cpus
            self._ray = runtime.connect(settings.address, num_cpus=num_cpus, what=settings.name, user=self)
            run = uuid.uuid4().hex[:8]
            try:
                self._actors = [
                    self._make_actor(f"lit_async_rl.{run}.{settings.name}{n}") for n in range(settings.actors)
                ]
            except (TypeError, AttributeError, ValueError) as error:  # of pickle, of many kinds
                runtime.release(self)
                raise SetupError(f"{settings.name}: {self.what} cannot be sent to another process: {error}") from error
            self._num_given_up = 0
            self._none_since = clock.now()
            self._why = ""
            self._loop = LoopThread("ray-pool")
            self._loop.begin(self._serve())

    def _make_actor(self, name: str) -> Any:
        kind, arguments = self.actor()
        options = self.settings.resources.restarting
        return self._ray.remote(kind).options(name=name, max_concurrency=MAX_CALLS, **options).remote(*arguments)

    async def _serve(self) -> None:
        self._lives = [self.spawn(self._live(number, actor)) for number, actor in enumerate(self._actors)]
        self._lives.append(self.spawn(self._look()))

    def close(self) -> None:
        """Has the actors close what they have made, and ends them. Safe to call twice."""
        with self._lock:
            if self._loop is None:
                return
            try:
                with contextlib.suppress(StalledError):
                    self._loop.call(self._end(), 3 * STOP_S, "the end of a pool")
            finally:
                self._loop.close()
                self._loop = None
                runtime.release(self)

    async def _end(self) -> None:
        for life in self._lives:
            life.cancel()
        processes = self.ready
        self.ready = []
        for process in processes:
            process.lost.set_result(None)
            process.reason.set_result(CLOSED)
            self.on_lost(process)
        self.fail_waiting(NoActors(f"{self.settings.name}: {CLOSED}"))
        if self._ray.is_initialized():
            stops = [asyncio.wrap_future(process.actor.stop.remote().future()) for process in processes]
            if stops:
                done, late = await asyncio.wait(stops, timeout=STOP_S)
                self._read_last(done)
                for stop in late:
                    _discard(stop)
            for actor in self._actors:
                kill_actor(self._ray, actor, is_for_good=True)
        if self._tasks:  # until the calls have told those who wait for them
            await asyncio.wait(self._tasks, timeout=STOP_S)

    def _read_last(self, stopped: Iterable[asyncio.Future[Any]]) -> None:
        """Logs warnings of the actors about what they have closed."""
        for stop in stopped:
            if (error := stop.exception()) is not None:  # it died meanwhile
                log.debug("closing an actor: %s", error)
                continue
            said = stop.result()
            if isinstance(said, dict) and isinstance(said.get("warning"), str):
                self._warnings.warning("%s: close %s", self.what, said["warning"][:1000])

    # -- calls --------------------------------------------------------------------------------------------------------

    def begin(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Runs a coroutine in the loop of an open pool; from any thread.

        Raises:
            LostProcess: the pool was closed meanwhile.
        """
        loop = self._loop
        future = None if loop is None else loop.begin(coroutine)
        if future is None:
            coroutine.close()
            raise LostProcess(CLOSED)
        return future

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Result of a coroutine in the loop of the pool; from any loop. Errors as of `begin`."""
        return await asyncio.wrap_future(self.begin(coroutine))

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Starts a task in the loop of the pool, and keeps it."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, CallError):  # of Ray, which ends
            log.warning("%s: %s", self.settings.name, first_line(error))
            log.debug("in the loop of a pool", exc_info=error)

    def least_loaded(self, kind: str, limit: int | None = None) -> Process | None:
        """The ready process with the fewest calls of a kind; None if all have reached the limit."""
        free = [process for process in self.ready if limit is None or process.load[kind] < limit]
        return min(free, key=lambda process: process.load[kind], default=None)

    async def ask(
        self,
        process: Process,
        method: str,
        *args: Any,
        check: Callable[[dict[str, Any]], str] = nothing_wrong,
        begun: Callable[[], None] | None = None,
    ) -> dict[str, Any]:
        """Answer of a process. A cancellation also ends the call there, and is complete only then.

        Args:
            process: that has started.
            method: of its actor.
            args: plain data.
            check: returns the fault in an answer, which loses the process; empty if valid.
            begun: called when the work begins and when it gets on, for a method that yields then; None for all others.

        Raises:
            LostProcess: the process is gone.
            NotSent: the arguments cannot be pickled.
        """
        if process.lost.done():  # its actor may have another process already
            raise await self._loss(process)
        call = getattr(process.actor, method)
        try:
            sent = call.remote(*args) if begun is None else call.options(num_returns="streaming").remote(*args)
        except Exception as error:  # of pickle, of many kinds
            raise NotSent(
                f"the arguments of a call cannot be sent to another process: {type(error).__name__}: {error}"
            ) from error
        answer = asyncio.ensure_future(_received(sent, begun))
        try:
            await first_of(answer, process.lost)
            if not process.lost.done():
                if (ended := answer.exception()) is not None:
                    self.lose(process, f"has ended ({first_line(ended)})")
                elif wrong := _find_wrong(answer.result(), check):
                    self.lose(process, f"has answered what cannot be right: {wrong[:400]}", is_running=True)
                else:
                    return answer.result()
        except asyncio.CancelledError:
            if process.ping is None or process.ping.done():
                process.ping = self.spawn(self._ping(process))
            while not answer.done() and not process.lost.done():
                self._ray.cancel(sent)
                await first_of(answer, process.lost, timeout_s=CANCEL_S)
            raise
        finally:
            _discard(answer)
        raise await self._loss(process)

    async def _loss(self, process: Process) -> LostProcess:
        """The error of the calls of a lost process, once its log was read."""
        await asyncio.wait({process.reason})
        return LostProcess(process.reason.result())

    async def _ping(self, process: Process) -> None:
        """Kills a process that does not answer, because a cancelled call blocks it."""
        asked = self.spawn(self.ask(process, "ping"))
        await asyncio.wait({asked}, timeout=PING_S)
        if not asked.done():
            self.lose(process, f"is blocked: it has not answered for {PING_S:g} s", is_running=True)

    # -- the life of an actor -----------------------------------------------------------------------------------------

    async def _live(self, number: int, actor: Any) -> None:
        """Starts an actor, and again whenever its process is lost, until it is given up."""
        where = f"actor {number}"
        while (place := await self._start(actor, where)) is not None:
            process = Process(number, actor, place)
            where = process.where
            self._none_since = None
            self.ready.append(process)
            self.spawn(self.ask(process, "wait"))  # by its end a process that idles is missed
            self.hand_out()
            await asyncio.wait({process.lost})

    async def _start(self, actor: Any, where: str) -> Mapping[str, Any] | None:
        """Starts the next process of an actor; returns its place, or None if that has failed for good.

        `where` is the last place, for messages.
        """
        num_ended = 0
        cause = ""
        while not cause:
            called = time.monotonic()
            try:
                answer = await actor.start.remote(*self.given)
            except Exception as error:
                num_ended += not is_refused(self._ray, error, called)
                if num_ended < MAX_STARTS and not isinstance(error, self._ray.exceptions.ActorDiedError):
                    await asyncio.sleep(RETRY_S)
                    continue
                was_made = "creation task" not in str(error)  # what Ray says of that ends with the cause
                cause = (
                    f"its process has ended while it started ({first_line(error)})" if was_made else last_line(error)
                )
                continue
            try:
                return read_place(answer)
            except (AttributeError, TypeError):
                said = answer.get("error") if isinstance(answer, dict) else None
                cause = str(said or "its start was not answered")[:2000]
        self._num_given_up += 1
        self._why = f"{where}: {cause}"
        log.warning(
            "%s: an actor could not be started, and no further attempt is made: %s", self.settings.name, self._why
        )
        kill_actor(self._ray, actor, is_for_good=True)
        return None

    def lose(self, process: Process, why: str, is_running: bool = False) -> None:
        """Ends the calls of a lost process, killing it if it `is_running`, and has its actor start again.

        `why` follows the process's place in a message. Safe to call twice.
        """
        if process.lost.done():
            return
        process.lost.set_result(None)
        self.num_lost += 1
        self.ready.remove(process)
        if not self.ready:
            self._none_since = clock.now()
        self.on_lost(process)
        if is_running:
            kill_actor(self._ray, process.actor, is_for_good=False)
        self.spawn(self._tell(process, f"{process.where} {why}"))

    async def _tell(self, process: Process, reason: str) -> None:
        try:
            reason += await asyncio.to_thread(
                log_of, self._ray, process.place
            )  # on a node that is gone it takes a while
        except Exception as error:
            log.debug("log of an actor: %s", error)
        self._warnings.warning("%s: an actor is started again: %s", self.settings.name, reason)
        process.reason.set_result(reason)

    async def _look(self) -> None:
        """Fails waiting calls once there is no actor for them."""
        while True:
            await asyncio.sleep(TICK_S)
            if reason := self._why_none():
                self.fail_waiting(NoActors(reason))

    def _why_none(self) -> str:
        """Why no actor takes calls, now or later; empty if one may."""
        settings = self.settings
        if self._num_given_up == settings.actors:
            return f"{settings.name}: none of {settings.actors} actors could be started; {self._why}"
        if self._none_since is None or clock.now() - self._none_since <= settings.start_timeout_s:
            return ""
        return (
            f"{settings.name}: none of {settings.actors} actors had started within "
            f"cluster.start_timeout_s={settings.start_timeout_s:g}; each needs {settings.resources}, and the cluster "
            "must have room for it (--cluster.dry_run true shows what it has)"
        )


async def _received(sent: Any, begun: Callable[[], None] | None) -> Any:
    """Answer of a call; with `begun`, of one that yields empty dictionaries when its work begins or gets on."""
    if begun is None:
        return await sent
    while (answer := await (await anext(sent))) == {}:
        begun()
    return answer


async def first_of(*futures: asyncio.Future[Any], timeout_s: float | None = None) -> None:
    """Waits until one of the futures is done, without cancelling or reading any."""
    await asyncio.wait(futures, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)


def _discard(answer: asyncio.Future[Any]) -> None:
    """Ends the wait for an answer; asyncio warns of errors that nobody reads."""
    answer.add_done_callback(lambda done: done.cancelled() or done.exception())
    answer.cancel()


def _find_wrong(answer: Any, check: Callable[[dict[str, Any]], str]) -> str:
    """Fault in an answer, in words; empty if valid."""
    if not isinstance(answer, dict):
        return f"is {type(answer).__name__}"
    error = answer.get("error")
    return (error is not None and find_fault(error)) or check(answer)


def find_wrong_reward(value: Any) -> str:
    """Fault of a reward in an answer, in words that follow "is"; empty if valid."""
    if type(value) is not float:
        return f"{value!r:.100}"
    try:
        as_reward(value)
    except ValueError as error:
        return str(error)
    return ""


def pack_prompt(prompt: Prompt) -> dict[str, Any]:
    """A prompt as plain data, if its metadata is plain."""
    given: dict[str, Any] = {"text": prompt.text}
    if prompt.messages is not None:
        given = {"messages": [dict(message) for message in prompt.messages]}
    return {
        **given,
        "answer": prompt.answer,
        "metadata": dict(prompt.metadata),
        "other_answers": list(prompt.other_answers),
        "answer_value": prompt.answer_value,
    }


def unpack_prompt(packed: Mapping[str, Any]) -> Prompt:
    """The prompt that `pack_prompt` has packed."""
    return Prompt(**packed)
