"""Engine calls with timeouts, so that an engine that hangs cannot block its caller."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from torch import Tensor

from lit_async_rl.engines.base import GenerationRequest, RolloutEngine
from lit_async_rl.errors import StalledError
from lit_async_rl.models.received import lasts
from lit_async_rl.utils.guarded_calls import LastKnown, Limit, call, feed

T = TypeVar("T")
GRACE_S = 5.0  # an engine that has a limit of its own says more than we could
log = logging.getLogger(__name__)


class EngineCalls:
    """Calls an engine from any thread, with a time limit.

    A call that exceeds its limit raises `StalledError` and is abandoned in its thread; the engine must then be
    discarded. `poll` is not here: it has a thread of its own.

    Args:
        engine: any.
        timeout_s: `data.limits.rollout_timeout_s`; a longer `update_timeout_s` of the engine takes precedence.
    """

    def __init__(self, engine: RolloutEngine, timeout_s: float) -> None:
        self.engine, self.name = engine, type(engine).__name__
        self.timeout_s = timeout_s
        self._counters = LastKnown(lambda: (float(engine.busy_s), int(engine.num_tokens)), (0.0, 0))

    def counters(self) -> tuple[float, int]:
        """Seconds and tokens generated; the last known values if the engine does not answer."""
        return self._counters.get()

    def _limit(self, what: str) -> Limit:
        update_s = self.engine.update_timeout_s
        if what == "setup":
            seconds, setting = self.engine.startup_timeout_s, "data.engine.startup_timeout_s"
        elif update_s > self.timeout_s:
            seconds, setting = update_s, "data.engine.update_timeout_s"
        else:
            seconds, setting = self.timeout_s, "data.limits.rollout_timeout_s"
        message = f"{self.name}.{what} did not return within {setting}={seconds:g} s, and no token was sampled"
        return Limit(seconds + min(GRACE_S, 0.1 * seconds), message, self.counters)

    def ask(self, what: str, function: Callable[[], T]) -> T:
        """The result of any call; `what` names the call in errors."""
        return call(function, self._limit(what))

    def setup(self, model: str) -> None:
        """Sets the engine up within `startup_timeout_s`."""
        self.ask("setup", lambda: self.engine.setup(model))

    def load_weights(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Loads weights; `weights` is iterated in the caller's thread, and the time that takes does not count."""
        limit = self._limit("load_weights")
        feed(lambda fed: self.engine.load_weights(version, fed), weights, limit, lasts)

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
        """Closes the engine; if it takes longer, it continues in the background."""
        try:
            call(self.engine.close, Limit(limit_s, f"{self.name}.close did not return within {limit_s:g} s"))
        except StalledError as error:
            log.warning("%s; it is abandoned with the memory it holds", error)

    def end(self, limit_s: float) -> None:
        """Closes what engines share; if it takes longer, it continues in the background."""
        try:
            call(self.engine.end, Limit(limit_s, f"{self.name}.end did not return within {limit_s:g} s"))
        except StalledError as error:
            log.warning("%s; it is abandoned", error)
