"""Wait for groups in the trainer's thread, bounded by time without progress.

It changes no group: it looks on, and tells a stall from work that takes long.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from lit_async_rl.errors import StalledError
from lit_async_rl.rewards.scorer import Scorer
from lit_async_rl.rollouts.engine_listener import POLL_INTERVAL_S, EngineListener
from lit_async_rl.rollouts.group_book import GroupBook, GroupState
from lit_async_rl.runtime.retries import Work
from lit_async_rl.runtime.waiting import Wait, announced

log = logging.getLogger(__name__)


class GroupWait:
    """Waits for the background threads, and detects failures and hangs.

    Args:
        listener: owns the engine and the condition notified on changes.
        book: open groups.
        scorer: of the completions.
        timeout_s: seconds without a new token or reward before `StalledError`. Nothing is stalled while rewards and
            environments keep to limits of their own.
        num_scored: completions scored so far; a change is progress.
    """

    def __init__(
        self,
        listener: EngineListener,
        book: GroupBook,
        scorer: Scorer,
        timeout_s: float,
        num_scored: Callable[[], int],
    ) -> None:
        self._listener = listener
        self._book = book
        self._scorer = scorer
        self.timeout_s = timeout_s
        self._num_scored = num_scored
        self._has_waited = False

    def until(self, ready: Callable[[], int | None], should_stop: Callable[[], bool] = lambda: False) -> int | None:
        """First number returned by `ready`; None to stop. Call it with `listener.changed` held.

        Raises:
            ProducerError: a background thread died (its error is the cause).
            StalledError: no progress for `timeout_s`.
        """
        if self._has_waited:
            return self._until(ready, should_stop)
        with announced(self._first_rollouts):
            found = self._until(ready, should_stop)
        self._has_waited = True
        return found

    def _first_rollouts(self) -> str:
        return f"the first rollouts: {self._groups_under_way()}, {self._listener.num_tokens:,} tokens generated"

    def _groups_under_way(self) -> str:
        num_sampling = len(self._book.in_state(GroupState.SAMPLING))
        num_scoring = len(self._book.in_state(GroupState.SCORING))
        return f"{num_sampling} groups being sampled, {num_scoring} being scored"

    def _until(self, ready: Callable[[], int | None], should_stop: Callable[[], bool]) -> int | None:
        wait = Wait(self.timeout_s, self._stall, self._progress)
        has_warned = False
        while True:
            self._listener.check_thread()
            if (found := ready()) is not None:
                return found
            if should_stop():
                return None
            self._listener.check_engine()
            waited_s = wait.waited_s
            is_slow = waited_s > self.timeout_s / 2
            # Not `wait.until`: calls of rewards and environments that keep to limits of their own defer the end.
            if is_slow and not any(work.is_within_limits for work in self._works()):
                wait.raise_if_over()
            if is_slow and not has_warned:
                log.warning("slow: %s", self._message(waited_s))
            has_warned = is_slow
            # In short turns: a request to stop, a thread that ended and an engine that hangs notify no thread.
            self._listener.changed.wait(POLL_INTERVAL_S)

    def _progress(self) -> tuple[int, int]:
        return self._listener.num_tokens, self._num_scored()

    def _works(self) -> list[Work]:
        """Calls of rewards and environments that are under way."""
        works = self._scorer.work(), self._listener.engine.outside_work()
        return [work for work in works if work is not None]

    def _stall(self) -> str:
        """The message of a stall, attributed to the engine if completions are missing."""
        is_sampling = bool(self._book.in_state(GroupState.SAMPLING))
        advice = (
            "Look at the engine first; raise data.limits.rollout_timeout_s if a completion can really take this long"
        )
        if works := self._works():
            advice = (
                f"Look at {' and '.join(work.name for work in works)} first, whose limit has passed and which has not "
                "returned: an `async` function must await and never block its event loop"
            )
        elif not is_sampling:
            advice = "Look at data.reward and data.admission first: the engine has nothing to do"
        message = f"{self._message(self.timeout_s)}. {advice}"
        if is_sampling:
            self._listener.break_engine(StalledError(message), self._listener.engine)
        return message

    def _message(self, waited_s: float) -> str:
        works = "".join(f"; {work}" for work in self._works())
        num_finished = len(self._book.in_state(GroupState.FINISHED))
        return (
            f"the trainer waited {waited_s:.1f} s of data.limits.rollout_timeout_s={self.timeout_s:g} for a group "
            f"and nothing happened: {self._groups_under_way()}, {num_finished} finished but not allowed yet, "
            f"{self._listener.num_tokens} tokens generated so far by {type(self._listener.engine).__name__}{works}"
        )
