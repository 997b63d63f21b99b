"""Time limits and retries of calls to rewards and environments.

One caller tries each call again, so that tries do not multiply: `Scorer` one of a reward, `MultiRequestEngine` an
episode of an environment or agent. A judge's `Endpoint` repeats its own questions, in view of how all of them fare, and
ends with an error that `Scorer` does not retry.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from lit_async_rl.runtime.limited_log import LimitedLog
from lit_async_rl.utils.checks import check_range

LOST_TRIES = 5  # of a call that repeatedly loses its process, if `tries` is not set
MAX_CONSECUTIVE_FAILURES = 10  # prompts in a row without a success, after which the run ends
GRACE_S = 5.0  # after a call's time limit; a call that has not ended by then hangs
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TryPolicy:
    """Time limit, number of tries and pauses of a call.

    Args:
        owner: path of the settings in messages, such as `data.scoring`.
        timeout_s: time limit of one try, in seconds.
        tries: attempts before the prompt is left out; None ends the run at the first failure.
        backoff_s: seconds before the second try; each further pause is twice as long.
        timeout_name: name of the setting of `timeout_s`; empty if it is no setting.
        done: participle for a successful call in messages (`could not be scored`).
        ends_run: whether failures may end the run; False always leaves the failed call out.

    Raises:
        ValueError: a setting is out of range.
    """

    owner: str
    timeout_s: float = 60.0
    tries: int | None = None
    backoff_s: float = 0.0
    timeout_name: str = "timeout_s"
    done: str = "scored"
    ends_run: bool = True

    def __post_init__(self) -> None:
        check_range(self.owner, "positive", **{self.timeout_name or "timeout_s": self.timeout_s})
        check_range(self.owner, "integer positive", tries=self.tries)
        check_range(self.owner, ">= 0 and finite", backoff_s=self.backoff_s)

    @property
    def limit(self) -> str:
        """The time limit with its setting: `data.scoring.timeout_s=60`."""
        if not self.timeout_name:
            return f"the {self.timeout_s:g} s of {self.owner}"
        return f"{self.owner}.{self.timeout_name}={self.timeout_s:g}"

    def pause_s(self, num_failed: int) -> float:
        """Seconds between the `num_failed`-th failure of a call and its next try."""
        return self.backoff_s * 2.0 ** (num_failed - 1)


@dataclass(frozen=True, kw_only=True)
class Work:
    """Running calls of rewards or environments, for which a run may wait although its engine is idle.

    Args:
        name: reward or environment, such as `reward my_rewards.judge`.
        num_calls: how many.
        oldest_s: seconds since the oldest of them began.
        policy: their limits.
    """

    name: str
    num_calls: int
    oldest_s: float
    policy: TryPolicy

    @property
    def is_within_limits(self) -> bool:
        """Whether the oldest call may still end: it hangs if it runs for `GRACE_S` beyond its limit."""
        return self.oldest_s <= self.policy.timeout_s + GRACE_S

    def __str__(self) -> str:
        calls = "1 call" if self.num_calls == 1 else f"{self.num_calls} calls"
        return f"{calls} of {self.name} under way, the oldest for {self.oldest_s:.1f} s of {self.policy.limit}"


class Retries:
    """Decides after each failure whether to try again, leave the prompt out, or end the run; logs the first two.

    Args:
        policy: number of tries. The run ends after `MAX_CONSECUTIVE_FAILURES` prompts in a row without a success.
    """

    def __init__(self, policy: TryPolicy) -> None:
        self.policy = policy
        self._left_out: list[object] = []  # since the last success
        self._tries_log = LimitedLog(log)
        self._log = LimitedLog(log)  # a second limit, so that failed tries cannot suppress the warning about a prompt

    def succeed(self) -> None:
        """Resets the count of consecutive failures."""
        self._left_out = []

    def may_try_again(
        self, prompt: object, num_failed: int, error: Exception, is_final: bool = False, keeps_prompt: bool = False
    ) -> bool:
        """Whether to try a call again after `num_failed` failures; otherwise its prompt is left out.

        An error that `is_final` leaves it out at once, and one with a true attribute `ends_run` ends the run. If
        `tries` is None, a call whose error has a true attribute `is_lost` (its process is gone) is tried `LOST_TRIES`
        times. With `keeps_prompt` only a sample is left out, and the prompt goes on with its others.

        Raises:
            Exception: the run ends with `error`, or with another error of its class.
        """
        tries = self.policy.tries
        setting = f"{self.policy.owner}.tries"
        if getattr(error, "ends_run", False) or (tries is None and not getattr(error, "is_lost", False)):
            raise error
        if tries is None:
            if num_failed >= LOST_TRIES:
                raise error
            self._tries_log.warning(
                "try %d of %d failed, because the process or machine that ran it was lost; trying again: %s",
                num_failed,
                LOST_TRIES,
                error,
            )
            return True
        if num_failed < tries and not is_final:
            pause_s = self.policy.pause_s(num_failed)
            when = f" in {pause_s:g} s" if pause_s else ""
            self._tries_log.warning(
                "try %d of %s=%d failed, trying again%s: %s", num_failed, setting, tries, when, error
            )
            return True
        if keeps_prompt:
            self._log.warning(
                "a completion of a prompt is left out, because its episode failed on every try (%s=%s): %s",
                setting,
                tries,
                error,
            )
            return False
        is_new = not any(prompt is other for other in self._left_out)
        if is_new and len(self._left_out) <= MAX_CONSECUTIVE_FAILURES:
            self._left_out.append(prompt)
        if not self.policy.ends_run:
            self._note_left_out(error, is_new)
            return False
        if len(self._left_out) >= MAX_CONSECUTIVE_FAILURES:
            raise type(error)(
                f"{MAX_CONSECUTIVE_FAILURES} prompts in a row could not be {self.policy.done}, although each was "
                f"tried up to {setting}={tries} times; the last error: {error}"
            ) from error
        after = "a failure that another try would not fix" if is_final else f"{setting}={tries} tries"
        self._log.warning("a prompt is left out, because calls for it failed (%s); the last error: %s", after, error)
        return False

    def _note_left_out(self, error: Exception, is_new: bool) -> None:
        """Logs a call that is left out, up to `MAX_CONSECUTIVE_FAILURES` in a row."""
        owner = self.policy.owner
        number = len(self._left_out)
        if number < MAX_CONSECUTIVE_FAILURES:
            self._log.warning("%s: a call failed and is skipped: %s", owner, error)
        elif number == MAX_CONSECUTIVE_FAILURES and is_new:
            log.warning(
                "%s: %d calls in a row failed, and further failures are not logged; the last error: %s",
                owner,
                number,
                error,
            )
