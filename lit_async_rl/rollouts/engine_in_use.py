"""The engine in use by the producer: its calls with timeouts, its requests, and its failure."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from torch import Tensor

from lit_async_rl.engines.base import Completion, GenerationRequest, RolloutEngine
from lit_async_rl.engines.calls import EngineCalls
from lit_async_rl.engines.request_ledger import RequestLedger
from lit_async_rl.rollouts.engine_spans import EngineSpans
from lit_async_rl.utils.spans import Spans

T = TypeVar("T")


class EngineInUse:
    """Calls an engine until it fails, which is recorded; it can then be replaced.

    Args:
        engine: set up and loaded with weights.
        changed: condition notified after a failure.
        timeout_s: timeout of engine calls, see `EngineCalls`.
        vocab_size: of the policy.

    Attributes:
        engine: the engine in use.
        calls: its calls, with timeouts.
        ledger: its requests; guarded by `changed`.
        engine_error: the engine's failure (or that it hangs); None while it works.
    """

    def __init__(
        self, engine: RolloutEngine, changed: threading.Condition, timeout_s: float, vocab_size: int | None
    ) -> None:
        self.changed, self._timeout_s, self._vocab_size = changed, timeout_s, vocab_size
        self._before = (0.0, 0)  # seconds and tokens of engines that were replaced
        self._spans: EngineSpans | None = None
        self.engine_error: Exception | None = None
        self._install(engine)

    def _install(self, engine: RolloutEngine, version: int | None = None) -> None:
        self.engine, self.calls = engine, EngineCalls(engine, self._timeout_s)
        self.ledger = RequestLedger(engine, self._vocab_size, version)

    def _exchange(self, engine: RolloutEngine, version: int | None) -> None:
        """Uses another engine, which has the weights of `version`, from now on."""
        self._before = (self.busy_s, self.num_tokens)
        self._install(engine, version)
        self.engine_error = None
        if self._spans is not None:
            self._spans.restarted(engine)

    def observe(self, spans: Spans) -> None:
        """Records in a timeline what the engine does."""
        self._spans = EngineSpans(spans, self.engine)

    @property
    def busy_s(self) -> float:
        """Seconds of generation, summed over all engines so far."""
        return self._before[0] + self._counters()[0]

    @property
    def num_tokens(self) -> int:
        """Tokens generated, summed over all engines so far."""
        return self._before[1] + self._counters()[1]

    def _counters(self) -> tuple[float, int]:
        return self._attempt(self.calls.counters, (0.0, 0))

    def _attempt(self, call: Callable[[], T], otherwise: T) -> T:
        """The result of a call; `otherwise` after a failure of the engine, which is recorded."""
        try:
            return call()
        except Exception as error:
            self.break_engine(error, self.engine)
            return otherwise

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
        """Restores the random state; errors are raised, because the resume would not be exact."""
        self.calls.ask("set_random_state", lambda: self.engine.set_random_state(state))

    def break_engine(self, error: Exception, engine: RolloutEngine) -> None:
        """Records a failure of the current engine."""
        with self.changed:
            if engine is self.engine and self.engine_error is None:
                self.engine_error = error
                self.changed.notify_all()
