"""Retries of a reward that failed for a completion."""

from __future__ import annotations

import logging

from lit_async_rl.errors import RewardError
from lit_async_rl.types import Prompt
from lit_async_rl.utils.log_limit import LimitedLog

MAX_LEFT_OUT = 10  # prompts in a row
log = logging.getLogger(__name__)


class Retries:
    """Allows another attempt, leaves the prompt out, or ends the run. Logs which of them.

    Args:
        max_tries: attempts after which a completion is given up; the error is raised after `MAX_LEFT_OUT` consecutive
            prompts without a reward. None raises at the first failure.
    """

    def __init__(self, max_tries: int | None) -> None:
        self.max_tries = max_tries
        self._left_out: list[Prompt] = []  # since the last reward
        self._log = LimitedLog(log)

    def succeed(self) -> None:
        """A completion was scored."""
        self._left_out = []

    def may_try_again(self, prompt: Prompt, num_tries: int, error: RewardError) -> bool:
        """Whether to score a completion again, after `num_tries` failed attempts; otherwise its prompt is left out.

        Raises:
            RewardError: the run is to end.
        """
        if self.max_tries is None:
            raise error
        if num_tries < self.max_tries:
            self._log.warning(
                "try %d of data.scoring.tries=%d failed, there is another: %s", num_tries, self.max_tries, error
            )
            return True
        if not any(prompt is other for other in self._left_out):
            self._left_out.append(prompt)
        if len(self._left_out) >= MAX_LEFT_OUT:
            tries = f"data.scoring.tries={self.max_tries} tries each, and nothing in between"
            raise RewardError(f"{MAX_LEFT_OUT} prompts in a row could not be scored in {tries}; the last: {error}")
        self._log.warning("a prompt is left out after data.scoring.tries=%d: %s", self.max_tries, error)
        return False
