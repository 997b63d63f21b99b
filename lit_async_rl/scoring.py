"""Rewards, off the trainer's thread, with a timeout and an error that names the prompt and the function.

Who waits for what: a worker waits for jobs (woken by `submit` and `close`); nobody waits for a worker. The producer's
thread calls `check` in each turn of its loop, which raises what went wrong. Workers are daemon threads, because a
reward function that hangs must not keep the process alive.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from lit_async_rl.errors import RewardError
from lit_async_rl.types import Prompt

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


class Scorer:
    """Scores whole groups in worker threads.

    Args:
        reward: `reward(prompt, completion) -> float`; None where nothing is ever submitted.
        num_workers: groups scored at the same time.
        timeout_s: longest that the completions of one group may take.
    """

    def __init__(self, reward: Reward | None, num_workers: int = 1, timeout_s: float = 60.0) -> None:
        if num_workers < 1:
            raise ValueError(f"reward_workers must be >= 1, got {num_workers}")
        if timeout_s <= 0:
            raise ValueError(f"reward_timeout_s must be positive, got {timeout_s}")
        self.reward = reward
        self.timeout_s = timeout_s
        self._jobs: queue.SimpleQueue[tuple[Prompt, Sequence[str], Callable[[list[float]], None]] | None]
        self._jobs = queue.SimpleQueue()
        self._busy_s = [0.0] * num_workers
        self._running: dict[int, tuple[float, Prompt]] = {}  # worker -> when it began, on what
        self._error: BaseException | None = None
        self._workers = [
            threading.Thread(target=self._work, args=(n,), name=f"reward-{n}", daemon=True) for n in range(num_workers)
        ]
        for worker in self._workers:
            worker.start()

    def submit(self, prompt: Prompt, completions: Sequence[str], done: Callable[[list[float]], None]) -> None:
        """Scores in the background; `done(rewards)` is called in the worker's thread."""
        self._jobs.put((prompt, completions, done))

    def _work(self, number: int) -> None:
        while (job := self._jobs.get()) is not None:
            prompt, completions, done = job
            assert self.reward is not None
            began = time.monotonic()
            self._running[number] = (began, prompt)
            try:
                rewards = [score(self.reward, prompt, text) for text in completions]
                self._busy_s[number] += time.monotonic() - began
                done(rewards)
            except BaseException as error:
                self._error = error
                return
            finally:
                del self._running[number]

    @property
    def busy_s(self) -> float:
        """Seconds spent scoring so far, the mean over workers."""
        return sum(self._busy_s) / len(self._busy_s)

    def check(self) -> None:
        """Raises what a worker met, or `RewardError` when one has not returned in time."""
        if self._error is not None:
            raise self._error
        now = time.monotonic()
        for began, prompt in list(self._running.values()):
            if now - began > self.timeout_s:
                name = reward_name(self.reward) if self.reward is not None else None
                raise RewardError(
                    f"reward {name} did not return within reward_timeout_s={self.timeout_s:g} "
                    f"on prompt {prompt.text[:200]!r}"
                )

    def close(self) -> None:
        """Lets idle workers end; does not wait for one that hangs."""
        for _ in self._workers:
            self._jobs.put(None)
