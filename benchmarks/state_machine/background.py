"""Listener, scorer and producer without threads: every transition is an explicit call.

Producer, group book, intake, admission and the bookkeeping of listener and scorer are the real ones.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from lit_async_rl.errors import InvariantError, RewardError
from lit_async_rl.rewards.scorer import Scorer, score
from lit_async_rl.rollouts.engine_listener import EngineListener
from lit_async_rl.rollouts.producer import GroupWait, Producer
from lit_async_rl.types import Prompt
from lit_async_rl.utils.guarded_calls import AwakeClock
from lit_async_rl.utils.tries import Retries, TryPolicy


class _NoThread:
    """Replaces a thread."""

    def __init__(self) -> None:
        self._alive = False

    def start(self) -> None:
        self._alive = True

    def join(self, timeout: float) -> None:
        self._alive = False

    def is_alive(self) -> bool:
        return self._alive


class VirtualListener(EngineListener):
    """Polls when `turn` is called."""

    def _new_thread(self) -> Any:
        return _NoThread()

    def turn(self) -> None:
        """One iteration of the thread's loop."""
        engine = self.engine
        try:
            if self.engine_error is None:
                for completion in self._poll(engine):
                    self._on_completion(completion)
            self._on_turn()
        except (RewardError, InvariantError, KeyError, ValueError) as error:
            self.error = error


class VirtualClock(AwakeClock):
    """Clock that always returns 0."""

    def __init__(self) -> None:
        """Starts no thread."""

    def now(self) -> float:
        return 0.0

    def close(self) -> None:
        """Does nothing."""


class VirtualScorer(Scorer):
    """Scores one completion with each call of `step`."""

    def __init__(self, max_tries: int | None) -> None:
        self.reward, self.max_tries, self.timeout_s, self.num_workers = _reward, max_tries, 1.0, 1
        self.identity = None
        self.keeps_rewards = False
        self.clock = VirtualClock()
        self.jobs: list[Any] = []
        self.given_up: list[int] = []  # groups
        self._busy_s, self._running, self._error, self._is_closed = 0.0, {}, None, False
        self.policy = TryPolicy(owner="data.scoring", tries=max_tries)
        self._workers, self._retries, self._pausing = {}, Retries(self.policy), []
        self._jobs: Any = self

    def put(self, job: Any) -> None:
        """Queues a job; called by `submit` and for another try."""
        if job is not None:
            self.jobs.append(job)

    def step(self, chosen: int, fails: bool = False) -> None:
        """Scores one of the queued completions, or fails to."""
        job = self.jobs.pop(chosen % len(self.jobs))
        if not job.is_wanted():
            return
        try:
            if fails:
                self._fail(job, RewardError("a reward that fails"))
                if job.num_tries == self.max_tries:
                    self.given_up.append(job.give_up.args[0].index)
            else:
                job.done(score(_reward, job.prompt, job.completion))
                self._retries.succeed()
        except RewardError as error:
            self._error = error


def _reward(prompt: Prompt, completion: str) -> float:
    return float(len(completion) % 2)


class VirtualWait(GroupWait):
    """Runs background transitions while the trainer waits."""

    background: Callable[[], bool]

    def until(self, ready: Callable[[], int | None], should_stop: Callable[[], bool] = lambda: False) -> int | None:
        """First number returned by `ready`; None to stop.

        Raises:
            InvariantError: no transition is left, so the wait would never end.
        """
        while True:
            self._listener.check_thread()
            if (found := ready()) is not None:
                return found
            if should_stop():
                return None
            self._listener.check_engine()
            if not self.background():
                raise InvariantError(f"the trainer waits for ever: {self._message(0.0)}")


class VirtualProducer(Producer):
    """A producer whose listener and waiting have no threads."""

    def __init__(self, background: Callable[[], bool], **settings: Any) -> None:
        super().__init__(**settings)
        self.changed = threading.Condition(threading.RLock())
        self.listener: VirtualListener = VirtualListener(
            settings["engine"], self.changed, self._collect, self.scorer.check
        )
        self.wait = VirtualWait(self.listener, self.book, self.scorer, 1.0, lambda: self._num_scored)
        self.wait.background = background
