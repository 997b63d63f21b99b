"""Engines that make each sample from many requests of an inner engine: the life of an episode.

Environments and agents are two kinds of *players*. An environment answers each turn of the policy, and its engine makes
the next request of the answer (`EpisodeEngine`); an agent makes its requests itself (`AgentEngine`). All else is here:

```
submit -> _begin -> | a request in the inner engine -> _receive -> the player works -> the next request | -> _finish
                                                                        |
                                            its failure -> _fail -> _begin_again, or _give_up
```

Every episode ends in exactly one of `_finish`, `_fail`, `abort` and `close`, which mark it as over. Then, or after its
task in the event loop, `_release` frees what its player holds. A failed episode trains nothing: another one replaces
it.

| who | waits for | woken by |
|---|---|---|
| `poll` (producer's thread) | a finished sample | the inner engine, and every `POLL_INTERVAL_S` |
| event loop's thread | environments and agents | themselves, bounded by their time limits |
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from torch import Tensor

from lit_async_rl.engines.base import EngineWrapper, RolloutEngine, set_up
from lit_async_rl.engines.completion_check import RequestLedger
from lit_async_rl.errors import EnvironmentFailure
from lit_async_rl.models.tokenizer import TextCodec
from lit_async_rl.runtime.limited_log import LimitedLog
from lit_async_rl.runtime.loop import LoopTasks, SharedLoop
from lit_async_rl.runtime.retries import Retries, TryPolicy, Work
from lit_async_rl.types import Completion, GenerationRequest

log = logging.getLogger(__name__)
POLL_INTERVAL_S = 0.01  # while environments work: their responses do not wake the inner engine's `poll`
THREAD_NAME = "environments"  # of the event loop
LOCK_TIMEOUT_S = 1.0  # longest wait of `close` for a thread that submits


@dataclass(eq=False)
class PlayedSample:
    """One try of a sample of a request. Guarded by the lock of its engine.

    Attributes:
        request: of the outer engine.
        sample_index: which of its samples.
        num_failed: failed tries, this one included once it has failed.
        is_over: whether it finished, failed or was dropped; its player's results are then ignored.
        num_tasks: tasks of its player in the event loop: one may still end as the next begins.
        in_engine: ids of its requests in the inner engine.
        idle_since: `time.monotonic` when the last of them ended: its player has worked since.
    """

    request: GenerationRequest
    sample_index: int
    num_failed: int = 0
    is_over: bool = False
    num_tasks: int = 0
    in_engine: set[int] = field(default_factory=set)
    idle_since: float = field(default_factory=time.monotonic)

    def end(self) -> None:
        """Marks it as over."""
        self.is_over = True


S = TypeVar("S", bound=PlayedSample)


@dataclass(eq=False)
class OpenRequest(Generic[S]):
    """A request of the outer engine whose samples are not all there.

    Attributes:
        request: the request.
        samples: samples that are not over.
        num_lost: samples that were given up alone.
    """

    request: GenerationRequest
    samples: list[S] = field(default_factory=list)
    num_lost: int = 0


class MultiRequestEngine(EngineWrapper, Generic[S]):
    """Plays samples in an event loop, each with as many requests to `engine` as it needs.

    Args:
        engine: generates the turns.
        policy: time limit and number of tries for an environment or agent.
        player: kind and name of the environment or agent, for messages.

    Raises:
        ValueError: the engine does not update weights in flight.
    """

    scores = True
    in_flight_weight_updates = True

    def __init__(self, engine: RolloutEngine, policy: TryPolicy, player: str) -> None:
        if not engine.in_flight_weight_updates:
            raise ValueError(
                f"the engine {type(self).__name__} makes many requests per episode, so weights may change within an "
                "episode: allow this with engine.in_flight_weight_updates=true"
            )
        super().__init__(engine)
        self.policy = policy
        self.player = player
        self._codec: TextCodec | None = None
        self._ids = itertools.count()
        # shared by the producer's thread (`submit`, `poll`, `abort`) and the event loop's thread; re-entrant, because
        # the inner engine's calls may return into this object
        self._lock = threading.RLock()
        self._ledger: RequestLedger | None = None  # of turns; guarded by the lock
        self._open: dict[int, OpenRequest[S]] = {}  # by id; those with a sample that is not over
        self._in_engine: dict[int, dict[int, S]] = {}  # by inner request, the sample that gets each of its samples
        self._finished: list[Completion] = []
        self._given_up: list[int] = []  # ids of requests
        self._lost: list[tuple[int, int]] = []  # requests and samples
        self._error: BaseException | None = None
        self._retries = Retries(policy)
        self._warnings = LimitedLog(log)
        self._tasks = LoopTasks(SharedLoop(THREAD_NAME, player))
        self._trains = True  # not if its samples are of a validation

    def _with_engine_in_loop(self, engine: RolloutEngine) -> MultiRequestEngine[S]:
        """This environment or agent around another engine, in the same event loop."""
        other = self.with_engine(engine)
        other._tasks = LoopTasks(self._tasks.shared)
        return other

    def _use(self, engine: RolloutEngine, codec: TextCodec) -> None:
        """Prepares for an engine that is set up."""
        self._codec = codec
        self._ledger = RequestLedger(engine, codec.vocab_size)

    def around(self, engine: RolloutEngine, codec: TextCodec) -> RolloutEngine:
        """This environment or agent around another engine, in the same event loop and without training."""
        other = self._with_engine_in_loop(engine)
        other._trains = False
        other._use(engine, codec)
        return other

    def fresh(self, out_of_memory: bool = False) -> RolloutEngine:
        """See `RolloutEngine`; environment or agent stay the same object, in the same event loop."""
        other = self._with_engine_in_loop(self.engine.fresh(out_of_memory))
        other.special_tokens = self.special_tokens
        return other

    def setup(self, model: str) -> None:
        codec = TextCodec(model, self.special_tokens)
        super().setup(model)
        self._use(self.engine, codec)

    def load_weights(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Loads weights; running episodes continue under them."""
        with self._lock:
            self._open_ledger.newest = version
        super().load_weights(version, weights)
        with self._lock:
            self._open_ledger.loaded = version

    @property
    def _open_ledger(self) -> RequestLedger:
        return set_up(self._ledger)

    def poll(self, timeout_s: float) -> list[Completion]:
        deadline = time.monotonic() + timeout_s
        while True:
            with self._lock:
                if self._error is not None:
                    raise self._error
                finished = self._finished
                self._finished = []
                waiting = any(not sample.in_engine for sample in self.running)
            remaining = deadline - time.monotonic()
            if finished or remaining <= 0:
                return finished
            turns = self.engine.poll(min(remaining, POLL_INTERVAL_S) if waiting else remaining)
            for completion in self._open_ledger.listed(turns, "poll"):
                self._take(completion)

    # -- requests to the inner engine ---------------------------------------------------------------------------------

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Starts an episode for each sample."""
        with self._lock:
            first = []
            for request in requests:
                opened: OpenRequest[S] = OpenRequest(request)
                first += self._begin(opened)
                self._open[request.id] = opened
        if first:
            self.engine.submit(first)

    def _register(self, request: GenerationRequest, owners: Mapping[int, S]) -> GenerationRequest:
        """A request for the inner engine under its own id; `owners` get its completions by sample."""
        inner = replace(request, id=next(self._ids))
        self._in_engine[inner.id] = dict(owners)
        for sample in owners.values():
            sample.in_engine.add(inner.id)
        self._open_ledger.open([inner])
        return inner

    def _take(self, completion: Completion) -> None:
        """Passes a completion to the sample that asked for it."""
        with self._lock:
            if not self._open_ledger.receive(completion):
                return  # aborted
            number = completion.request_id
            owners = self._in_engine.get(number, {})
            sample = owners.pop(completion.sample_index, None)
            if sample is None:
                return
            if not owners:
                del self._in_engine[number]
            if sample not in owners.values():
                self._note_answered(sample, number)
            self._receive(sample, completion)

    def _forget(self, numbers: Iterable[int]) -> list[int]:
        """Unregisters inner requests; returns those to abort, without the lock."""
        known = [number for number in numbers if number in self._in_engine]
        for number in known:
            for sample in set(self._in_engine.pop(number).values()):
                self._note_answered(sample, number)
        if known:
            self._open_ledger.abort(known)
        return known

    @staticmethod
    def _note_answered(sample: S, number: int) -> None:
        sample.in_engine.discard(number)
        if not sample.in_engine:
            sample.idle_since = time.monotonic()

    # -- the two kinds of players -------------------------------------------------------------------------------------

    @abstractmethod
    def _begin(self, opened: OpenRequest[S]) -> list[GenerationRequest]:
        """Begins all samples of a request, with the lock held; returns their first inner requests."""

    @abstractmethod
    def _begin_again(self, failed: S, pause_s: float) -> None:
        """Begins another try of a sample, with the lock held."""

    @abstractmethod
    def _receive(self, sample: S, completion: Completion) -> None:
        """Passes a sample its completion, with the lock held."""

    @abstractmethod
    def _give_up(self, sample: S) -> list[int]:
        """Leaves out what failed in all tries, with the lock held; returns the inner requests to abort."""

    def _keeps_prompt(self, sample: S) -> bool:
        """Whether a sample's prompt goes on with the others if the sample is given up."""
        return False

    def _release(self, sample: S) -> None:
        """Frees what the player of a sample holds, once it is over and none of its tasks runs.

        The default does nothing.
        """

    # -- life of a sample ---------------------------------------------------------------------------------------------

    @property
    def running(self) -> list[S]:
        """Samples that are not over.

        Takes no lock, which a thread that hangs in the inner engine may hold: players must still be watched.
        """
        return [sample for opened in list(self._open.values()) for sample in list(opened.samples)]

    def outside_work(self) -> Work | None:
        idle = [sample.idle_since for sample in self.running if not sample.in_engine]
        if not idle:
            return None
        oldest_s = max(0.0, time.monotonic() - min(idle))
        return Work(name=self.player, num_calls=len(idle), oldest_s=oldest_s, policy=self.policy)

    def _play(self, sample: S, play: Callable[[], Coroutine[Any, Any, None]], pause_s: float = 0.0) -> None:
        """Lets a sample's player work in the event loop, after a pause; called with the lock held."""
        sample.num_tasks += 1
        sample.idle_since = time.monotonic() + pause_s
        self._tasks.begin(sample, self._played(sample, play, pause_s), after=lambda: self._after_play(sample))

    async def _played(self, sample: S, play: Callable[[], Coroutine[Any, Any, None]], pause_s: float) -> None:
        """Runs a player. Errors are raised by `poll`, unless the sample is over."""
        try:
            if pause_s:
                await asyncio.sleep(pause_s)
            if self._error is not None:  # `poll` raises it: nobody waits for this sample
                return
            await play()
        except EnvironmentFailure as failure:
            self._fail(sample, failure)
        except Exception as error:
            with self._lock:
                if not sample.is_over:
                    self._break(error)

    def _break(self, error: Exception) -> None:
        """Makes `poll` raise an error; takes no lock, like `running`."""
        self._error = self._error or error

    def _after_play(self, sample: S) -> None:
        with self._lock:
            sample.num_tasks -= 1
            if sample.is_over and not sample.num_tasks:
                self._release(sample)

    def _finish(self, sample: S, completion: Completion) -> list[int]:
        """Returns a sample to the producer, with the lock held; returns the inner requests to abort."""
        self._finished.append(completion)
        self._retries.succeed()
        return self._leave(sample)

    def _fail(self, sample: S, failure: EnvironmentFailure) -> None:
        """Begins a sample anew, or gives it up; `poll` raises the error if the run must end."""
        with self._lock:
            if sample.is_over or self._error is not None:
                return  # dropped, or the engine has failed, and the player perhaps by that
            sample.num_failed += 1
            try:
                is_tried_again = self._retries.may_try_again(
                    sample.request.prompt, sample.num_failed, failure, keeps_prompt=self._keeps_prompt(sample)
                )
            except EnvironmentFailure as error:
                self._break(error)
                return
            if is_tried_again:
                self._begin_again(sample, self.policy.pause_s(sample.num_failed))
                inner = self._leave(sample)
            else:
                inner = self._give_up(sample)
        if inner:
            self.engine.abort(inner)

    def abort(self, request_ids: Sequence[int]) -> None:
        """Aborts requests; the players of their samples are cancelled, and their errors ignored."""
        with self._lock:
            inner = self._drop(request_ids)
        self.engine.abort(inner)

    def _drop(self, request_ids: Iterable[int]) -> list[int]:
        """Drops requests and ends their samples, with the lock held; returns the inner requests to abort."""
        dropped = set(request_ids)
        opened = [self._open.pop(number) for number in dropped if number in self._open]
        samples = [sample for request in opened for sample in request.samples]
        self._finished = [one for one in self._finished if one.request_id not in dropped]
        self._lost = [(number, sample) for number, sample in self._lost if number not in dropped]
        self._tasks.cancel(samples)
        return self._end(samples)

    def _leave(self, sample: S) -> list[int]:
        """Ends one sample of a request, with the lock held; returns the inner requests to abort."""
        opened = self._open[sample.request.id]
        opened.samples.remove(sample)
        if not opened.samples:
            del self._open[sample.request.id]
        return self._end([sample])

    def _end(self, samples: Iterable[S]) -> list[int]:
        inner = []
        for sample in samples:
            inner += self._forget(sorted(sample.in_engine))
            sample.end()
            if not sample.num_tasks:
                self._release(sample)
        return inner

    # -- results and end ----------------------------------------------------------------------------------------------

    def take_given_up(self) -> list[int]:
        with self._lock:
            given_up = self._given_up
            self._given_up = []
        return given_up

    def take_lost(self) -> list[tuple[int, int]]:
        with self._lock:
            lost = self._lost
            self._lost = []
        return lost

    def close(self) -> None:
        self._try_to_end_all()
        self._tasks.begin_close()
        try:
            super().close()  # wakes a thread that hangs in the inner engine with the lock held
        finally:
            self._try_to_end_all()  # again, because the first call may not have got the lock
            self._tasks.close()

    def _try_to_end_all(self) -> None:
        """Drops all requests, unless another thread hangs in the inner engine with the lock held."""
        if not self._lock.acquire(timeout=LOCK_TIMEOUT_S):
            return
        try:
            self._drop(list(self._open))
        finally:
            self._lock.release()
