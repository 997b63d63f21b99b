"""The thread that polls the engine, and the engine's place, which another one can take when it hangs or breaks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from lit_async_rl.engines.base import Completion, GenerationRequest, RolloutEngine
from lit_async_rl.engines.calls import EngineCalls
from lit_async_rl.engines.request_ledger import RequestLedger
from lit_async_rl.errors import CompletionError, EnvironmentFailure, ProducerError, StalledError, describe

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
        timeout_s: longest that a call of the engine may take, see `EngineCalls`.
        vocab_size: of the policy.

    Attributes:
        engine: that is listened to.
        calls: its calls, bounded in time.
        ledger: what it was asked for; guarded by `changed`.
        engine_error: what it died of, or that it hangs; None while it works. Another one can take its place.
        error: what else broke the thread.
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
        self._thread = self._new_thread()

    def _install(self, engine: RolloutEngine, version: int | None = None) -> None:
        self.engine, self.calls = engine, EngineCalls(engine, self._timeout_s)
        self.ledger = RequestLedger(engine, self._vocab_size, version)

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
        return self._before[0] + self._counters()[0]

    @property
    def num_tokens(self) -> int:
        """Tokens that all engines so far generated."""
        return self._before[1] + self._counters()[1]

    def _counters(self) -> tuple[float, int]:
        try:
            return self.calls.counters()
        except Exception as error:
            self.break_engine(error, self.engine)
            return 0.0, 0

    def has_loaded(self, version: int) -> None:
        """The engine has the weights of `version`: those of no later request are older."""
        with self.changed:
            self.ledger.loaded = self.ledger.newest = version

    def load_weights(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Gives the engine new weights if it works; if it breaks here that is kept, too."""
        if self.engine_error is not None:
            return
        with self.changed:
            self.ledger.newest = version
        try:
            self.calls.load_weights(version, weights)
        except Exception as error:  # `take` raises it, or another engine gets the weights
            self.break_engine(error, self.engine)
        else:
            self.has_loaded(version)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Gives requests to the engine if it works; if it breaks here that is kept, too.

        Raises:
            ValueError: no engine could serve them.
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
        """Ends requests, if the engine works."""
        if not request_ids or self.engine_error is not None:
            return
        with self.changed:
            self.ledger.abort(request_ids)
        try:
            self.calls.abort(request_ids)
        except Exception as error:
            self.break_engine(error, self.engine)

    def partial_completions(self) -> list[Completion]:
        """What running requests have so far, as far as the engine works and can say."""
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
        """The engine's, as far as it works and has one."""
        if self.engine_error is not None:
            return None
        try:
            return self.calls.ask("random_state", self.engine.random_state)
        except Exception as error:
            self.break_engine(error, self.engine)
            return None

    def set_random_state(self, state: Tensor) -> None:
        """Raises what the engine raises: a resume that cannot go on exactly is no resume."""
        self.calls.ask("set_random_state", lambda: self.engine.set_random_state(state))

    def break_engine(self, error: Exception, engine: RolloutEngine) -> None:
        """This engine cannot be used any more."""
        with self.changed:
            if engine is self.engine and self.engine_error is None:
                self.engine_error = error
                self.changed.notify_all()

    def replace(self, engine: RolloutEngine, requests: Sequence[GenerationRequest], version: int | None = None) -> None:
        """Goes on with another engine that has the weights of `version`, and these requests."""
        with self.changed:
            self._before = (self.busy_s, self.num_tokens)
            self._install(engine, version)
            self.engine_error = None
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
        """Nothing more from an engine that was replaced, or has broken."""
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
            return self.ledger.listed(engine.poll(POLL_S), "poll")
        except EnvironmentFailure:  # the user's, not the engine's
            raise
        except Exception as error:
            self.break_engine(error, engine)
            return []
