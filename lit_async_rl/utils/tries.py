"""Limits and tries of calls that may fail, those of rewards and environments, or whatever else a run waits for.

The caller tries a call again (`Scorer`, `EpisodeEngine`), and what it calls does not, so tries never multiply.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from lit_async_rl.utils.checks import check_range
from lit_async_rl.utils.files import LimitedLog

MAX_LEFT_OUT = 10  # prompts in a row
GRACE_S = 5.0  # from the limit of a call until it must have been noticed
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TryPolicy:
    """How long one call may take, how often it is tried, and how long the pause before another try is.

    Args:
        owner: path of the settings in messages, such as `data.scoring`.
        timeout_s: seconds of one try.
        tries: after which the call is given up and its prompt left out; None ends the run at the first failure.
        backoff_s: seconds before the second try; each further pause is twice as long.
        timeout_name: of the setting of `timeout_s`.
        done: what failed calls were not, in messages.

    Raises:
        ValueError: a setting is out of range.
    """

    owner: str
    timeout_s: float = 60.0
    tries: int | None = None
    backoff_s: float = 0.0
    timeout_name: str = "timeout_s"
    done: str = "scored"

    def __post_init__(self) -> None:
        check_range(self.owner, "positive", **{self.timeout_name: self.timeout_s})
        check_range(self.owner, "integer positive", tries=self.tries)
        check_range(self.owner, ">= 0 and finite", backoff_s=self.backoff_s)

    @property
    def limit(self) -> str:
        """The time limit with its setting: `data.scoring.timeout_s=60`."""
        return f"{self.owner}.{self.timeout_name}={self.timeout_s:g}"

    def pause_s(self, num_failed: int) -> float:
        """Seconds between failure number `num_failed` of a call and its next try."""
        return self.backoff_s * 2.0 ** (num_failed - 1)


@dataclass(frozen=True, kw_only=True)
class Work:
    """Calls under way beside the engine, which a wait without any progress may be for.

    Args:
        name: of what is called, such as `reward my_rewards.judge`.
        num_calls: under way.
        oldest_s: seconds since the oldest of them began.
        policy: their limits.
    """

    name: str
    num_calls: int
    oldest_s: float
    policy: TryPolicy

    @property
    def is_within_limits(self) -> bool:
        """Whether the oldest call may still be working; one that has not ended `GRACE_S` after its limit hangs."""
        return self.oldest_s <= self.policy.timeout_s + GRACE_S

    def __str__(self) -> str:
        calls = "1 call" if self.num_calls == 1 else f"{self.num_calls} calls"
        return f"{calls} of {self.name} under way, the oldest for {self.oldest_s:.1f} s of {self.policy.limit}"


class Retries:
    """Counts what failed: allows another try, leaves the prompt out, or ends the run. Logs which of them.

    Args:
        policy: the number of tries. The error is raised after `MAX_LEFT_OUT` consecutive prompts without a success.
    """

    def __init__(self, policy: TryPolicy) -> None:
        self.policy = policy
        self._left_out: list[object] = []  # since the last success
        self._tries_log = LimitedLog(log)
        self._log = LimitedLog(log)  # of its own: what is left out is said however many tries fail

    def succeed(self) -> None:
        """A call has succeeded."""
        self._left_out = []

    def may_try_again(self, prompt: object, num_failed: int, error: Exception) -> bool:
        """Whether to try a call again after `num_failed` failures; otherwise its prompt is left out.

        Raises:
            Exception: the run is to end: `error`, or another one of its class.
        """
        tries = self.policy.tries
        setting = f"{self.policy.owner}.tries"
        if tries is None:
            raise error
        if num_failed < tries:
            pause_s = self.policy.pause_s(num_failed)
            when = f" in {pause_s:g} s" if pause_s else ""
            self._tries_log.warning(
                "try %d of %s=%d failed, there is another%s: %s", num_failed, setting, tries, when, error
            )
            return True
        if not any(prompt is other for other in self._left_out):
            self._left_out.append(prompt)
        if len(self._left_out) >= MAX_LEFT_OUT:
            raise type(error)(
                f"{MAX_LEFT_OUT} prompts in a row could not be {self.policy.done} in {setting}={tries} tries each, and "
                f"nothing in between; the last: {error}"
            ) from error
        self._log.warning("a prompt is left out after %s=%d: %s", setting, tries, error)
        return False
