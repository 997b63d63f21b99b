"""How the trainer's thread waits for groups: as long as something happens, and never without saying why it ends."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NoReturn

from lit_async_rl.errors import StalledError
from lit_async_rl.rollouts.engine_listener import POLL_S, EngineListener
from lit_async_rl.rollouts.group_book import GroupBook
from lit_async_rl.utils.clocks import AwakeClock

log = logging.getLogger(__name__)


class GroupWait:
    """Waits for the background side, and notices when it is broken or hangs.

    Args:
        listener: has the engine, and the condition that is notified when something changes.
        book: groups under way.
        clock: what the timeout is measured with.
        timeout_s: longest time in which nothing at all may happen.
        num_scored: completions scored so far: one more is something that happened, and so is a token.
    """

    def __init__(
        self,
        listener: EngineListener,
        book: GroupBook,
        clock: AwakeClock,
        timeout_s: float,
        num_scored: Callable[[], int],
    ) -> None:
        self._listener, self._book, self._clock = listener, book, clock
        self.timeout_s, self._num_scored = timeout_s, num_scored

    def until(self, ready: Callable[[], int | None], should_stop: Callable[[], bool] = lambda: False) -> int | None:
        """What `ready` returns as soon as that is a number; None to stop. Call it with `listener.changed` held.

        Raises:
            ProducerError: a background thread died (its error is the cause).
            StalledError: nothing happened for `timeout_s`.
        """
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
            if waited_s > self.timeout_s:
                self._stall()
            if waited_s > self.timeout_s / 2 and not is_said:
                log.warning("slow: %s", self._message(waited_s))
                is_said = True
            self._listener.changed.wait(POLL_S)

    def _progress(self) -> tuple[int, int]:
        return self._listener.num_tokens, self._num_scored()

    def _stall(self) -> NoReturn:
        """It is the engine that hangs where completions are lacking."""
        advice = (
            "Look at the engine first; raise data.limits.rollout_timeout_s if a completion can really take this long"
        )
        error = StalledError(f"{self._message(self.timeout_s)}. {advice}")
        if self._book.lacking:
            self._listener.break_engine(error, self._listener.engine)
        raise error

    def _message(self, waited_s: float) -> str:
        book, lacking = self._book, len(self._book.lacking)
        return (
            f"the trainer waited {waited_s:.1f} s of data.limits.rollout_timeout_s={self.timeout_s:g} for a rollout group and "
            f"nothing happened: {lacking} groups being sampled, {len(book.unfinished) - lacking} being scored, "
            f"{len(book.finished)} finished but not allowed yet, {self._listener.num_tokens} tokens generated so "
            f"far by {type(self._listener.engine).__name__}"
        )
