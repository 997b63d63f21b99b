"""The thread that polls the engine, and replacement of an engine that hangs or fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from lit_async_rl.engines.base import Completion, GenerationRequest, RolloutEngine
from lit_async_rl.errors import CompletionError, EnvironmentFailure, ProducerError, StalledError, describe
from lit_async_rl.rollouts.engine_in_use import EngineInUse

POLL_S = 0.2  # how soon a stop, a dead thread or a hung reward is noticed


class EngineListener(EngineInUse):
    """Polls the engine, passes completions on, and records failures.

    A thread that hangs inside an engine cannot be stopped. It is abandoned when the engine is replaced, and its results
    are ignored.

    Args:
        engine: set up and loaded with weights.
        changed: condition held while completions are passed on, notified after failures.
        on_completion: called in the thread for each completion, with `changed` held.
        on_turn: called in the thread at least every `POLL_S` unless the engine hangs.
        on_given_up: called in the thread for each request that the engine gave up, with `changed` held.
        timeout_s: timeout of engine calls, see `EngineCalls`.
        vocab_size: of the policy.

    Attributes:
        error: any other failure of the thread than the engine's.
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
    ) -> None:
        super().__init__(engine, changed, timeout_s, vocab_size)
        self.error: BaseException | None = None
        self._on_completion, self._on_turn, self._on_given_up = on_completion, on_turn, on_given_up
        self._stopped = threading.Event()
        self._thread = self._new_thread()

    def _new_thread(self) -> threading.Thread:
        return threading.Thread(target=self._run, args=(self.engine,), name="producer", daemon=True)

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

    def replace(self, engine: RolloutEngine, requests: Sequence[GenerationRequest], version: int | None = None) -> None:
        """Switches to another engine that has the weights of `version`, and submits these requests."""
        with self.changed:
            self._exchange(engine, version)
            self.submit(requests)
            self._thread = self._new_thread()
            self._thread.start()

    def _run(self, engine: RolloutEngine) -> None:
        try:
            while not self._stopped.is_set() and engine is self.engine:
                for completion in self._poll(engine):
                    with self.changed:
                        self._receive(completion, engine)
                for request_id in engine.take_given_up():
                    with self.changed:
                        if engine is self.engine:
                            self.ledger.abort([request_id])
                            self._on_given_up(request_id)
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
            if engine is self.engine and self.engine_error is None:
                raise
            return []  # of an engine that has failed before, and is being replaced
        except Exception as error:
            self.break_engine(error, engine)
            return []
