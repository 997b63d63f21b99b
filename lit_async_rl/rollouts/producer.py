"""Background thread that keeps the engine busy within the staleness bound.

| who | waits for | woken by |
|---|---|---|
| trainer, in `take` (see `GroupWait`) | a finished group that may be trained on | `_file_reward`, an error, `stop` |
| producer thread, in `engine.poll` | a finished completion | the engine |
| reward worker, in `Scorer` | a completion to score | `_collect` |

Slots are returned in `advance`, which the trainer calls after a publication; new prompts are submitted there in one
call, so that the composition of decode batches does not depend on timing. Errors of the threads are recorded and raised
by `take` with their cause; an engine that hangs or fails can be replaced.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial

from lit_async_rl.engines.base import Completion, RolloutEngine, SamplingParams
from lit_async_rl.models.tokenizer import TextCodec
from lit_async_rl.prompts.stream import PromptStream
from lit_async_rl.rewards.scorer import Scorer
from lit_async_rl.rollouts.engine_listener import EngineListener
from lit_async_rl.rollouts.evaluation import EvaluationRun
from lit_async_rl.rollouts.group_book import GroupBook, OpenGroup
from lit_async_rl.rollouts.group_wait import GroupWait
from lit_async_rl.rollouts.intake import Intake
from lit_async_rl.rollouts.stats import ProducerStats
from lit_async_rl.rollouts.wait_timer import WaitTimer
from lit_async_rl.scheduling.admission import Admission
from lit_async_rl.types import RolloutGroup
from lit_async_rl.utils.patience import announced
from lit_async_rl.utils.spans import Spans


class Producer:
    """Admits prompts, collects completions, scores them, and hands out finished groups.

    Args:
        engine: set up and loaded with the first weights.
        stream: endless prompts; `codec`: tokenizer; `admission`: the bound.
        group_size: completions per prompt.
        sampling: sampling parameters.
        timeout_s: seconds without a new token or reward, while the trainer waits, before `StalledError`.
        intake: selection of prompts and groups; None keeps all.

    Attributes:
        listener: owns the engine and its failure.
        wait: waits of the trainer's thread.
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
        intake: Intake | None = None,
    ) -> None:
        self.stream, self.scorer, self.admission = stream, scorer, admission
        self.intake = intake or Intake()
        self.version = 0
        self.book = GroupBook(codec, group_size, sampling, self.intake.replicate_prompts)
        self.evaluation: EvaluationRun | None = None  # shares engine and reward workers
        self.again: deque[int] = deque()  # positions of prompts to be sampled before new ones
        self._num_scored = self._num_lost = 0
        self._is_stopping = False  # since the first admission, which is then left incomplete
        self.changed = threading.Condition(threading.RLock())
        self.listener = EngineListener(
            engine, self.changed, self._collect, scorer.check, timeout_s, codec.vocab_size, self._lose_request
        )
        self.wait = GroupWait(self.listener, self.book, scorer, timeout_s, lambda: self._num_scored)
        self.timer = WaitTimer()

    # -- trainer's thread ---------------------------------------------------------------------------------------------

    def start(self, version: int, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Starts sampling; the engine already has the weights of `version`.

        Where there are very many prompts, their admission is announced, and ends when `should_stop()` becomes true.
        """
        self.version = version
        self.listener.has_loaded(version)
        self.timer.start()
        with announced(self._first_prompts):
            self._admit(should_stop)
        self.listener.start()

    def _first_prompts(self) -> str:
        num_admitted = len(self.book.unfinished)
        left = self.admission.num_admissible
        return f"the first prompts: {num_admitted:,} of {num_admitted + left:,} are read and given to the engine"

    def advance(self, version: int) -> None:
        """Ends a round: the engine has the weights of `version`; the slots of the groups trained on are returned."""
        with self.changed:
            self.version = version
            self.admission.advance()
            self._drop_lost()
            self._admit()
            self.changed.notify_all()

    def set_max_staleness(self, max_staleness: int) -> None:
        """Changes the bound of groups admitted from now on."""
        with self.changed:
            self.admission.max_staleness = max_staleness
            self._admit()

    def take(self, should_stop: Callable[[], bool] = lambda: False) -> RolloutGroup | None:
        """The next group to train on; None if `should_stop()` became true while waiting.

        Raises:
            ProducerError: a background thread died (its error is the cause).
            StalledError: no progress for `timeout_s`.
        """
        with self.timer.waiting(), self.changed:
            index = self.wait.until(self.admission.choose, should_stop)
            if index is None:
                return None
            deadline = self.admission.take(index)
            group = self.book.hand_out(index, deadline, self.admission.bounds[index])
            self._drop_lost()
            self._admit()
            return group

    def rest(self) -> None:
        """Lets an engine that has nothing to do before the next publication sleep."""
        with self.changed:
            if not self.book.unfinished and not self.admission.num_admissible:
                self.listener.sleep()

    def observe(self, spans: Spans) -> None:
        """Records in a timeline when the trainer waits, and what engine and rewards do."""
        self.timer.observe(spans)
        self.listener.observe(spans)
        self.scorer.observe(spans)

    def replace_engine(self, engine: RolloutEngine) -> int:
        """Switches to another engine, which has weights; returns the number of groups sampled again.

        Finished groups and completions of the old engine are kept.
        """
        with self.changed:
            lacking = self.book.lacking
            self.listener.replace(engine, [r for group in lacking for r in self.book.missing(group)], self.version)
            self._admit()
            return len(lacking)

    @property
    def engine(self) -> RolloutEngine:
        """The engine in use."""
        return self.listener.engine

    def begin_step(self) -> None:
        """Marks the groups handed out so far as trained on."""
        with self.changed:
            for index, (group, _) in self.book.in_step.items():
                position = self.book.positions[index]
                self.intake.trained(group, self.stream.number_at(position), position)
            self.book.begin_step()

    def stats(self) -> ProducerStats:
        """Totals since the start."""
        with self.changed:
            return ProducerStats.of(self.timer, self.listener, self.scorer, self.book, self.intake, self._num_lost)

    def stop(self, timeout_s: float = 10.0) -> bool:
        """Stops the thread; False if it did not end in time (it is a daemon, so the process can still exit)."""
        is_ended = self.listener.stop(timeout_s)
        self.scorer.close()
        return is_ended

    # -- producer's thread (and the reward workers', in `_file_reward` and `_give_up`) ---------------------------------

    def _admit(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Submits as many prompts as there are free slots, in one call; none any more once `should_stop()` was true."""
        with self.changed:
            requests = []
            for _ in range(0 if self._is_stopping else self.admission.num_admissible):
                if should_stop():
                    self._is_stopping = True
                    break
                position = self.again.popleft() if self.again else self.intake.next_position(self.stream)
                index = self.admission.admit()
                requests += self.book.open(index, position, self.stream.at(position), self.version)
            self.listener.submit(requests)

    def _drop_lost(self) -> None:
        """Drops groups that exceed the bound and aborts their requests."""
        lost = self.admission.lose()
        is_sampling = any(index in self.book.unfinished for index in lost)
        partials = self.listener.partial_completions() if is_sampling else []
        running: list[int] = []
        for index in lost:
            position, progress = self.book.positions[index], self.book.progress_of(index, partials)
            running += self.book.give_up(index)
            number = self.stream.number_at(position)
            if self.intake.lose(index, number, position, *progress, self.admission.max_tries):
                self.again.append(position)
        self._num_lost += len(lost)
        self.listener.abort(running)

    def _collect(self, completion: Completion) -> None:
        if self.evaluation is not None and self.evaluation.collect(completion):
            return
        found = self.book.collect(completion)
        if found is not None:
            self.score(*found)

    def score(self, group: OpenGroup, sample: int) -> None:
        """Submits a completion for scoring as soon as it is sampled; its group may still be incomplete."""
        if (reward := group.completions[sample].reward) is not None:
            self._file_reward(group, sample, reward)
            return
        self.scorer.submit(
            group.prompt,
            group.texts[sample],
            done=partial(self._file_reward, group, sample),
            give_up=partial(self._give_up, group),
            is_wanted=partial(self.book.is_open, group),
            group=group.index,
            token_ids=group.completions[sample].token_ids,
        )

    def _lose_request(self, request_id: int) -> None:
        """Files that the engine gave a request up."""
        if self.evaluation is not None and self.evaluation.give_up(request_id):
            return
        if (group := self.book.group_of(request_id)) is not None:
            self._give_up(group)

    def _give_up(self, group: OpenGroup) -> None:
        """Drops a group that cannot be scored; another prompt takes its slot."""
        with self.changed:
            if not self.book.is_open(group):
                return
            self._drop(group)
            self._num_scored += 1  # something happened
            self._admit()
            self.changed.notify_all()

    def _file_reward(self, group: OpenGroup, sample: int, reward: float) -> None:
        with self.changed:
            self._num_scored += 1
            if self.book.reward(group, sample, reward):
                self._judge(group)
                self._drop_lost()
                self._admit()
                self.changed.notify_all()

    def _judge(self, group: OpenGroup) -> None:
        """Filters a finished group; if it is dropped, another prompt takes its slot."""
        number = self.stream.number_at(group.position)
        kept = self.intake.judge(self.book.finished[group.index], number)
        if kept is None:
            self._drop(group)
        else:
            self.book.finished[group.index] = kept
            self.admission.finish(group.index)

    def _drop(self, group: OpenGroup) -> None:
        self.listener.abort(self.book.give_up(group.index))
        self.admission.drop(group.index)
