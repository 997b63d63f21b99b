"""The thread that polls the engine, and the engine's place, which another one can take when it hangs or breaks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from lit_async_rl.engines.base import Completion, GenerationRequest, RolloutEngine
from lit_async_rl.errors import EnvironmentFailure, ProducerError, StalledError, describe

POLL_S = 0.2  # how soon a stop, a dead thread or a hung reward is noticed


class EngineListener:
    """Hands completions on; keeps what goes wrong.

    A thread that hangs in an engine cannot be ended. It is left to itself when the engine is replaced, and nobody
    listens to it any more.

    Args:
        engine: set up and loaded with weights.
        changed: held when completions are handed on, notified when something breaks.
        on_completion: called in the thread with each completion, `changed` held.
        on_turn: called in the thread at least every `POLL_S`, as long as the engine does not hang.

    Attributes:
        engine: that is listened to.
        engine_error: what it died of, or that it hangs; None while it works. Another one can take its place.
        error: what else broke the thread.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        changed: threading.Condition,
        on_completion: Callable[[Completion], None],
        on_turn: Callable[[], None],
    ) -> None:
        self.engine, self.changed = engine, changed
        self.engine_error: Exception | None = None
        self.error: BaseException | None = None
        self._on_completion, self._on_turn = on_completion, on_turn
        self._before = (0.0, 0)  # seconds and tokens of engines that were replaced
        self._stopped = threading.Event()
        self._thread = self._new_thread()

    def _new_thread(self) -> threading.Thread:
        return threading.Thread(target=self._run, args=(self.engine,), name="producer", daemon=True)

    def start(self) -> None:
        """Begins to poll."""
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Ends the thread; False if it did not end in time (it is a daemon, so the process can still exit)."""
        self._stopped.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def is_working(self) -> bool:
        """Whether thread and engine work: neither stopped nor broken."""
        return self.error is None and self.engine_error is None and self._thread.is_alive()

    def check_thread(self) -> None:
        """Raises what broke the thread.

        Raises:
            ProducerError: something did, other than the engine.
        """
        if self.error is not None:
            raise ProducerError(f"rollout generation failed: {describe(self.error)}") from self.error

    def check_engine(self) -> None:
        """Raises what the engine died of.

        Raises:
            StalledError: it hangs.
            ProducerError: it broke, or the thread does not run.
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
        """Seconds that all engines so far generated."""
        return self._before[0] + self.engine.busy_s

    @property
    def num_tokens(self) -> int:
        """Tokens that all engines so far generated."""
        return self._before[1] + self.engine.num_tokens

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Gives requests to the engine if it works; if it breaks here that is kept, too.

        Raises:
            ValueError: no engine could serve them.
        """
        if not requests or self.engine_error is not None:
            return
        try:
            self.engine.submit(requests)
        except ValueError:
            raise
        except Exception as error:
            self.break_engine(error, self.engine)

    def abort(self, request_ids: Sequence[int]) -> None:
        """Ends requests, if the engine works."""
        if not request_ids or self.engine_error is not None:
            return
        try:
            self.engine.abort(request_ids)
        except Exception as error:
            self.break_engine(error, self.engine)

    def partial_completions(self) -> list[Completion]:
        """What running requests have so far, as far as the engine works and can say."""
        if self.engine_error is not None:
            return []
        try:
            return self.engine.partial_completions()
        except Exception as error:
            self.break_engine(error, self.engine)
            return []

    def break_engine(self, error: Exception, engine: RolloutEngine) -> None:
        """This engine cannot be used any more."""
        with self.changed:
            if engine is self.engine and self.engine_error is None:
                self.engine_error = error
                self.changed.notify_all()

    def replace(self, engine: RolloutEngine, requests: Sequence[GenerationRequest]) -> None:
        """Goes on with another engine that has weights, and these requests."""
        with self.changed:
            self._before = (self.busy_s, self.num_tokens)
            self.engine, self.engine_error = engine, None
            self.submit(requests)
            self._thread = self._new_thread()
            self._thread.start()

    def _run(self, engine: RolloutEngine) -> None:
        try:
            while not self._stopped.is_set() and engine is self.engine:
                for completion in self._poll(engine):
                    with self.changed:
                        if engine is self.engine:
                            self._on_completion(completion)
                self._on_turn()
        except BaseException as error:
            with self.changed:
                self.error = error
                self.changed.notify_all()

    def _poll(self, engine: RolloutEngine) -> list[Completion]:
        if self.engine_error is not None:
            self._stopped.wait(POLL_S)
            return []
        try:
            return engine.poll(POLL_S)
        except EnvironmentFailure:  # the user's, not the engine's
            raise
        except Exception as error:
            self.break_engine(error, engine)
            return []
