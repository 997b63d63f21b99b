"""Rewards, off the trainer's thread, with a timeout and an error that names the prompt and the function.

Who waits for what: a worker waits for jobs (woken by `submit` and `close`); nobody waits for a worker. The producer's
thread calls `check` in each turn of its loop, which raises what went wrong. Workers are daemon threads, because a
reward function that hangs must not keep the process alive.
"""

from __future__ import annotations

import itertools
import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lit_async_rl.errors import RewardError, SetupError
from lit_async_rl.types import Prompt
from lit_async_rl.utils.clocks import AwakeClock

CLOSE_S = 5.0
log = logging.getLogger(__name__)
Reward = Callable[[Prompt, str], float]


def reward_name(reward: Reward) -> str:
    """Dotted name of a function, class name of a callable object."""
    if hasattr(reward, "__qualname__"):
        return f"{reward.__module__}.{reward.__qualname__}"
    return f"{type(reward).__module__}.{type(reward).__qualname__}"


def score(reward: Reward, prompt: Prompt, completion: str) -> float:
    """One reward as a finite float.

    Raises:
        RewardError: the function raised, or returned something that is no finite number.
    """
    where = f"reward {reward_name(reward)} on prompt {prompt.text[:200]!r}, completion {completion[:200]!r}"
    try:
        value: Any = reward(prompt, completion)
    except Exception as error:
        raise RewardError(f"{where} raised {type(error).__name__}: {error}") from error
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise RewardError(f"{where} returned {value!r}, which is not a number") from None
    if not math.isfinite(number):
        raise RewardError(f"{where} returned {number}; a reward must be finite")
    return number


@dataclass(eq=False)
class _Job:
    prompt: Prompt
    completion: str
    done: Callable[[float], None]
    give_up: Callable[[], None]
    is_wanted: Callable[[], bool]
    num_tries: int = 0
    is_said_to_be_slow: bool = False


class Scorer:
    """Scores completions in worker threads.

    Args:
        reward: `reward(prompt, completion) -> float`; None where nothing is ever submitted.
        num_workers: completions scored at the same time.
        timeout_s: longest that one may take.
        max_tries: a completion that could not be scored so often is given up, with a line in the log; None raises what
            went wrong at the first time. A call that does not return is left alone, and another worker takes its place.

    Attributes:
        clock: what timeouts are measured with.
    """

    def __init__(
        self, reward: Reward | None, num_workers: int = 1, timeout_s: float = 60.0, max_tries: int | None = None
    ) -> None:
        if num_workers < 1:
            raise ValueError(f"reward_workers must be >= 1, got {num_workers}")
        if timeout_s <= 0:
            raise ValueError(f"reward_timeout_s must be positive, got {timeout_s}")
        if max_tries is not None and max_tries < 1:
            raise ValueError(f"reward_tries must be >= 1, or null to end the run at once, got {max_tries}")
        self.reward = reward
        self.clock = AwakeClock()
        self.timeout_s, self.max_tries, self.num_workers = timeout_s, max_tries, num_workers
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._busy_s = 0.0
        self._running: dict[int, tuple[float, _Job]] = {}  # worker -> when it began, on what
        self._error: BaseException | None = None
        self._numbers = itertools.count()
        self._workers: dict[int, threading.Thread] = {}  # without those that hang
        self._is_closed = False
        for _ in range(num_workers):
            self._add_worker()

    def _add_worker(self) -> None:
        number = next(self._numbers)
        worker = self._workers[number] = threading.Thread(
            target=self._work, args=(number,), name=f"reward-{number}", daemon=True
        )
        worker.start()

    def submit(
        self,
        prompt: Prompt,
        completion: str,
        done: Callable[[float], None],
        give_up: Callable[[], None] = lambda: None,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """Scores in the background; `done(reward)`, or `give_up()`, is called in the worker's thread.

        Nothing happens if nobody wants it any more when its turn comes.
        """
        self._jobs.put(_Job(prompt, completion, done, give_up, is_wanted))

    def _work(self, number: int) -> None:
        while (job := self._jobs.get()) is not None:
            if self._is_closed:
                return
            if not job.is_wanted():
                continue
            if self.reward is None:
                raise SetupError("completions are to be scored, and data.reward is null")
            began = time.monotonic()
            self._running[number] = (self.clock.now(), job)
            failure: RewardError | None = None
            try:
                reward = score(self.reward, job.prompt, job.completion)
            except RewardError as error:
                failure = error
            except BaseException as error:
                self._error = error
                return
            if self._running.pop(number, None) is None:  # cut off meanwhile: another worker is in our place
                return
            if self._is_closed:
                return
            self._busy_s += time.monotonic() - began
            try:
                if failure is None:
                    job.done(reward)
                else:
                    self._fail(job, failure)
            except BaseException as error:
                self._error = error
                return

    def _fail(self, job: _Job, error: RewardError) -> None:
        """Another try, or the end of the prompt, or of the run."""
        if not job.is_wanted():
            return
        job.num_tries += 1
        if self.max_tries is None:
            raise error
        if job.num_tries < self.max_tries:
            log.warning(
                "try %d of data.scoring.tries=%d failed, there is another: %s", job.num_tries, self.max_tries, error
            )
            job.is_said_to_be_slow = False
            self._jobs.put(job)
            return
        log.warning("a prompt is left out after data.scoring.tries=%d: %s", self.max_tries, error)
        job.give_up()

    @property
    def busy_s(self) -> float:
        """Seconds spent scoring so far, the mean over workers."""
        return self._busy_s / self.num_workers

    def check(self) -> None:
        """Raises what a worker met; cuts off one that has not returned in time.

        Raises:
            RewardError: a worker has not returned in time, and there is no other try.
        """
        if self._error is not None:
            raise self._error
        now = self.clock.now()
        for number, (began, job) in list(self._running.items()):
            name = reward_name(self.reward) if self.reward is not None else None
            if now - began > self.timeout_s / 2 and not job.is_said_to_be_slow:
                job.is_said_to_be_slow = True
                took, prompt = now - began, job.prompt.text[:200]
                log.warning(
                    "reward %s is slow: %.1f s of data.scoring.timeout_s=%g, %r", name, took, self.timeout_s, prompt
                )
            if now - began <= self.timeout_s or self._running.pop(number, None) is None:
                continue
            del self._workers[number]
            self._add_worker()
            self._fail(
                job,
                RewardError(
                    f"reward {name} did not return within data.scoring.timeout_s={self.timeout_s:g} "
                    f"on prompt {job.prompt.text[:200]!r}"
                ),
            )

    def close(self) -> None:
        """Ends the workers; what waits is not scored any more.

        Waits for them, but not for ever: a thread that comes back from C++ when the interpreter ends aborts the
        process, and one in a reward that hangs cannot be ended.
        """
        self._is_closed = True
        self.clock.close()
        for _ in range(self.num_workers):
            self._jobs.put(None)
        deadline = time.monotonic() + CLOSE_S
        for worker in list(self._workers.values()):
            if worker is not threading.current_thread():
                worker.join(max(0.0, deadline - time.monotonic()))
