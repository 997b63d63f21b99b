"""Background threads that keep the engine busy within the staleness bound.

The life of a group (`GroupState`), with the thread of each transition and the thread it wakes:

    free slot (counted by `Admission`)  <----------------------------------------------+
        |  `_admit`, any thread: takes a slot and the next prompt,                     |
        |  submits the requests                            -> producer, in `poll`      |
        v                                                                              |
    `SAMPLING`: the engine generates tokens, each tagged with its version              |
        |  `_collect`, producer: each completion goes to                               |
        |  the scorer by itself, or with its group         -> a reward worker          |
        v                                                                              |
    `SCORING`: all completions are there                                               |
        |  `_file_reward`, reward worker: the last reward                              |
        |  finishes the group, unless a filter drops it    -> trainer, in `take`       |
        v                                                                              |
    `FINISHED`                                                                         |
        |  `take`, trainer: the oldest one, unless another group                       |
        |  would then miss its deadline                                                |
        v                                                                              |
    `TAKEN`                                                                            |
        |  trainer: loss, gradient, optimizer step;                                    |
        |  `begin_step` removes the group                                              |
        v                                                                              |
    `TRAINED`: only its slot is left                                                   |
        |  trainer, at a publication: `listener.load_weights`, then `advance`          |
        +------------------------------------------------------------------------------+

The slot returns only at the publication, after the weights, because that bounds staleness: whatever is
admitted to it gets no older token. `Drop` and `Retry` return it in `take`, `Ring` when the group is finished;
they drop groups that become too old. What else may happen to a group:

| event | group | slot | prompt |
|---|---|---|---|
| a reward fails and has tries left | stays, with its other rewards | kept | the same |
| reward or environment has no tries left | dropped in `_give_up` | free at once | left out |
| an agent has no tries left | goes on with its other samples | kept | the same |
| a filter drops it when it is finished | dropped in `_filter` | free at once | used up |
| it is too old (`Drop`, `Retry`) | dropped in `_drop_lost` | free at once | left out; `Retry`: `again` |
| it is due but redundant (`Bounded`) | dropped in `_drop_lost` | free in `advance` | left out |
| it falls out of the buffer (`Ring`) | dropped in `_drop_lost` | free since it finished | left out |
| a rollback discards what sampled it | dropped in `_drop_discarded` | free in `advance` | `again` |
| the engine fails or hangs | what it lacks is sampled again | kept, with its deadline | the same |
| the run is resumed | the same, see `resume.py` | kept if the bound allows | the same; else `again` |

A prompt in `again` is sampled before new ones, in a new group. Only one thread waits for groups:

| who | waits for | woken by |
|---|---|---|
| trainer, in `take` | a finished group that it may take | `_file_reward`, `_give_up`, a failure |
| producer, in `engine.poll` | something to sample | `_admit`, through `engine.submit` |
| reward worker, in `Scorer` | a completion | `_collect`, through `Scorer.submit` |
| a caller of the engine | the call, within its time limit | the thread that makes it, see `EngineCalls` |

A stop, a thread that ended and an engine that hangs wake no thread: `take` checks for them every `POLL_INTERVAL_S`. New
prompts are submitted in one call, so that the composition of decode batches does not depend on timing. Errors
of the threads are recorded and raised by `take` with their cause; an engine that hangs or fails is replaced.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial

from lit_async_rl.engines.base import RolloutEngine
from lit_async_rl.errors import ProducerError, StalledError
from lit_async_rl.models.tokenizer import TextCodec
from lit_async_rl.prompts.stream import PromptStream
from lit_async_rl.rewards import hooks
from lit_async_rl.rewards.calls import Reward
from lit_async_rl.rewards.scorer import Scorer
from lit_async_rl.rollouts.engine_listener import EngineListener
from lit_async_rl.rollouts.group_book import GroupBook, GroupEntry, GroupState
from lit_async_rl.rollouts.group_wait import GroupWait
from lit_async_rl.rollouts.intake import FAILED, RESTARTED, ROLLED_BACK, Intake
from lit_async_rl.rollouts.request_owners import RequestOwners
from lit_async_rl.rollouts.totals import ProducerStats, WaitTimer
from lit_async_rl.runtime.waiting import announced
from lit_async_rl.scheduling.admission import Admission
from lit_async_rl.types import Completion, RolloutGroup, SamplingParams
from lit_async_rl.utils.identity import reward_identity

REWARD = "data.reward"
ENVIRONMENT = "the environment of data.engine"
FILTERS = "data.filters"


def identities_of(reward: Reward | None, engine: RolloutEngine, intake: Intake) -> dict[str, str | None]:
    """Identities of what makes rewards, by setting.

    Take them before the first completion is scored, in validation too: a reward's own counts and records do not make it
    another one.
    """
    return {
        REWARD: None if reward is None else reward_identity(reward),
        ENVIRONMENT: engine.scoring_identity,
        FILTERS: ", ".join(map(reward_identity, intake.filters)),
    }


log = logging.getLogger(__name__)


class Producer:
    """Admits prompts, collects completions, scores them, and hands out finished groups.

    Args:
        engine: set up and loaded with the first weights.
        stream: endless prompts; `codec`: tokenizer; `admission`: the bound.
        group_size: completions per prompt.
        sampling: sampling parameters.
        timeout_s: seconds without a new token or reward, while the trainer waits, before `StalledError`.
        intake: selection of prompts and groups; None keeps all.
        replicate_prompts: one request per completion.
        identities: see `identities_of`; by default those of now.

    Attributes:
        listener: owns the engine and its failure.
        wait: waits of the trainer's thread.
        owners: of requests in the engine besides training.
        last_valid: newest version whose groups train; the next publication discards later ones. None is all.
        identities: of what makes rewards, by setting.
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
        replicate_prompts: bool = False,
        identities: Mapping[str, str | None] | None = None,
    ) -> None:
        self.stream = stream
        self.scorer = scorer
        self.admission = admission
        self.intake = intake or Intake()
        self.identities = identities or identities_of(scorer.reward, engine, self.intake)
        self.version = 0
        self.book = GroupBook(codec, group_size, sampling, replicate_prompts=replicate_prompts)
        self.owners = RequestOwners()
        self.again: deque[int] = deque()  # positions of prompts to be sampled before new ones
        self.last_valid: int | None = None
        self._num_scored = 0
        self._num_lost = 0
        self._is_stopping = False  # since the first admission, which is then left incomplete
        # Guards admission, book, intake, stream and the listener's ledger: trainer, producer and reward workers all
        # admit, file and drop groups. Reentrant, because all of these paths end in `_admit`, and an engine that scores
        # files rewards within `_collect`. Held during `submit`, `abort`, `sleep` and `partial_completions` of the
        # engine, which have time limits; never during `poll` and `load_weights`, or sampling and filing would stand
        # still. It comes before the engine's own lock; engines never call back into the producer.
        self.changed = threading.Condition(threading.RLock())
        self.listener = EngineListener(
            engine,
            changed=self.changed,
            on_completion=self._collect,
            on_turn=scorer.check,
            timeout_s=timeout_s,
            vocab_size=codec.vocab_size,
            on_given_up=self._lose_request,
            on_lost=self._lose_sample,
        )
        self.wait = GroupWait(
            listener=self.listener,
            book=self.book,
            scorer=scorer,
            timeout_s=timeout_s,
            num_scored=lambda: self._num_scored,
        )
        self.timer = WaitTimer()
        hooks.use_policy(scorer.reward, self)

    # -- trainer's thread ---------------------------------------------------------------------------------------------

    def start(self, version: int, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Starts sampling; the engine already has the weights of `version`.

        Announces the admission of very many prompts, which ends when `should_stop()` becomes true.
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
        """Ends a round: the engine has the weights of `version`; returns the slots of groups trained on."""
        with self.changed:  # one change: a reward filed in between would admit prompts under the old version
            if self.last_valid is not None:
                self.finish_in_order()
            self.version = version
            self.admission.advance()
            self._drop_lost()
            self._drop_discarded()
            self._admit()

    def set_max_staleness(self, max_staleness: int) -> None:
        """Changes the bound of groups admitted from now on."""
        with self.changed:
            self.admission.max_staleness = max_staleness
            self._admit()

    def discard_after(self, version: int) -> None:
        """Discards, at the next publication, what later versions have sampled."""
        with self.changed:
            self.last_valid = version if self.last_valid is None else min(version, self.last_valid)

    def take_rewards(self) -> list[float]:
        """Mean reward of each version whose groups are all scored, oldest first, each once.

        Quick groups arrive first, and alone would bias the mean. With in-order admission it waits for all earlier
        versions, so that the result does not depend on timing.
        """
        with self.changed:
            self.finish_in_order(before=self.version)
            return self.intake.take_rewards(min([self.version, *(group.version for group in self.book.unfinished)]))

    def finish_in_order(self, before: int | None = None) -> None:
        """With in-order admission, waits until all groups admitted before a version, or all, are scored.

        Call it with `changed` held. If the engine fails, it returns, and the next `take` raises.

        Raises:
            StalledError: scoring hangs.
            ProducerError: a background thread died while waiting.
        """
        if not self.admission.in_order or not self.listener.is_working:
            return

        def finished() -> int | None:
            return None if any(before is None or group.version < before for group in self.book.unfinished) else 0

        try:
            self.wait.until(finished)
        except (StalledError, ProducerError):
            if self.listener.engine_error is None:
                raise

    def take(self, should_stop: Callable[[], bool] = lambda: False) -> RolloutGroup | None:
        """The next group to train on; None if `should_stop()` became true while waiting.

        Raises:
            ProducerError: a background thread died (its error is the cause).
            StalledError: no progress for `timeout_s`.
        """
        with self.timer.waiting(), self.changed:  # choice and taking are one; `wait` lets go of the lock meanwhile
            index = self.wait.until(self.admission.choose, should_stop)
            if index is None:
                return None
            deadline = self.admission.take(index)
            group = self.book.hand_out(index, deadline, self.admission.bounds[index])
            self._drop_lost()
            self._admit()
            return group

    def rest(self) -> None:
        """Lets an engine without work before the next publication sleep."""
        with self.changed:  # nothing may be admitted between "nothing to do" and `sleep`
            if not self.book.unfinished and not self.admission.num_admissible and not self.owners.is_waiting:
                self.listener.sleep()

    def replace_engine(self, engine: RolloutEngine) -> int:
        """Switches to another engine, which has weights; returns the number of groups sampled again.

        Finished groups and completions of the old engine are kept.
        """
        with self.changed:  # nothing may be filed between the list of what is missing and the requests for it
            self.intake.drop_tokens(RESTARTED, self.listener.num_under_way)
            sampling = self.book.in_state(GroupState.SAMPLING)
            requests = [request for group in sampling for request in self.book.missing(group)]
            requests += self.owners.again()
            self.listener.replace(engine, requests, self.version)
            self._admit()
            return len(sampling)

    @property
    def engine(self) -> RolloutEngine:
        """The engine in use."""
        return self.listener.engine

    def begin_step(self) -> None:
        """Marks the groups handed out so far as trained on."""
        with self.changed:
            for group in self.book.begin_step():
                self.intake.trained(group.finished, self.stream.number_at(group.position), group.position)

    def stats(self) -> ProducerStats:
        """Totals since the start."""
        with self.changed:
            return ProducerStats(
                wait_s=self.timer.wait_s,
                run_s=self.timer.run_s,
                engine_busy_s=self.listener.busy_s,
                scoring_s=self.scorer.busy_s,
                num_tokens=self.listener.num_tokens,
                num_finished=self.intake.num_sampled,
                num_queued=len(self.book.in_state(GroupState.FINISHED)),
                num_unfinished=len(self.book.unfinished),
                num_lost=self._num_lost,
                fates=self.intake.fates,
                num_sampled=self.intake.num_sampled,
                num_dropped=self.intake.num_dropped,
                sampled_reward=self.intake.sampled_reward,
                scoring_cpu_share=self.scorer.cpu_share,
                dropped_tokens=dict(self.intake.dropped_tokens),
                trained_tokens=self.intake.trained_tokens,
                threshold=self.intake.success.threshold,
            )

    def stop(self, timeout_s: float = 10.0) -> bool:
        """Stops the thread, a daemon; False if it did not end in time."""
        is_ended = self.listener.stop(timeout_s)
        self.scorer.close()
        hooks.use_policy(self.scorer.reward, None)
        return is_ended

    # -- producer's thread (and the reward workers', in `_file_reward` and `_give_up`) --------------------------------

    def _admit(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Submits a prompt for each free slot, in one call; none once `should_stop()` was true."""
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
        lost = [self.book.groups[index] for index in self.admission.lose()]
        partials = self.listener.partial_completions() if any(group.is_open for group in lost) else []
        running: list[int] = []
        for group in lost:
            length, seconds = self.book.progress_of(group, partials)
            num_running = self.book.num_running_tokens(group, partials)
            self.intake.drop_tokens(self.admission.drops_as, self.book.num_tokens(group, partials))
            self.listener.num_aborted += num_running
            running += self.book.drop(group)
            is_again = self.intake.lose(
                group.index,
                number=self.stream.number_at(group.position),
                position=group.position,
                length=length,
                seconds=seconds,
                max_tries=self.admission.max_tries,
            )
            if is_again:
                self.again.append(group.position)
        self._num_lost += len(lost)
        self.listener.abort(running)

    def _drop_discarded(self) -> None:
        """Drops groups of versions after `last_valid`, and those being sampled; their prompts come again."""
        if self.last_valid is None:
            return
        groups = self.book.in_state(GroupState.SAMPLING, GroupState.SCORING, GroupState.FINISHED)
        # what is still being sampled goes on with the last version, or has not begun
        lost = [g for g in groups if g.state is GroupState.SAMPLING or g.newest_version > self.last_valid]
        partials = self.listener.partial_completions() if any(group.is_open for group in lost) else []
        running: list[int] = []
        num_tokens = 0
        for group in lost:
            length, seconds = self.book.progress_of(group, partials)
            num_tokens += (sampled := self.book.num_tokens(group, partials))
            self.intake.drop_tokens(ROLLED_BACK, sampled)
            self.listener.num_aborted += self.book.num_running_tokens(group, partials)
            self.intake.discard(group.index, self.stream.number_at(group.position), length, seconds=seconds)
            running += self.book.drop(group)
            self.admission.drop(group.index)
            self.again.append(group.position)
        self.listener.abort(running)
        self.intake.forget_rewards(self.last_valid)
        log.warning(
            "rollback: %d groups (%d tokens) were discarded, because policy versions after %d had sampled them",
            len(lost),
            num_tokens,
            self.last_valid,
        )
        self.last_valid = None

    def _collect(self, completion: Completion) -> None:
        if (owner := self.owners.of(completion.request_id)) is not None:
            owner.collect(completion)
            return
        found = self.book.collect(completion)
        if found is not None:
            self.score(*found)

    def score(self, group: GroupEntry, sample: int) -> None:
        """Submits a completion for scoring as soon as it is sampled; its group may still be incomplete."""
        completion = group.rollouts[sample]
        if completion.reward is not None:
            self._file_reward(group, sample, completion.reward)
            return
        if self.scorer.scores_groups:
            self._score_group(group)
            return
        self.scorer.submit(
            group.prompt,
            completion.text,
            done=partial(self._file_reward, group, sample),
            give_up=partial(self._give_up, group),
            is_wanted=lambda: group.is_open,
            group=group.index,
            token_ids=completion.token_ids,
        )

    def _score_group(self, group: GroupEntry) -> None:
        """Submits all completions of a group together, once the last is sampled."""
        with self.changed:
            if group.state is not GroupState.SCORING or group.is_submitted:
                return
            group.is_submitted = True
            texts = [completion.text for _, completion in sorted(group.rollouts.items())]
        self.scorer.submit_group(
            group.prompt,
            texts,
            done=partial(self._file_rewards, group),
            give_up=partial(self._give_up, group),
            is_wanted=lambda: group.is_open,
            group=group.index,
        )

    def _lose_request(self, request_id: int) -> None:
        """Files a request that the engine gave up."""
        if (owner := self.owners.of(request_id)) is not None:
            owner.lose(request_id)
            return
        if (group := self.book.group_of(request_id)) is not None:
            self._give_up(group)

    def _lose_sample(self, request_id: int, sample: int) -> None:
        """Files a sample that the engine gave up; its group goes on with the others, if any."""
        if (owner := self.owners.of(request_id)) is not None:
            owner.lose(request_id, 1)
            return
        group = self.book.lose(request_id, sample)
        if group is None:
            return
        if len(group.lost) == self.book.group_size:
            self._give_up(group)
            return
        self._num_scored += 1  # counts as progress for `wait`
        if self.book.finish_if_rewarded(group):
            self._close(group)
        elif self.scorer.scores_groups:
            self._score_group(group)

    def _close(self, group: GroupEntry) -> None:
        """Files a group that has just been finished."""
        self._filter(group)
        self._drop_lost()
        self._admit()
        self.changed.notify_all()  # only now: the trainer could not take a group that is not finished

    def _give_up(self, group: GroupEntry) -> None:
        """Drops a group that cannot be scored; another prompt takes its slot."""
        with self.changed:
            if not group.is_open:
                return
            partials = self.listener.partial_completions()
            self.listener.num_aborted += self.book.num_running_tokens(group, partials)
            self.intake.drop_tokens(FAILED, self.book.num_tokens(group, partials))
            self._drop(group)
            self._num_scored += 1  # counts as progress for `wait`
            self._admit()
            self.changed.notify_all()  # with a group fewer to wait for, the trainer may take another

    def _file_reward(self, group: GroupEntry, sample: int, reward: float) -> None:
        with self.changed:
            self._num_scored += 1
            if self.book.reward(group, sample, reward):
                self._close(group)

    def _file_rewards(self, group: GroupEntry, rewards: list[float]) -> None:
        with self.changed:
            for sample, reward in zip(sorted(group.rollouts), rewards, strict=True):
                self._file_reward(group, sample, reward)

    def _filter(self, group: GroupEntry) -> None:
        """Filters a finished group; if it is dropped, another prompt takes its slot."""
        number = self.stream.number_at(group.position)
        try:
            group.result = self.intake.filter_group(group.finished, number)
        except BaseException:  # ends the run, whose resume filters the group: it must not be saved as filtered
            self.book.reopen(group)
            raise
        if group.result is None:
            self._drop(group)
        else:
            self.admission.finish(group.index)

    def _drop(self, group: GroupEntry) -> None:
        self.listener.abort(self.book.drop(group))
        self.admission.drop(group.index)
