"""The background thread that keeps the engine busy within the staleness bound.

| who | waits for | woken by |
|---|---|---|
| trainer, in `take` | a finished group that may be trained on | `_finish`, an error, `stop` |
| producer thread, in `engine.poll` | a finished completion | the engine |
| reward worker, in `Scorer` | a completion to score | `_collect` |

Slots come back in `advance`, which the trainer calls after it has published weights; new prompts are submitted there,
in one call, so that what the engine decodes together does not depend on timing. Whatever goes wrong in a thread is
kept and raised by `take` with its cause.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from lit_async_rl.admission import Admission
from lit_async_rl.engine import Completion, RolloutEngine, SamplingParams
from lit_async_rl.errors import ProducerError, StalledError
from lit_async_rl.group_book import GroupBook, OpenGroup
from lit_async_rl.prompts import PromptStream
from lit_async_rl.scoring import Scorer
from lit_async_rl.stats import ProducerStats
from lit_async_rl.text import TextCodec
from lit_async_rl.types import RolloutGroup

POLL_S = 0.2  # how soon a stop, a dead thread or a hung reward is noticed


class Producer:
    """Admits prompts, collects completions, has them scored, and hands out finished groups.

    Args:
        engine: set up and loaded with the first weights.
        stream: endless prompts; `codec`: text to ids and back; `admission`: the bound.
        group_size: completions of each prompt.
        sampling: how they are sampled.
        timeout_s: longest time in which nothing at all may happen while the trainer waits.
        replicate_prompts: ask the engine for each completion by itself, so that those of a prompt need not be sampled
            in one place or at one time (ROLL Flash, arXiv:2510.11345).
    """

    def __init__(
        self,
        *,
        engine: RolloutEngine,
        stream: PromptStream,
        codec: TextCodec,
        scorer: Scorer,
        admission: Admission,
        group_size: int,
        sampling: SamplingParams,
        timeout_s: float,
        replicate_prompts: bool = False,
    ) -> None:
        self.engine, self.stream, self.scorer, self.admission = engine, stream, scorer, admission
        self.timeout_s = timeout_s
        self.version = 0
        self.book = GroupBook(codec, group_size, sampling, replicate_prompts)
        self.again: deque[int] = deque()  # positions of prompts to be sampled before new ones
        self._num_finished = self._num_scored = self._num_lost = 0
        self.changed = threading.Condition(threading.RLock())
        self._error: BaseException | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="producer", daemon=True)
        self._began = time.monotonic()
        self._wait_s = 0.0

    # -- trainer's thread ---------------------------------------------------------------------------------------------

    def start(self, version: int) -> None:
        """Starts sampling; `version` is already loaded in the engine."""
        self.version = version
        self._began = time.monotonic()
        self._admit()
        self._thread.start()

    def advance(self, version: int) -> None:
        """Ends a round: the engine has the weights of `version`; the slots of the groups trained on come back."""
        with self.changed:
            self.version = version
            self.admission.advance()
            self._admit()
            self.changed.notify_all()

    def set_max_staleness(self, max_staleness: int) -> None:
        """Changes the bound for groups admitted from now on."""
        with self.changed:
            self.admission.max_staleness = max_staleness
            self._admit()

    def take(self, should_stop: Callable[[], bool] = lambda: False) -> RolloutGroup | None:
        """The next group to train on; None when `should_stop()` turned true while waiting.

        Raises:
            ProducerError: a background thread died (its error is the cause).
            StalledError: nothing happened for `timeout_s`.
        """
        began = time.monotonic()
        try:
            with self.changed:
                index = self.wait_for(self.admission.choose, should_stop)
                if index is None:
                    return None
                group = self.book.hand_out(index, self.admission.take(index))
                self._drop_lost()
                return group
        finally:
            self._wait_s += time.monotonic() - began

    def wait_for(self, ready: Callable[[], int | None], should_stop: Callable[[], bool] = lambda: False) -> int | None:
        """What `ready` returns as soon as that is a number; None to stop. Call it with `changed` held."""
        last_change = time.monotonic()
        progress = self._progress()
        while True:
            if self._error is not None:
                raise ProducerError(f"rollout generation failed: {self._error}") from self._error
            if (found := ready()) is not None:
                return found
            if should_stop():
                return None
            if not self._thread.is_alive():
                raise ProducerError("the producer thread is not running: it was stopped, or never started")
            if progress != (progress := self._progress()):
                last_change = time.monotonic()
            if time.monotonic() - last_change > self.timeout_s:
                raise StalledError(self._stall_message())
            self.changed.wait(POLL_S)

    @property
    def is_running(self) -> bool:
        """Whether the background side works: neither stopped nor broken."""
        return self._error is None and self._thread.is_alive()

    def begin_step(self) -> None:
        """The groups handed out so far have been trained on."""
        with self.changed:
            self.book.begin_step()

    def _progress(self) -> tuple[int, int]:
        return self.engine.num_tokens, self._num_scored

    def _stall_message(self) -> str:
        return (
            f"the trainer waited rollout_timeout_s={self.timeout_s:g} for a rollout group and nothing happened: "
            f"{len(self.book.unfinished)} groups unfinished, {len(self.book.finished)} finished but not allowed yet, "
            f"{self.engine.num_tokens} tokens generated so far by {type(self.engine).__name__}. Look at the engine "
            "first; raise data.rollout_timeout_s if a completion can really take this long."
        )

    def stats(self) -> ProducerStats:
        """Totals since the start."""
        with self.changed:
            return ProducerStats(
                wait_s=self._wait_s,
                run_s=time.monotonic() - self._began,
                engine_busy_s=self.engine.busy_s,
                scoring_s=self.scorer.busy_s,
                num_tokens=self.engine.num_tokens,
                num_finished=self._num_finished,
                num_queued=len(self.book.finished),
                num_unfinished=len(self.book.unfinished),
                num_lost=self._num_lost,
            )

    def stop(self, timeout_s: float = 10.0) -> bool:
        """Ends the thread; False if it did not end in time (it is a daemon, so the process can still exit)."""
        self._stopped.set()
        with self.changed:
            self.changed.notify_all()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
        self.scorer.close()
        return not self._thread.is_alive()

    # -- producer's thread (and the reward workers, in `_finish`) ------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopped.is_set():
                for completion in self.engine.poll(POLL_S):
                    self._collect(completion)
                self.scorer.check()
        except BaseException as error:
            with self.changed:
                self._error = error
                self.changed.notify_all()

    def _admit(self) -> None:
        """Submits as many prompts as there are slots, in one call."""
        with self.changed:
            requests = []
            for _ in range(self.admission.num_admissible):
                position = self.again.popleft() if self.again else self.stream.advance()
                index = self.admission.admit()
                requests += self.book.open(index, position, self.stream.at(position), self.version)
            if requests:
                self.engine.submit(requests)

    def _drop_lost(self) -> None:
        """Redundant groups that came too late: what is still being sampled of them is aborted."""
        lost = self.admission.lose()
        running = [request_id for index in lost for request_id in self.book.give_up(index)]
        self._num_lost += len(lost)
        if running:
            self.engine.abort(running)

    def _collect(self, completion: Completion) -> None:
        with self.changed:
            found = self.book.collect(completion)
        if found is not None:
            self.score(*found)

    def score(self, group: OpenGroup, sample: int) -> None:
        """Has a completion scored, as soon as it is there: its group may still be sampled."""
        if (reward := group.completions[sample].reward) is not None:
            self._file_reward(group, sample, reward)
            return
        self.scorer.submit(
            group.prompt,
            group.texts[sample],
            done=partial(self._file_reward, group, sample),
            give_up=partial(self._give_up, group),
            is_wanted=partial(self._is_open, group),
        )

    def _is_open(self, group: OpenGroup) -> bool:
        return self.book.unfinished.get(group.index) is group

    def _give_up(self, group: OpenGroup) -> None:
        """A group that cannot be scored: another prompt takes its slot."""
        with self.changed:
            if not self._is_open(group):
                return
            if running := self.book.give_up(group.index):
                self.engine.abort(running)
            self.admission.drop(group.index)
            self._num_scored += 1  # something happened
            self._admit()
            self.changed.notify_all()

    def _file_reward(self, group: OpenGroup, sample: int, reward: float) -> None:
        with self.changed:
            self._num_scored += 1
            if self.book.reward(group, sample, reward):
                self._num_finished += 1
                self.admission.finish(group.index)
                self._drop_lost()
                self._admit()
                self.changed.notify_all()
