"""Base class of engines that make each sample from many requests of an inner engine: environments and agents.

| who | waits for | woken by |
|---|---|---|
| `poll` (producer's thread) | a finished sample | the inner engine, and every `POLL_INTERVAL_S` |
| event loop's thread | environments and agents | themselves, bounded by their time limits |
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from abc import abstractmethod
from collections.abc import Iterable

from torch import Tensor

from lit_async_rl.engines.base import EngineWrapper, RolloutEngine
from lit_async_rl.engines.completion_check import RequestLedger
from lit_async_rl.errors import SetupError
from lit_async_rl.models.tokenizer import TextCodec
from lit_async_rl.runtime.files import LimitedLog
from lit_async_rl.runtime.loop import LoopTasks, SharedLoop
from lit_async_rl.runtime.retries import Retries, TryPolicy
from lit_async_rl.types import Completion

log = logging.getLogger(__name__)
POLL_INTERVAL_S = 0.01  # while environments work: their responses do not wake the inner engine's `poll`
THREAD_NAME = "environments"  # of the event loop
LOCK_TIMEOUT_S = 1.0  # longest wait of `close` for a thread that submits


class MultiRequestEngine(EngineWrapper):
    """Plays samples in an event loop, each with as many requests to `engine` as it needs.

    Args:
        engine: engine that generates the turns.
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
                f"{type(self).__name__} needs engine.in_flight_weight_updates=true: an episode is many requests"
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
        self._finished: list[Completion] = []
        self._given_up: list[int] = []  # ids of requests
        self._lost: list[tuple[int, int]] = []  # requests and samples
        self._error: BaseException | None = None
        self._retries = Retries(policy)
        self._warnings = LimitedLog(log)
        self._tasks = LoopTasks(SharedLoop(THREAD_NAME, player))
        self._is_successor = False  # replaces an engine that has logged its warnings
        self._trains = True  # not if its samples are of a validation

    def _share_loop(self, other: MultiRequestEngine) -> None:
        """Makes another engine use the event loop of this one."""
        other._tasks = LoopTasks(self._tasks.shared)

    def _use(self, engine: RolloutEngine, codec: TextCodec) -> None:
        """Prepares for turns of an engine that is set up."""
        self._codec = codec
        self._ledger = RequestLedger(engine, codec.vocab_size)

    def around(self, engine: RolloutEngine, codec: TextCodec) -> RolloutEngine:
        """This environment or agent around another engine, in the same event loop and without training."""
        other = self.with_engine(engine)
        other._trains = False
        other._use(engine, codec)
        self._share_loop(other)
        return other

    def fresh(self, out_of_memory: bool = False) -> RolloutEngine:
        """See `RolloutEngine`; environment or agent stay the same object, in the same event loop."""
        other = self.with_engine(self.engine.fresh(out_of_memory))
        other.special_tokens = self.special_tokens
        other._is_successor = True
        self._share_loop(other)
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
        if self._ledger is None:
            raise SetupError(f"{type(self).__name__} is used before it was set up")
        return self._ledger

    @property
    def _tokenizer(self) -> TextCodec:
        if self._codec is None:
            raise SetupError(f"{type(self).__name__} is used before it was set up")
        return self._codec

    def poll(self, timeout_s: float) -> list[Completion]:
        deadline = time.monotonic() + timeout_s
        while True:
            with self._lock:
                if self._error is not None:
                    raise self._error
                finished = self._finished
                self._finished = []
                waiting = self._is_waiting
            remaining = deadline - time.monotonic()
            if finished or remaining <= 0:
                return finished
            turns = self.engine.poll(min(remaining, POLL_INTERVAL_S) if waiting else remaining)
            for completion in self._open_ledger.listed(turns, "poll"):
                self._end_turn(completion)

    @property
    @abstractmethod
    def _is_waiting(self) -> bool:
        """Whether an environment or agent works, so that a sample may end or go on without the inner engine."""

    @abstractmethod
    def _end_turn(self, completion: Completion) -> None:
        """Passes a completion of the inner engine to the sample that requested it."""

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
        """Ends all samples; does nothing if another thread hangs in the inner engine with the lock held."""
        if not self._lock.acquire(timeout=LOCK_TIMEOUT_S):
            return
        try:
            self._end_all()
        finally:
            self._lock.release()

    @abstractmethod
    def _end_all(self) -> None:
        """Ends all samples without results; called with the lock held."""
