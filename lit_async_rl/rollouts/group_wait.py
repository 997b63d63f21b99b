"""Waiting for groups in the trainer's thread: bounded by time without progress."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NoReturn

from lit_async_rl.errors import StalledError
from lit_async_rl.rewards.scorer import Scorer
from lit_async_rl.rollouts.engine_listener import POLL_S, EngineListener
from lit_async_rl.rollouts.group_book import GroupBook
from lit_async_rl.utils.patience import announced
from lit_async_rl.utils.tries import Work

log = logging.getLogger(__name__)


class GroupWait:
    """Waits for the background threads and detects that they failed or hang.

    Args:
        listener: owns the engine and the condition notified on changes.
        book: open groups.
        scorer: of the completions; its clock is that of the timeout.
        timeout_s: seconds without a new token or reward before `StalledError`. Rewards and environments that work have
            limits of their own: nothing is stalled while they keep to them.
        num_scored: number of completions scored so far; a change of it is progress, as is a new token.
    """

    def __init__(
        self,
        listener: EngineListener,
        book: GroupBook,
        scorer: Scorer,
        timeout_s: float,
        num_scored: Callable[[], int],
    ) -> None:
        self._listener, self._book, self._scorer, self._clock = listener, book, scorer, scorer.clock
        self.timeout_s, self._num_scored = timeout_s, num_scored
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
        book, lacking = self._book, len(self._book.lacking)
        waiting = f"{lacking} groups being sampled, {len(book.unfinished) - lacking} being scored"
        return f"the first rollouts: {waiting}, {self._listener.num_tokens:,} tokens generated"

    def _until(self, ready: Callable[[], int | None], should_stop: Callable[[], bool]) -> int | None:
        last_change, progress, is_said = self._clock.now(), self._progress(), False
        while True:
            self._listener.check_thread()
            if (found := ready()) is not None:
                return found
            if should_stop():
                return None
            self._listener.check_engine()
            now = self._clock.now()
            if progress != (progress := self._progress()):
                last_change, is_said = now, False
            waited_s = now - last_change
            if waited_s > self.timeout_s and not any(work.is_within_limits for work in self._works()):
                self._stall()
            if waited_s > self.timeout_s / 2 and not is_said:
                log.warning("slow: %s", self._message(waited_s))
                is_said = True
            self._listener.changed.wait(POLL_S)

    def _progress(self) -> tuple[int, int]:
        return self._listener.num_tokens, self._num_scored()

    def _works(self) -> list[Work]:
        """Calls of rewards and environments that are under way."""
        works = self._scorer.work(), self._listener.engine.outside_work()
        return [work for work in works if work is not None]

    def _stall(self) -> NoReturn:
        """Attributes the stall to the engine if completions are missing."""
        advice = (
            "Look at the engine first; raise data.limits.rollout_timeout_s if a completion can really take this long"
        )
        if works := self._works():
            advice = (
                f"Look at {' and '.join(work.name for work in works)} first, whose limit has passed and which has not "
                "returned: an `async` function must await and never block its event loop"
            )
        elif not self._book.lacking:
            advice = "Look at data.reward and data.admission first: the engine has nothing to do"
        error = StalledError(f"{self._message(self.timeout_s)}. {advice}")
        if self._book.lacking:
            self._listener.break_engine(error, self._listener.engine)
        raise error

    def _message(self, waited_s: float) -> str:
        book, lacking = self._book, len(self._book.lacking)
        works = "".join(f"; {work}" for work in self._works())
        return (
            f"the trainer waited {waited_s:.1f} s of data.limits.rollout_timeout_s={self.timeout_s:g} for a group "
            f"and nothing happened: {lacking} groups being sampled, {len(book.unfinished) - lacking} being scored, "
            f"{len(book.finished)} finished but not allowed yet, {self._listener.num_tokens} tokens generated so "
            f"far by {type(self._listener.engine).__name__}{works}"
        )
