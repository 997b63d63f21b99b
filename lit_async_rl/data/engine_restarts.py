"""Replaces an engine that hangs or fails by a fresh one with the current weights.

Knows nothing of steps, ranks and checkpoints, unlike `rollout_source.py`, its only importer.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import traceback
from collections.abc import Callable, Iterator

from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.memory import garbage_collection_cuda
from torch import Tensor

from lit_async_rl.data.settings import Limits
from lit_async_rl.engines.base import RolloutEngine
from lit_async_rl.errors import SetupError
from lit_async_rl.models.end_tokens import sampled_model
from lit_async_rl.rollouts.engine_listener import EngineCalls
from lit_async_rl.rollouts.producer import Producer
from lit_async_rl.runtime.waiting import announced
from lit_async_rl.utils.device_memory import is_out_of_memory

CLOSE_S = 10.0  # limit of `close` for an engine that failed
STOP_S = 30.0  # limit of `close` for an engine that works, at the end of a run
MAX_ERROR_CHARS = 200

Weights = Iterator[tuple[str, Tensor]]
log = logging.getLogger(__name__)


class ReplaceableEngine:
    """The engine in use, set up with its first weights, and replaced when it hangs or fails.

    Args:
        engine: not set up.
        model: argument of its `setup`.
        limits: replacements in a row, without a completion and a step in between, and timeout of calls.
        should_stop: whether to stop, which ends waits for a start or for weights.

    Attributes:
        engine: the one in use.
        num_restarts: replacements since the run began.
        last_error: why the last one was replaced; empty if none was.
    """

    def __init__(
        self, engine: RolloutEngine, model: str | None, limits: Limits, should_stop: Callable[[], bool]
    ) -> None:
        self.engine = engine
        self.model = model
        self.max_restarts = limits.engine_restarts
        self.num_restarts = 0
        self.last_error = ""
        self._is_set_up = False
        self._timeout_s = limits.rollout_timeout_s
        self._should_stop = should_stop
        self._restarts_in_a_row = 0

    @property
    def calls(self) -> EngineCalls:
        """Calls of the engine, with timeouts."""
        return EngineCalls(self.engine, self._timeout_s, check=self._check_stop)

    def _check_stop(self) -> None:
        if self._should_stop():
            raise SIGTERMException

    def set_up(self) -> None:
        """Sets the engine up, unless it is."""
        if not self._is_set_up:
            self._set_up(self.calls)
            self._is_set_up = True

    def _set_up(self, calls: EngineCalls) -> None:
        if self.model is None:
            raise SetupError("data.model is not set")
        self.engine.is_used = True
        with announced(lambda: f"{calls.name} to start: {self.engine.starting}"):
            calls.setup(sampled_model(self.model))

    @property
    def may_restart(self) -> bool:
        """Whether restarts remain; logs a warning when they are exhausted."""
        if self._restarts_in_a_row < self.max_restarts:
            return True
        if self.max_restarts:
            log.warning(
                "the engine still fails after data.limits.engine_restarts=%d restarts in a row", self.max_restarts
            )
        return False

    def note_step(self, *, has_delivered: bool) -> None:
        """Counts a step, or a part of one, whose groups have come.

        Args:
            has_delivered: whether the engine in use works and has finished a completion. Until then steps may have its
                predecessors' groups, and restarts count as in a row.
        """
        if has_delivered:
            self._restarts_in_a_row = 0

    def restart(self, producer: Producer, error: Exception, weights: Weights) -> None:
        """Replaces the engine after an error; groups that lack completions are sampled again.

        If the new one does not start, its error is the producer's next.
        """
        self._restarts_in_a_row += 1
        self.num_restarts += 1
        self.last_error = f"{type(error).__name__}: {error}".splitlines()[0][:MAX_ERROR_CHARS]
        needs_less = is_out_of_memory(error)
        self._discard(error)
        try:
            before = self.engine.num_slots
            probe = self.engine.probe
            self.engine = producer.listener.calls.ask("fresh", lambda: self.engine.fresh(needs_less))
            self.engine.probe = probe  # of the weights that it gets now
            if needs_less and (slots := self.engine.num_slots) < before:
                log.warning(
                    "the engine ran out of memory: data.engine.num_slots is now %d instead of %d", slots, before
                )
            calls = self.calls
            self._set_up(calls)
            calls.load_weights(producer.version, weights)
        except SIGTERMException:  # before the next step all ranks learn of it, and the run is saved as it is
            return
        except Exception as failure:
            producer.listener.engine_error = failure
            log.warning(
                "the engine failed with %s, and the new engine did not start: %s", type(error).__name__, failure
            )
            return
        num_groups = producer.replace_engine(self.engine)
        log.warning(
            "the engine was restarted with the weights of version %d (restarts in a row: %d; limit: "
            "data.limits.engine_restarts=%d). %d unfinished groups are sampled again, and finished groups are kept. "
            "The engine had failed with %s: %s",
            producer.version,
            self._restarts_in_a_row,
            self.max_restarts,
            num_groups,
            type(error).__name__,
            error,
        )

    def _discard(self, error: Exception) -> None:
        """Closes a failed engine and frees its memory; one that hangs on close is abandoned."""
        traceback.clear_frames(error.__traceback__)  # their local variables hold what filled the memory
        self.engine.has_failed = True
        with contextlib.suppress(Exception):  # it has failed already
            self.calls.close(CLOSE_S)
        gc.collect()
        garbage_collection_cuda()

    def close(self) -> None:
        """Closes the engine. Safe to call twice."""
        self.calls.close(STOP_S)
        self._is_set_up = False

    def end(self) -> None:
        """Closes what all engines of the run shared, such as an environment. Safe to call twice."""
        self.calls.end(STOP_S)
