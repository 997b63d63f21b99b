"""In-process stand-in for the parts of Ray that `RayEngine` uses: actors are objects whose methods run in threads.

What crosses is pickled as by Ray, so that nobody shares what he is sent. An actor that was killed answers nothing any
more, and is made again from its constructor's arguments.
"""

from __future__ import annotations

import itertools
import pickle
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from types import SimpleNamespace
from typing import Any

import pytest

from lit_async_rl.engines.base import RolloutEngine
from lit_async_rl.ray import fleet, replica, runtime
from lit_async_rl.ray.engine import RayEngine
from lit_async_rl.ray.process import GROUPS, OTHER_GROUP, ReplicaProcess

RESTART_S = 0.05


class Ref:
    """Of an object, or of an answer that may still come."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ref) and other.number == self.number


class Handle:
    """Of an actor."""

    def __init__(self, ray: StandIn, arguments: tuple[Any, ...]) -> None:
        self.ray = ray
        self.arguments = arguments
        self.number = pickle.loads(arguments[0]).args[1]
        self.num_starts = 0
        self.lock = threading.Lock()
        self.make()

    def make(self) -> None:
        self.num_starts += 1
        self.begins = time.monotonic() + (RESTART_S if self.num_starts > 1 else 0.0)
        self.actor = ReplicaProcess(*pickle.loads(pickle.dumps(self.arguments)))
        self.threads = {group: ThreadPoolExecutor(1) for group in (OTHER_GROUP, *GROUPS.values())}
        self.pending: set[Ref] = set()

    @property
    def call(self) -> Any:
        def options(concurrency_group: str) -> Any:
            return SimpleNamespace(remote=lambda name, *args: self.call_in(concurrency_group, name, args))

        return SimpleNamespace(options=options)

    def call_in(self, group: str, name: str, args: tuple[Any, ...]) -> Ref:
        ref = self.ray.new_ref()
        with self.lock:
            if self.actor is None or time.monotonic() < self.begins:
                kind = "ActorDiedError" if self.actor is None else "ActorUnavailableError"
                self.ray.refs[ref].set_exception(getattr(self.ray.exceptions, kind)("it is not there"))
                return ref
            self.pending.add(ref)
            actor = self.actor
            sent = pickle.dumps(args)
            self.threads[group].submit(self.run, actor, name, sent, ref)
        return ref

    def run(self, actor: Any, name: str, sent: bytes, ref: Ref) -> None:
        change = self.ray.change
        try:
            answer = actor.call(name, *pickle.loads(sent))
            answer = change(self.number, name, answer) if change is not None else answer
            result = pickle.dumps(answer)
        except BaseException as error:
            self.answer(ref, error=error)
            return
        self.answer(ref, result)

    def answer(self, ref: Ref, result: bytes = b"", error: BaseException | None = None) -> None:
        with self.lock:
            if ref not in self.pending:
                return
            self.pending.discard(ref)
            future = self.ray.refs[ref]
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)

    def end(self, is_for_good: bool) -> None:
        with self.lock:
            actor = self.actor
            gone = self.pending
            self.pending = set()
            if actor is None:
                return
            for pool in self.threads.values():
                pool.shutdown(wait=False, cancel_futures=True)
            if is_for_good:
                self.actor = None
            else:
                self.make()
        for ref in gone:
            self.ray.refs[ref].set_exception(self.ray.exceptions.ActorUnavailableError("it was killed"))
        self.ray.ended.append(threading.Thread(target=actor.call, args=("stop",), daemon=True))
        self.ray.ended[-1].start()


class StandIn:
    """In the place of the module `ray`.

    Attributes:
        change: called with replica, method and answer; what it returns is answered.
        handles: of all actors, in the order in which they were made.
    """

    class exceptions:
        class RayError(Exception):
            pass

        class ActorDiedError(RayError):
            pass

        class ActorUnavailableError(RayError):
            pass

    def __init__(self) -> None:
        self.refs: dict[Ref, Future[bytes]] = {}
        self.handles: list[Handle] = []
        self.ended: list[threading.Thread] = []
        self.change: Callable[[int, str, Any], Any] | None = None
        self._numbers = itertools.count()

    def new_ref(self) -> Ref:
        ref = Ref(next(self._numbers))
        self.refs[ref] = Future()
        return ref

    def put(self, value: Any) -> Ref:
        ref = self.new_ref()
        self.refs[ref].set_result(pickle.dumps(value))
        return ref

    def get(self, ref: Ref, timeout: float | None = None) -> Any:
        return pickle.loads(self.refs[ref].result(timeout))

    def wait(self, refs: list[Ref], num_returns: int = 1, timeout: float | None = None) -> tuple[list[Ref], list[Ref]]:
        by_future = {self.refs[ref]: ref for ref in refs}
        wait(by_future, timeout if num_returns == 1 or timeout else 0, FIRST_COMPLETED)
        ready = [ref for future, ref in by_future.items() if future.done()]
        return ready[:num_returns], [ref for ref in refs if ref not in ready]

    def remote(self, **groups: Any) -> Any:
        def make(*arguments: Any) -> Handle:
            self.handles.append(Handle(self, arguments))
            return self.handles[-1]

        options = lambda **settings: SimpleNamespace(remote=make)  # noqa: E731
        return lambda kind: SimpleNamespace(options=options)

    def kill(self, handle: Handle, no_restart: bool) -> None:
        handle.end(no_restart)

    def is_initialized(self) -> bool:
        return True

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 2.0}

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: "f" * 32)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """Ray, for engines of this test."""
    found = StandIn()
    monkeypatch.setattr(runtime, "connect", lambda *args, **settings: found)
    monkeypatch.setattr(replica, "ray", found)
    monkeypatch.setattr(fleet, "RETRY_S", RESTART_S)
    return found


def on_stand_in(engine: RolloutEngine, model: str, **settings: Any) -> RayEngine:
    """Replicas of an engine, set up."""
    found = RayEngine(engine, **settings)
    found.setup(model)
    return found
