"""The engine as the producer sees it: calls with limits, the thread that polls, replacement after a failure."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from torch import Tensor

from lit_async_rl.engines.base import RolloutEngine
from lit_async_rl.engines.completion_check import RequestLedger
from lit_async_rl.errors import CompletionError, EnvironmentFailure, ProducerError, StalledError, describe
from lit_async_rl.models.weights import lasts
from lit_async_rl.runtime.guarded_calls import LastKnown, call, feed
from lit_async_rl.runtime.spans import ENGINE, WEIGHTS, recorder
from lit_async_rl.runtime.threads import new_thread
from lit_async_rl.runtime.waiting import Wait
from lit_async_rl.types import Completion, GenerationRequest

# -- Engine calls with timeouts, so that an engine that hangs cannot block its caller ---------------------------------


T = TypeVar("T")
GRACE_S = 5.0  # lets the engine's own timeout, whose message says more, fire first
POLL_INTERVAL_S = 0.2  # how soon a stop, a dead thread or a hung reward is noticed
log = logging.getLogger(__name__)


class EngineCalls:
    """Calls an engine from any thread, with a time limit.

    A call that exceeds its limit raises `StalledError` and is abandoned in its thread; the engine must then be
    discarded. `poll` has a thread of its own.

    Args:
        engine: any.
        timeout_s: `data.limits.rollout_timeout_s`; a longer `update_timeout_s` of the engine takes precedence.
        check: called during waits; raises to end them.
    """

    def __init__(self, engine: RolloutEngine, timeout_s: float, check: Callable[[], None] = lambda: None) -> None:
        self.engine = engine
        self.name = type(engine).__name__
        self.timeout_s = timeout_s
        self._check = check
        self._counters = LastKnown(lambda: (float(engine.busy_s), int(engine.num_tokens)), (0.0, 0))

    def counters(self) -> tuple[float, int]:
        """Seconds and tokens generated; the last known ones if the engine does not answer."""
        return self._counters.get()

    def _wait(self, what: str) -> Wait:
        update_s = self.engine.update_timeout_s
        if what == "setup":
            seconds = self.engine.startup_timeout_s
            setting = "data.engine.startup_timeout_s"
        elif update_s > self.timeout_s:
            seconds = update_s
            setting = "data.engine.update_timeout_s"
        else:
            seconds = self.timeout_s
            setting = "data.limits.rollout_timeout_s"
        message = f"{self.name}.{what} did not return within {setting}={seconds:g} s, and no token was sampled"
        return Wait(seconds + min(GRACE_S, 0.1 * seconds), message, self.counters, check=self._check)

    def ask(self, what: str, function: Callable[[], T]) -> T:
        """The result of any call; `what` names the call in errors."""
        return call(function, self._wait(what))

    def setup(self, model: str) -> None:
        """Sets the engine up within `startup_timeout_s`. One that is ready too late is closed."""
        is_abandoned = threading.Event()

        def set_up() -> None:
            try:
                self.engine.setup(model)
            finally:
                if is_abandoned.is_set():  # it was closed before it had anything to close
                    self.engine.close()

        try:
            self.ask("setup", set_up)
        except BaseException:
            is_abandoned.set()
            raise

    def load_weights(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Loads weights, iterating in the caller's thread; the time that takes does not count."""
        wait = self._wait("load_weights")
        feed(lambda fed: self.engine.load_weights(version, fed), weights, wait, lasts=lasts)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self.ask("submit", lambda: self.engine.submit(requests))

    def abort(self, request_ids: Sequence[int]) -> None:
        self.ask("abort", lambda: self.engine.abort(request_ids))

    def sleep(self) -> None:
        self.ask("sleep", self.engine.sleep)

    def partial_completions(self) -> Any:
        """Partial completions, not validated yet."""
        return self.ask("partial_completions", self.engine.partial_completions)

    def close(self, limit_s: float) -> None:
        """Closes the engine; beyond the limit, in the background."""
        try:
            call(self.engine.close, Wait(limit_s, f"{self.name}.close did not return within {limit_s:g} s"))
        except StalledError as error:
            log.warning("the engine was not closed: %s; the engine is abandoned, and its memory may stay in use", error)

    def end(self, limit_s: float) -> None:
        """Closes what engines share; beyond the limit, in the background."""
        try:
            call(self.engine.end, Wait(limit_s, f"{self.name}.end did not return within {limit_s:g} s"))
        except StalledError as error:
            log.warning("%s; the engine is abandoned", error)


# -- Spans of the engine in the timeline of a run: generation, weight updates, restarts -------------------------------


class EngineSpans:
    """Records updates of the weights, restarts, and generation of engines that do not record it themselves.

    Of those only the totals `busy_s` and `num_tokens` are known; their gain in a call of `poll` is drawn at its end.

    Args:
        engine: the engine in use.
    """

    def __init__(self, engine: RolloutEngine) -> None:
        self._recorder = recorder()
        self._updates = self._recorder.lane(WEIGHTS)
        self._lane = self._recorder.lane(ENGINE)
        self._watch(engine)

    def _watch(self, engine: RolloutEngine) -> None:
        self._is_silent = not engine.records_spans
        self._drawn_until = 0.0
        self._busy_s = 0.0
        self._num_tokens = 0

    def loaded(self, version: int, began: float) -> None:
        """The engine has taken these weights."""
        self._updates.add("update_weights", began, time.monotonic() - began, version, version=version)

    def restarted(self, engine: RolloutEngine) -> None:
        """Another engine takes the place of one that failed."""
        self._updates.instant("engine restarted")
        self._watch(engine)

    def polled(self, engine: RolloutEngine, began: float, version: int | None) -> None:
        """`poll` has returned; it was called at `began`."""
        if not self._is_silent or not self._recorder.is_started:
            return
        known_s = engine.busy_s  # the totals are read once: they grow meanwhile
        known_tokens = engine.num_tokens
        busy_s = known_s - self._busy_s
        num_tokens = known_tokens - self._num_tokens
        self._busy_s = known_s
        self._num_tokens = known_tokens
        if busy_s > 0:
            ended = time.monotonic()
            # Time passes between the counter and the clock, by another amount in each poll: spans must not overlap.
            start = max(ended - busy_s, self._drawn_until)
            self._drawn_until = ended
            self._lane.add("decode", start, ended - start, version, version=version, tokens=num_tokens)


# -- The engine in use, and the thread that polls it -------------------------------------------------------------------


class EngineListener:
    """Calls an engine until it fails, polls it in a thread, and passes its completions on.

    It records a failure, and another engine can take over. A thread that hangs inside an engine is abandoned when the
    engine is replaced, and its results are ignored.

    Args:
        engine: set up and loaded with weights.
        changed: condition held while completions are passed on, notified after failures.
        on_completion: called in the thread for each completion, with `changed` held.
        on_turn: called in the thread at least every `POLL_INTERVAL_S` unless the engine hangs.
        timeout_s: timeout of engine calls, see `EngineCalls`.
        vocab_size: of the policy.
        on_given_up: called as `on_completion`, for each request that the engine gave up.
        on_lost: likewise for each such sample, with its request and number.

    Attributes:
        engine: the engine in use.
        calls: its calls, with timeouts.
        ledger: its requests; guarded by `changed`.
        engine_error: the engine's failure or hang; None while it works.
        error: any other failure of the thread.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        changed: threading.Condition,
        on_completion: Callable[[Completion], None],
        on_turn: Callable[[], None],
        timeout_s: float = 600.0,
        vocab_size: int | None = None,
        on_given_up: Callable[[int], None] = lambda request_id: None,
        on_lost: Callable[[int, int], None] = lambda request_id, sample: None,
    ) -> None:
        self.changed = changed
        self.engine_error: Exception | None = None
        self.error: BaseException | None = None
        self._on_completion = on_completion
        self._on_turn = on_turn
        self._on_given_up = on_given_up
        self._on_lost = on_lost
        self._timeout_s = timeout_s
        self._vocab_size = vocab_size
        self._before = (0.0, 0)  # seconds and tokens of engines that were replaced
        self.num_aborted = 0  # tokens of the engine in use that were dropped before their completions were done
        self._num_received = 0  # and those that it handed over
        self._spans = EngineSpans(engine)
        # Ends the thread after its current `poll`; the thread also sleeps on it while an engine that failed is not
        # replaced yet. Not `changed`: a stop must get through while a call that hangs holds that.
        self._stopped = threading.Event()
        self._install(engine)
        self._thread = self._new_thread()

    def _install(self, engine: RolloutEngine, version: int | None = None) -> None:
        self.engine = engine
        self.calls = EngineCalls(engine, self._timeout_s)
        self.ledger = RequestLedger(engine, self._vocab_size, version)

    def _new_thread(self) -> threading.Thread:
        # One for each engine: a thread that hangs in `poll` cannot be ended, only left behind. `engine is self.engine`
        # ends it if it returns after all, and has its completions ignored.
        return new_thread(self._run, self.engine, name="producer")

    # -- calls, from any thread ----------------------------------------------------------------------------------------

    @property
    def busy_s(self) -> float:
        """Seconds of generation, summed over all engines so far."""
        return self._before[0] + self._counters()[0]

    @property
    def num_tokens(self) -> int:
        """Tokens generated, summed over all engines so far."""
        return self._before[1] + self._counters()[1]

    @property
    def num_under_way(self) -> int:
        """Tokens generated and not handed over, which are lost with the engine in use."""
        return max(0, self._counters()[1] - self._num_received - self.num_aborted)

    def _counters(self) -> tuple[float, int]:
        return self._attempt(self.calls.counters, (0.0, 0))

    def _attempt(self, call: Callable[[], T], otherwise: T) -> T:
        """The result of a call; after a failure of the engine, which is recorded, `otherwise`."""
        try:
            return call()
        except Exception as error:
            self.break_engine(error, self.engine)
            return otherwise

    def has_loaded(self, version: int) -> None:
        """Records the engine's version; later requests get no older tokens."""
        with self.changed:
            self.ledger.loaded = self.ledger.newest = version

    def load_weights(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Loads new weights if the engine works; a failure is recorded."""
        if self.engine_error is not None:
            return
        # `newest` before the call: in flight, tokens of the new version may come before it returns. `loaded` after it:
        # only requests from then on are sure to get no older token. The lock for each of them, because the producer's
        # thread checks completions against both, and not for the call, which takes as long as the weights travel.
        with self.changed:
            self.ledger.newest = version
        began = time.monotonic()
        try:
            self.calls.load_weights(version, weights)
        except Exception as error:  # `take` raises it, or another engine gets the weights
            self.break_engine(error, self.engine)
        else:
            self.has_loaded(version)
            self._spans.loaded(version, began)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Submits requests if the engine works; a failure is recorded.

        Raises:
            ValueError: the request cannot be served by any engine.
        """
        if not requests or self.engine_error is not None:
            return
        with self.changed:
            self.ledger.open(requests)  # before the call: a completion may come before `submit` returns
        try:
            self.calls.submit(requests)
        except ValueError:
            raise
        except Exception as error:
            self.break_engine(error, self.engine)

    def abort(self, request_ids: Sequence[int]) -> None:
        """Aborts requests if the engine works."""
        if not request_ids or self.engine_error is not None:
            return
        with self.changed:
            self.ledger.abort(request_ids)  # before the call: a completion that comes after it is late, and no fault
        self._attempt(lambda: self.calls.abort(request_ids), None)

    def sleep(self) -> None:
        """Has the engine free its memory, if it works and is set to."""
        if self.engine_error is None and self.engine.sleep_level:
            self._attempt(self.calls.sleep, None)

    def partial_completions(self) -> list[Completion]:
        """Partial completions of running requests; empty if the engine cannot provide them."""

        def ask() -> list[Completion]:
            found = self.calls.partial_completions()
            with self.changed:
                return self.ledger.receive_partials(found)

        return self._attempt(ask, []) if self.engine_error is None else []

    def random_state(self) -> Tensor | None:
        """Random state of the engine, if it works and has one."""
        if self.engine_error is not None:
            return None
        return self._attempt(lambda: self.calls.ask("random_state", self.engine.random_state), None)

    def set_random_state(self, state: Tensor) -> None:
        """Restores the random state; raises errors, because the resume would not be exact."""
        self.calls.ask("set_random_state", lambda: self.engine.set_random_state(state))

    def break_engine(self, error: Exception, engine: RolloutEngine) -> None:
        """Records the first failure of the engine in use, and none of a replaced one."""
        with self.changed:
            if engine is self.engine and self.engine_error is None:
                self.engine_error = error
                self.changed.notify_all()  # the trainer may wait for a group that will never be finished

    # -- thread --------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts polling."""
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Stops the thread, a daemon; False if it did not end in time."""
        self._stopped.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def is_working(self) -> bool:
        """Whether thread and engine are running without failure."""
        return self.error is None and self.engine_error is None and self._thread.is_alive()

    @property
    def has_delivered(self) -> bool:
        """Whether the engine in use works and has finished a completion."""
        return self.engine_error is None and self._num_received > 0

    def check_thread(self) -> None:
        """Raises a failure of the thread.

        Raises:
            ProducerError: the thread failed, for another reason than the engine.
        """
        if self.error is not None:
            raise ProducerError(f"rollout generation failed: {describe(self.error)}") from self.error

    def check_engine(self) -> None:
        """Raises a failure of the engine.

        Raises:
            StalledError: the engine hangs.
            ProducerError: the engine failed, or the thread is not running.
        """
        error = self.engine_error
        if isinstance(error, StalledError):
            raise error
        if error is not None:
            raise ProducerError(f"rollout generation failed: {describe(error)}") from error
        if not self._thread.is_alive():
            raise ProducerError("the producer thread is not running: it was stopped, or never started")

    def replace(self, engine: RolloutEngine, requests: Sequence[GenerationRequest], version: int | None = None) -> None:
        """Switches to another engine that has the weights of `version`, and submits these requests."""
        # Engine, ledger, error and thread change at once, or a completion would be checked against another's requests.
        with self.changed:
            self._before = (self.busy_s, self.num_tokens)
            self.num_aborted = 0
            self._num_received = 0
            self._install(engine, version)
            self.engine_error = None
            self._spans.restarted(engine)
            self.submit(requests)
            self._thread = self._new_thread()
            self._thread.start()

    def _run(self, engine: RolloutEngine) -> None:
        try:
            while not self._stopped.is_set() and engine is self.engine:
                for completion in self._poll(engine):
                    with self.changed:  # for each completion anew, so that the trainer gets its turn in between
                        self._receive(completion, engine)
                for request_id in engine.take_given_up():
                    with self.changed:
                        if engine is self.engine:
                            self.ledger.abort([request_id])
                            self._on_given_up(request_id)
                for request_id, sample in engine.take_lost():
                    with self.changed:
                        if engine is self.engine and self.ledger.lose(request_id, sample):
                            self._on_lost(request_id, sample)
                if engine is self.engine:  # else the thread of the new one has the turns
                    self._turn()
        except BaseException as error:
            with self.changed:
                if engine is self.engine:  # else nobody waits for this thread any more
                    self.error = error
                    self.changed.notify_all()

    def _turn(self) -> None:
        try:
            self._on_turn()
        except BaseException as error:
            with self.changed:  # an error of the run, also if the engine is replaced meanwhile
                self.error = error
                self.changed.notify_all()
            raise

    def _receive(self, completion: Any, engine: RolloutEngine) -> None:
        """Passes completions on, unless the engine was replaced or has failed."""
        if engine is not self.engine or self.engine_error is not None:
            return
        try:
            is_wanted = self.ledger.receive(completion)
        except CompletionError as error:
            self.break_engine(error, engine)
            return
        self._num_received += completion.num_trained_tokens
        if is_wanted:
            self._on_completion(completion)

    def _poll(self, engine: RolloutEngine) -> Sequence[Any]:
        if self.engine_error is not None:
            self._stopped.wait(POLL_INTERVAL_S)
            return []
        try:
            began = time.monotonic()
            completions = self.ledger.listed(engine.poll(POLL_INTERVAL_S), "poll")
            self._spans.polled(engine, began, self.ledger.loaded)
            return completions
        except EnvironmentFailure:  # the user's, not the engine's
            if engine is self.engine and self.engine_error is None:
                raise
            return []  # of an engine that has failed before, and is being replaced
        except Exception as error:
            self.break_engine(error, engine)
            return []
