"""The thread that polls the engine, and replacement of an engine that hangs or fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from lit_async_rl.engines.base import Completion, GenerationRequest, RolloutEngine
from lit_async_rl.engines.calls import EngineCalls
from lit_async_rl.engines.request_ledger import RequestLedger
from lit_async_rl.errors import CompletionError, EnvironmentFailure, ProducerError, StalledError, describe
from lit_async_rl.rollouts.engine_spans import EngineSpans
from lit_async_rl.utils.spans import Spans

POLL_S = 0.2  # how soon a stop, a dead thread or a hung reward is noticed


class EngineListener:
    """Polls the engine, passes completions on, and records failures.

    A thread that hangs inside an engine cannot be stopped. It is abandoned when the engine is replaced, and its results
    are ignored.

    Args:
        engine: set up and loaded with weights.
        changed: condition held while completions are passed on, notified after failures.
        on_completion: called in the thread for each completion, with `changed` held.
        on_turn: called in the thread at least every `POLL_S` unless the engine hangs.
        timeout_s: timeout of engine calls, see `EngineCalls`.
        vocab_size: of the policy.

    Attributes:
        engine: the engine in use.
        calls: its calls, with timeouts.
        ledger: its requests; guarded by `changed`.
        engine_error: the engine's failure (or that it hangs); None while it works. The engine can be replaced.
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
    ) -> None:
        self.changed, self._timeout_s, self._vocab_size = changed, timeout_s, vocab_size
        self._install(engine)
        self.engine_error: Exception | None = None
        self.error: BaseException | None = None
        self._on_completion, self._on_turn = on_completion, on_turn
        self._before = (0.0, 0)  # seconds and tokens of engines that were replaced
        self._stopped = threading.Event()
        self._spans: EngineSpans | None = None
        self._thread = self._new_thread()

    def _install(self, engine: RolloutEngine, version: int | None = None) -> None:
        self.engine, self.calls = engine, EngineCalls(engine, self._timeout_s)
        self.ledger = RequestLedger(engine, self._vocab_size, version)

    def _new_thread(self) -> threading.Thread:
        return threading.Thread(target=self._run, args=(self.engine,), name="producer", daemon=True)

    def observe(self, spans: Spans) -> None:
        """Records in a timeline what the engine does."""
        self._spans = EngineSpans(spans, self.engine)

    def start(self) -> None:
        """Starts polling."""
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Stops the thread; False if it did not end in time (it is a daemon, so the process can still exit)."""
        self._stopped.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def is_working(self) -> bool:
        """Whether thread and engine are running without failure."""
        return self.error is None and self.engine_error is None and self._thread.is_alive()

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

    @property
    def busy_s(self) -> float:
        """Seconds of generation, summed over all engines so far."""
        return self._before[0] + self._counters()[0]

    @property
    def num_tokens(self) -> int:
        """Tokens generated, summed over all engines so far."""
        return self._before[1] + self._counters()[1]

    def _counters(self) -> tuple[float, int]:
        try:
            return self.calls.counters()
        except Exception as error:
            self.break_engine(error, self.engine)
            return 0.0, 0

    def has_loaded(self, version: int) -> None:
        """Records that the engine has the weights of `version`; later requests get no older tokens."""
        with self.changed:
            self.ledger.loaded = self.ledger.newest = version

    def load_weights(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Loads new weights if the engine works; a failure is recorded."""
        if self.engine_error is not None:
            return
        with self.changed:
            self.ledger.newest = version
        began = time.monotonic()
        try:
            self.calls.load_weights(version, weights)
        except Exception as error:  # `take` raises it, or another engine gets the weights
            self.break_engine(error, self.engine)
        else:
            self.has_loaded(version)
            if self._spans is not None:
                self._spans.loaded(version, began)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Submits requests if the engine works; a failure is recorded.

        Raises:
            ValueError: the request cannot be served by any engine.
        """
        if not requests or self.engine_error is not None:
            return
        with self.changed:
            self.ledger.open(requests)
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
            self.ledger.abort(request_ids)
        try:
            self.calls.abort(request_ids)
        except Exception as error:
            self.break_engine(error, self.engine)

    def sleep(self) -> None:
        """Has the engine free its memory, if it works and is set to."""
        if self.engine_error is not None or not self.engine.sleep_level:
            return
        try:
            self.calls.sleep()
        except Exception as error:
            self.break_engine(error, self.engine)

    def partial_completions(self) -> list[Completion]:
        """Partial completions of running requests; empty if the engine cannot provide them."""
        if self.engine_error is not None:
            return []
        try:
            found = self.calls.partial_completions()
            with self.changed:
                return self.ledger.receive_partials(found)
        except Exception as error:
            self.break_engine(error, self.engine)
            return []

    def random_state(self) -> Tensor | None:
        """Random state of the engine, if it works and has one."""
        if self.engine_error is not None:
            return None
        try:
            return self.calls.ask("random_state", self.engine.random_state)
        except Exception as error:
            self.break_engine(error, self.engine)
            return None

    def set_random_state(self, state: Tensor) -> None:
        """Restores the random state; errors are raised, because the resume would not be exact."""
        self.calls.ask("set_random_state", lambda: self.engine.set_random_state(state))

    def break_engine(self, error: Exception, engine: RolloutEngine) -> None:
        """Records a failure of the current engine."""
        with self.changed:
            if engine is self.engine and self.engine_error is None:
                self.engine_error = error
                self.changed.notify_all()

    def replace(self, engine: RolloutEngine, requests: Sequence[GenerationRequest], version: int | None = None) -> None:
        """Switches to another engine that has the weights of `version`, and submits these requests."""
        with self.changed:
            self._before = (self.busy_s, self.num_tokens)
            self._install(engine, version)
            self.engine_error = None
            if self._spans is not None:
                self._spans.restarted(engine)
            self.submit(requests)
            self._thread = self._new_thread()
            self._thread.start()

    def _run(self, engine: RolloutEngine) -> None:
        try:
            while not self._stopped.is_set() and engine is self.engine:
                for completion in self._poll(engine):
                    with self.changed:
                        self._receive(completion, engine)
                self._on_turn()
        except BaseException as error:
            with self.changed:
                self.error = error
                self.changed.notify_all()

    def _receive(self, completion: Any, engine: RolloutEngine) -> None:
        """Passes completions on, unless the engine was replaced or has failed."""
        if engine is not self.engine or self.engine_error is not None:
            return
        try:
            is_wanted = self.ledger.receive(completion)
        except CompletionError as error:
            self.break_engine(error, engine)
            return
        if is_wanted:
            self._on_completion(completion)

    def _poll(self, engine: RolloutEngine) -> Sequence[Any]:
        if self.engine_error is not None:
            self._stopped.wait(POLL_S)
            return []
        try:
            began, spans = time.monotonic(), self._spans
            completions = self.ledger.listed(engine.poll(POLL_S), "poll")
            if spans is not None:
                spans.polled(engine, began, self.ledger.loaded)
            return completions
        except EnvironmentFailure:  # the user's, not the engine's
            raise
        except Exception as error:
            self.break_engine(error, engine)
            return []
