"""A pool of Ray actors for rewards or environments: how they start, end, come back, and are found to hang.

The life of a worker:

    STARTING   its process makes the reward or environment; nothing else is asked of it
        |  `start` has answered
        v
    READY      calls go to it
        |  it died, did not return in time, or answered what cannot be right: `lose`, which fails all its calls
        v
    STARTING   in a new process, which Ray makes
        |  `start` has failed: it raised, or its process ended again and again
        v
    GIVEN UP   the others go on; without any the pool has failed, with the last reason

| who | waits for | woken by |
|---|---|---|
| a coroutine that calls | a future, until `TryPolicy` cancels it | the pool's thread |
| the pool's thread | the answer of any call, at most `TICK_S` | Ray |

Nothing is tried again here: a lost call fails, and who has made it tries again by his `TryPolicy`.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from lit_async_rl.errors import SetupError
from lit_async_rl.ray import runtime
from lit_async_rl.ray.actors import REFUSED_S, RETRY_S, Resources, first_line, kill_actor, last_line, log_of
from lit_async_rl.runtime.files import LimitedLog
from lit_async_rl.types import Prompt

TICK_S = 0.2  # between two looks at the time
PING_S = 5.0  # for a process to answer while none of its calls blocks it
STOP_S = 3.0  # for all processes together to close what they have made
MAX_STARTS = 4  # in which a process may end while it starts
MAX_CALLS = 2000  # of one actor under way, from Ray's point of view
log = logging.getLogger(__name__)


@dataclass(eq=False)
class Worker:
    """State of one actor of the pool.

    Attributes:
        number: in the pool.
        actor: handle.
        life: number of its process, from 0; answers to calls of an earlier one are ignored.
        place: answer of `start`: `pid`, `host`, `node`, `logs`.
        is_ready: whether calls go to it.
        is_given_up: whether it will not come back.
        suspected: when it was asked whether it still answers; None if it was not.
        retry_at: when its start is asked for again; None if it need not be.
        num_failed: starts in a row in which its process has ended.
    """

    number: int
    actor: Any
    life: int = 0
    place: Mapping[str, Any] = field(default_factory=dict)
    is_ready: bool = False
    is_given_up: bool = False
    suspected: float | None = None
    retry_at: float | None = None
    num_failed: int = 0

    @property
    def where(self) -> str:
        """For messages."""
        if not self.place:
            return f"actor {self.number}"
        return f"pid {self.place['pid']}, {self.place['host']}, node {self.place['node'][:8]}"


@dataclass(frozen=True)
class PoolSettings:
    """Number and needs of the actors of a pool.

    Args:
        name: of the setting, such as `cluster.rewards`.
        actors: how many.
        resources: of each.
        address: of the cluster, see `RayCluster`.
        start_timeout_s: longest time without any actor that is ready, while something is to be done.
    """

    name: str
    actors: int
    resources: Resources
    address: str | None
    start_timeout_s: float


class ActorPool(ABC):
    """Actors that all do the same. Thread-safe; opened by the first call, and again by one after `close`.

    Args:
        settings: of the pool.
    """

    def __init__(self, settings: PoolSettings) -> None:
        self.settings = settings
        self._lock = threading.RLock()  # guards all below; held for a moment only
        self._ray: Any = None
        self._workers: list[Worker] = []
        self._events: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._none_since: float | None = None  # since when no worker is ready
        self._why = ""  # the last failure of a start
        self._warnings = LimitedLog(log)
        self.num_lost = 0

    # -- what a pool is for -------------------------------------------------------------------------------------------

    @abstractmethod
    def make_actor(self, number: int) -> tuple[type, tuple[Any, ...]]:
        """Class and arguments of an actor; imports ray."""

    @abstractmethod
    def on_ready(self, worker: Worker) -> None:
        """A worker takes calls now. The lock is held."""

    @abstractmethod
    def on_lost(self, worker: Worker) -> Callable[[str], None]:
        """Forgets the calls of a worker whose process is lost; returns what fails them, with the reason.

        The lock is held now, and not when the calls are failed.
        """

    @abstractmethod
    def on_failed(self, reason: str) -> None:
        """Fails everything that waits for a worker: there is none. The lock is not held."""

    @property
    @abstractmethod
    def has_waiting(self) -> bool:
        """Whether something waits for a worker."""

    def on_tick(self) -> None:  # noqa: B027  (a pool whose calls have limits of their own has nothing to look at)
        """Called every `TICK_S`, without the lock."""

    # -- opening and closing ------------------------------------------------------------------------------------------

    @property
    def pids(self) -> list[int]:
        """Processes of the workers that are ready."""
        with self._lock:
            return [int(worker.place["pid"]) for worker in self._workers if worker.is_ready]

    def open(self) -> None:
        """Has Ray make the actors, unless it has done so; waits for none of them.

        Raises:
            SetupError: Ray cannot be reached, or what the actors need cannot be sent to them.
        """
        with self._lock:
            if self._workers:
                return
            settings = self.settings
            num_cpus = settings.actors * settings.resources.num_cpus
            ray = self._ray = runtime.connect(settings.address, num_cpus=num_cpus, what=settings.name, user=self)
            run = uuid.uuid4().hex[:8]
            try:
                made = [self._make(ray, number, run) for number in range(settings.actors)]
            except (TypeError, AttributeError, ValueError) as error:  # of pickle, of many kinds
                runtime.release(self)
                raise SetupError(f"{settings.name}: {self.what} cannot be sent to another process: {error}") from error
            self._workers = made
            self._none_since = time.monotonic()
            self._why = ""
            self._events = queue.SimpleQueue()
            self._thread = threading.Thread(target=self._serve, args=(self._events,), name="ray-pool", daemon=True)
            self._thread.start()
            for worker in made:
                self._start(worker)

    def _make(self, ray: Any, number: int, run: str) -> Worker:
        kind, arguments = self.make_actor(number)
        resources = self.settings.resources
        options = ray.remote(kind).options(
            name=f"lit_async_rl.{run}.{self.settings.name}{number}",
            max_restarts=-1,
            max_task_retries=0,
            max_concurrency=MAX_CALLS,
            **resources.options,
        )
        return Worker(number, options.remote(*arguments))

    @property
    @abstractmethod
    def what(self) -> str:
        """Task of the actors, for messages: `reward my_rewards.judge`."""

    def close(self) -> None:
        """Has the actors close what they have made, and ends them. Safe to call twice."""
        with self._lock:
            workers = self._workers
            self._workers = []
            thread = self._thread
            self._thread = None
            ready = [worker for worker in workers if worker.is_ready]
            lost = [self.on_lost(worker) for worker in ready]
            for worker in workers:
                worker.life += 1
                worker.is_ready = False
        if not workers:
            return
        for fail in lost:
            fail("the pool was closed")
        self.on_failed(f"{self.settings.name}: the pool was closed")
        ray = self._ray
        if ray.is_initialized():
            stops = [worker.actor.stop.remote() for worker in ready]
            if stops:
                done, _ = ray.wait(stops, num_returns=len(stops), timeout=STOP_S)
                self._finish(ray, done)
            for worker in workers:
                kill_actor(ray, worker.actor, is_for_good=True)
        self._events.put(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join(STOP_S)
        runtime.release(self)

    def _finish(self, ray: Any, stopped: list[Any]) -> None:
        """Reads what the actors say when they have closed what they have made."""
        for reference in stopped:
            try:
                said = ray.get(reference, timeout=STOP_S)
            except Exception as error:  # it died meanwhile
                log.debug("closing an actor: %s", error)
                continue
            if isinstance(said, dict) and isinstance(said.get("warning"), str):
                self._warnings.warning("%s: close %s", self.what, said["warning"][:1000])

    # -- calls --------------------------------------------------------------------------------------------------------

    def call(
        self, worker: Worker, method: str, args: tuple[Any, ...], *, handle: Callable[[dict[str, Any]], str | None]
    ) -> None:
        """Calls a method of a worker. The lock is held.

        Args:
            worker: ready, or starting.
            method: of its actor.
            args: plain data.
            handle: called in the pool's thread, without the lock, with the answer; returns what is wrong with it,
                which loses the worker. Not called if the process is lost before: `on_lost` is.

        Raises:
            Exception: the arguments cannot be pickled.
        """
        life = worker.life
        reference = getattr(worker.actor, method).remote(*args)
        events = self._events
        future = reference.future()

        def handle_in_thread(kept: Any = reference) -> None:  # the reference must live until then
            self._handle(worker, life, future=future, handle=handle)

        future.add_done_callback(lambda _: events.put(handle_in_thread))

    def _handle(
        self, worker: Worker, life: int, *, future: Any, handle: Callable[[dict[str, Any]], str | None]
    ) -> None:
        try:
            answer = future.result()
        except Exception as error:  # of many kinds: the actor died, or is not reached, or its node
            self.lose(worker, life, f"has ended ({first_line(error)})")
            return
        if worker.life != life:
            return
        wrong = handle(answer) if isinstance(answer, dict) else f"is {type(answer).__name__}"
        if wrong:
            self.lose(worker, life, f"has answered what cannot be right: {wrong[:400]}", is_running=True)

    def _start(self, worker: Worker) -> None:
        """Has a worker make what it works with. The lock is held."""
        life = worker.life
        worker.retry_at = None
        called = time.monotonic()
        reference = worker.actor.start.remote()
        future = reference.future()
        events = self._events

        def handle(kept: Any = reference) -> None:
            self._started(worker, life, called=called, future=future)

        future.add_done_callback(lambda _: events.put(handle))

    def _started(self, worker: Worker, life: int, *, called: float, future: Any) -> None:
        try:
            answer = future.result()
        except Exception as error:
            if worker.life != life or self._will_come_back(worker, error, time.monotonic() - called):
                return
            was_made = "creation task" not in str(error)  # what Ray says of that ends with the cause
            cause = f"its process has ended while it started ({first_line(error)})" if was_made else last_line(error)
            answer = {"error": cause}
        with self._lock:
            if worker.life != life:
                return
            if isinstance(answer, dict) and _is_place(answer):
                worker.place = answer
                worker.is_ready = True
                worker.num_failed = 0
                self._none_since = None
                self.call(worker, "wait", (), handle=lambda answer: None)  # by its end a process that idles is missed
                self.on_ready(worker)
                return
            worker.is_given_up = True
            said = answer.get("error") if isinstance(answer, dict) else None
            self._why = f"{worker.where}: {str(said or 'its start was not answered')[:2000]}"
        log.warning("%s: an actor is given up, %s", self.settings.name, self._why)
        kill_actor(self._ray, worker.actor, is_for_good=True)

    def _will_come_back(self, worker: Worker, error: Exception, seconds: float) -> bool:
        """Whether a start that has failed is to be asked for again: Ray refuses calls of an actor that it brings back.

        Args:
            worker: that was to start.
            error: of Ray.
            seconds: that the call took; where it was not refused, the process has ended.
        """
        if isinstance(error, self._ray.exceptions.ActorDiedError):
            return False
        with self._lock:
            worker.num_failed += seconds >= REFUSED_S
            if worker.num_failed >= MAX_STARTS:
                return False
            worker.retry_at = time.monotonic() + RETRY_S
        return True

    def lose(self, worker: Worker, life: int, why: str, is_running: bool = False) -> None:
        """Fails the calls of a worker, and begins to start it again; nothing if that process is gone already.

        Args:
            worker: that was lost.
            life: the process that the caller means.
            why: in words that follow where it is.
            is_running: whether its process is there, and has to be killed.
        """
        with self._lock:
            if worker.life != life:
                return
            worker.life += 1
            worker.is_ready = False
            worker.suspected = None
            self.num_lost += 1
            place = worker.place
            where = worker.where
            fail = self.on_lost(worker)
            if not any(one.is_ready for one in self._workers):
                self._none_since = time.monotonic()
        if is_running:
            kill_actor(self._ray, worker.actor, is_for_good=False)
        with self._lock:
            self._start(worker)
        # in a thread of its own: the log of a process on a node that is gone takes a while
        tell = threading.Thread(target=self._tell, args=(place, f"{where} {why}", fail), name="ray-pool-log")
        tell.daemon = True
        tell.start()

    def _tell(self, place: Mapping[str, Any], what: str, fail: Callable[[str], None]) -> None:
        try:
            what += log_of(self._ray, place)
        except Exception as error:
            log.debug("log of an actor: %s", error)
        self._warnings.warning("%s: an actor is started again: %s", self.settings.name, what)
        fail(what)

    def suspect(self, worker: Worker) -> None:
        """Asks a worker whether a call that is late blocks it; it is killed if it does not answer. The lock is held."""
        if worker.suspected is not None or not worker.is_ready:
            return
        worker.suspected = time.monotonic()

        def answered(answer: dict[str, Any]) -> None:
            worker.suspected = None

        self.call(worker, "ping", (), handle=answered)

    # -- the pool's thread --------------------------------------------------------------------------------------------

    def _serve(self, events: queue.SimpleQueue[Callable[[], None] | None]) -> None:
        looked = time.monotonic()
        while True:
            try:
                event = events.get(timeout=TICK_S)
            except queue.Empty:
                event = lambda: None  # noqa: E731
            if event is None:
                return
            try:
                event()
                if time.monotonic() - looked >= TICK_S:
                    looked = time.monotonic()
                    self._look()
            except Exception as error:  # of Ray, which ends: nothing else may end this thread
                log.warning("%s: %s", self.settings.name, first_line(error))
                log.debug("in the thread of a pool", exc_info=True)

    def _look(self) -> None:
        now = time.monotonic()
        with self._lock:
            hung = [one for one in self._workers if one.suspected is not None and now - one.suspected > PING_S]
            lives = [one.life for one in hung]
            reason = self._no_worker(now)
            for worker in self._workers:
                if worker.retry_at is not None and now >= worker.retry_at:
                    self._start(worker)
        for worker, life in zip(hung, lives, strict=True):
            self.lose(worker, life, f"is blocked: it has not answered for {PING_S:g} s", is_running=True)
        if reason and self.has_waiting:
            self.on_failed(reason)
        self.on_tick()

    def _no_worker(self, now: float) -> str:
        """Why nothing can be done, and will not be; empty if it can. The lock is held."""
        if not self._workers:
            return ""
        settings = self.settings
        if all(worker.is_given_up for worker in self._workers):
            return f"{settings.name}: none of {settings.actors} actors could be started; {self._why}"
        if self._none_since is None or now - self._none_since <= settings.start_timeout_s:
            return ""
        return (
            f"{settings.name}: none of {settings.actors} actors was there within "
            f"cluster.start_timeout_s={settings.start_timeout_s:g}; each needs {settings.resources}, and the cluster "
            f"must have room for it (--cluster.dry_run true shows what it has)"
        )

    @property
    def ready(self) -> list[Worker]:
        """Workers that take calls. The lock is held."""
        return [worker for worker in self._workers if worker.is_ready]


def fail(future: Future[Any], error: BaseException | None) -> None:
    """Fails what waits, unless it has its result or is not awaited any more."""
    if not future.done() and future.set_running_or_notify_cancel():
        future.set_exception(error)


def _is_place(answer: Mapping[str, Any]) -> bool:
    kinds = {"pid": int, "host": str, "node": str, "logs": list}
    return all(type(answer.get(name)) is kind for name, kind in kinds.items())


def pack_prompt(prompt: Prompt) -> dict[str, Any]:
    """A prompt as plain data, as plain as its metadata is."""
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
