"""Rollout source on the leading rank: engine, producer (or tape) and replay buffer; weights in, groups out.

All methods are called from the trainer's thread.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from time import monotonic
from typing import Any

from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.memory import garbage_collection_cuda, is_oom_error
from torch import Tensor

from lit_async_rl.data.collate import StreamedStep
from lit_async_rl.data.compatibility import check_ends
from lit_async_rl.data.settings import Limits
from lit_async_rl.distributed.scatter import RELOAD, Exchanged, OneProcess, StepScatter
from lit_async_rl.engines.base import RolloutEngine
from lit_async_rl.errors import EngineDown, InvariantError, ProducerError, SetupError, StalledError
from lit_async_rl.losses.aggregation import Aggregation
from lit_async_rl.models.loading import base_of
from lit_async_rl.prompts.sources import PromptSource
from lit_async_rl.prompts.stream import UsablePrompts
from lit_async_rl.replay.buffer import ReplayBuffer, Snapshot
from lit_async_rl.replay.tape_source import TAPE, Replay
from lit_async_rl.rollouts.checkpoint import restore_producer, save_producer
from lit_async_rl.rollouts.engine_listener import EngineCalls
from lit_async_rl.rollouts.evaluation import EvaluationPlan, EvaluationRun
from lit_async_rl.rollouts.producer import Producer, ProducerStats
from lit_async_rl.scheduling.admission import Admission, check_bound
from lit_async_rl.types import PromptBatch, RolloutBatch, RolloutGroup
from lit_async_rl.utils.guarded_calls import announced
from lit_async_rl.utils.lightning_types import AnyTrainer
from lit_async_rl.utils.spans import TRAINER, recorder

# -- The engine of a run: set up when its first weights come, replaced when it hangs or fails, closed at the end ------


CLOSE_S = 10.0  # of an engine that broke
STOP_S = 30.0  # of one that works, at the end
OFTEN = 3  # restarts, with fewer than FEW_STEPS steps between them, that a warning names together
FEW_STEPS = 10
MAX_ERROR_CHARS = 200
log = logging.getLogger(__name__)


class ReplaceableEngine:
    """Holds the engine in use, and replaces it by a fresh one with the same settings. For the trainer's thread.

    Args:
        engine: not set up.
        model: argument of its `setup`.
        limits: replacements in a row, without a step in between, and timeout of calls.

    Attributes:
        engine: the one in use.
        num_restarts: replacements since the run began.
        last_error: why the last one was replaced; empty if none was.
    """

    def __init__(self, engine: RolloutEngine, model: str | None, limits: Limits) -> None:
        self.engine = engine
        self.model = model
        self.max_restarts = limits.engine_restarts
        self._is_set_up = False
        self._timeout_s = limits.rollout_timeout_s
        self._restarts_in_a_row = 0
        self._recent_restarts: deque[int] = deque(maxlen=OFTEN)  # by the number of steps before each
        self._num_steps = 0
        self.num_restarts = 0
        self.last_error = ""

    @property
    def calls(self) -> EngineCalls:
        """Its calls, with timeouts."""
        return EngineCalls(self.engine, self._timeout_s)

    def set_up(self) -> None:
        """Sets the engine up, unless it is."""
        if not self._is_set_up:
            self._set_up(self.calls)
            self._is_set_up = True

    def _set_up(self, calls: EngineCalls) -> None:
        if self.model is None:
            raise SetupError("data.model is not set")
        self.engine.is_used = True
        with announced(f"{calls.name} to start: it loads the model, and may compile"):
            calls.setup(base_of(self.model))  # weights come with the first publication, an adapter's changes among them

    @property
    def may_restart(self) -> bool:
        """Whether it may be replaced once more; says so if not."""
        if self._restarts_in_a_row < self.max_restarts:
            return True
        if self.max_restarts:
            log.warning("the engine fails still after data.limits.engine_restarts=%d in a row", self.max_restarts)
        return False

    def note_step(self) -> None:
        """Reports that a step got all of its groups: restarts count anew."""
        self._restarts_in_a_row = 0
        self._num_steps += 1

    def restart(self, producer: Producer, error: Exception, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replaces the engine after an error; its groups that lack completions are sampled again.

        If the new one does not start, its error is the producer's next.
        """
        self._restarts_in_a_row += 1
        self.num_restarts += 1
        self.last_error = f"{type(error).__name__}: {error}".splitlines()[0][:MAX_ERROR_CHARS]
        self._warn_if_often()
        is_out_of_memory = is_oom_error(error) or isinstance(error, MemoryError)
        self._end(error)
        try:
            before = self.engine.num_slots
            self.engine = producer.listener.calls.ask("fresh", lambda: self.engine.fresh(is_out_of_memory))
            if (slots := self.engine.num_slots) < before:
                log.warning("out of memory: data.engine.num_slots is now %d instead of %d", slots, before)
            calls = self.calls
            self._set_up(calls)
            calls.load_weights(producer.version, weights)
        except Exception as failure:
            producer.listener.engine_error = failure
            log.warning("a new engine did not start after %s: %s", type(error).__name__, failure)
            return
        num_groups = producer.replace_engine(self.engine)
        log.warning(
            "the engine was restarted (%d of data.limits.engine_restarts=%d in a row), with the weights of version %d; "
            "%d groups are sampled again, finished ones are kept. %s: %s",
            *(self._restarts_in_a_row, self.max_restarts, producer.version, num_groups),
            *(type(error).__name__, error),
        )

    def _warn_if_often(self) -> None:
        """Says loudly that a run restarts its engine every few steps: each counts as the first in a row."""
        self._recent_restarts.append(self._num_steps)
        if len(self._recent_restarts) == OFTEN and self._num_steps - self._recent_restarts[0] <= OFTEN * FEW_STEPS:
            log.warning(
                "the engine was restarted %d times within %d steps (%d times in this run): groups are sampled again, "
                "and training waits for them. The last error: %s",
                *(OFTEN, self._num_steps - self._recent_restarts[0], self.num_restarts, self.last_error),
            )
            self._recent_restarts.clear()

    def _end(self, error: Exception) -> None:
        """Closes a failed engine and frees its memory; one that hangs on close is abandoned."""
        traceback.clear_frames(error.__traceback__)  # which hold what filled the memory
        with contextlib.suppress(Exception):  # it is broken already
            self.calls.close(CLOSE_S)
        gc.collect()
        garbage_collection_cuda()

    def close(self) -> None:
        """Closes the engine. Safe to call twice."""
        self.calls.close(STOP_S)
        self._is_set_up = False

    def end(self) -> None:
        """Closes what all engines of the run shared, such as an environment. Safe to call twice."""
        self.calls.end(STOP_S)


class RolloutSource:
    """Takes the weights of each publication and returns the groups of each step.

    Args:
        engine: set up with the first weights, closed by `stop`.
        model: argument of the engine's `setup`.
        admission: of the producer.
        make_producer: called with the number of the first step when the engine has its weights.
        groups_per_step: returned for one step.
        fresh_per_step: how many of them come from the producer.
        replay: supplies the others; None if all are fresh.
        limits: restarts of the engine, and timeout of its calls.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        model: str | None,
        admission: Admission,
        make_producer: Callable[[int], Producer | Replay],
        groups_per_step: int,
        fresh_per_step: int,
        replay: ReplayBuffer | None,
        limits: Limits,
    ) -> None:
        self.admission = admission
        self.replay = replay
        self.groups_per_step = groups_per_step
        self.fresh_per_step = fresh_per_step
        self._make_producer = make_producer
        self._holder = ReplaceableEngine(engine, model, limits)
        self._producer: Producer | Replay | None = None
        self._saved: dict[str, Any] = {}  # by the run that this one resumes
        self._step_began = -1  # the step whose groups were handed out last
        self._replay_before: Snapshot | None = None  # the step's groups were mixed
        self._taken: list[RolloutGroup] = []  # by a call of `take` that has not returned yet
        self._first_bound: int | None = None  # set before the start

    @property
    def engine(self) -> RolloutEngine:
        """The engine in use; another one after a restart."""
        return self._holder.engine

    def use_model(self, model: str) -> None:
        """Sets the model that the engine loads."""
        self._holder.model = model

    def publish(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Loads new weights into the engine; the first call also sets it up."""
        self._holder.set_up()
        if isinstance(self._producer, Producer):
            self._producer.listener.load_weights(version, weights)
        else:
            self._holder.calls.load_weights(version, weights)

    def start(self, version: int, step: int, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Starts the background thread, from the restored state if there is one; the engine has its weights.

        No more prompts are admitted when `should_stop()` becomes true.
        """
        producer = self._producer = self._make_producer(step)
        if isinstance(producer, Replay):
            producer.load_state_dict(self._saved)
            producer.start(version)
            return
        self._check_prompts(producer)
        with producer.changed:  # a restored completion that is scored admits prompts
            if self._saved and TAPE not in self._saved:  # a replay's checkpoint says nothing of prompts
                producer.listener.has_loaded(version)
                if restore_producer(producer, self._saved) and self.replay is not None:
                    self.replay.clear()
            if self._first_bound is not None:
                self.admission.max_staleness = self._first_bound
            producer.start(version, should_stop)

    def _check_prompts(self, producer: Producer) -> None:
        """Refuses unusable prompts, or excludes them from the stream."""
        stream = producer.stream
        codec = producer.book.codec
        max_tokens = producer.book.sampling.max_tokens
        length = self.engine.max_model_len
        why = f"the engine's max_model_len={length} leaves besides sampling.max_tokens={max_tokens}"
        usable = UsablePrompts(stream.source, codec.encode, length - max_tokens, why)
        usable.check()
        stream.usable = usable
        check_ends(codec, producer.book.sampling, stream.source)
        if codec.special_tokens == "tags" and (tags := codec.tags):
            log.info("rewards read the special tokens %s; data.scoring.special_tokens: none leaves them out", tags)
        if codec.ends.are_disputed and producer.book.sampling.end_token_ids is None:
            log.warning("model.model=%r: %s", codec.model, codec.ends.describe(codec.tokenizer))

    def advance(self, version: int) -> None:
        self._started().advance(version)

    def set_max_staleness(self, max_staleness: int) -> None:
        """Changes the bound of groups admitted from now on; those of a checkpoint are kept, whatever their bound."""
        if self._producer is None:
            self._first_bound = max_staleness
        else:
            self._producer.set_max_staleness(max_staleness)

    def evaluate(self, plan: EvaluationPlan) -> EvaluationRun:
        """Starts sampling held-out prompts concurrently with the rollouts."""
        producer = self._started()
        if not isinstance(producer, Producer):
            raise SetupError("Evaluation needs an engine, and data.admission=FromTape has none")
        producer.evaluation = EvaluationRun(producer.listener, producer.scorer, producer.book.codec, plan)
        producer.evaluation.submit()
        return producer.evaluation

    def take_step(self, step: int, should_stop: Callable[[], bool]) -> list[RolloutGroup] | None:
        """The groups of `step`, each token within its bound; None when the run is asked to stop."""
        if not self._taken:
            self.begin_step(step)
            self._replay_before = None
        groups = self.take(self.fresh_per_step, should_stop)
        if groups is None or self.replay is None:
            return groups
        self._replay_before = self.replay.snapshot()
        return self.replay.mix(groups, self.groups_per_step, self._started().version)

    def begin_step(self, step: int) -> None:
        """Marks all groups taken before as trained on; the next ones are for `step`."""
        self._started().begin_step()
        self._step_began = step

    def take(self, num_groups: int, should_stop: Callable[[], bool]) -> list[RolloutGroup] | None:
        """The next groups to finish; None when the run is asked to stop.

        Raises:
            EngineDown: call `restart_engine`, then this again; groups already taken are kept.
            ProducerError, StalledError: the failure is not the engine's, or it was restarted too often.
        """
        producer = self._started()
        while len(self._taken) < num_groups:
            try:
                group = producer.take(should_stop=should_stop)
            except (ProducerError, StalledError) as error:
                self._check_restarts(producer, error)
                raise EngineDown from error
            if group is None:
                self._taken = []
                return None
            self._taken.append(group)
        groups = self._taken
        self._taken = []
        self._holder.note_step()
        check_bound(groups, producer.version)
        if isinstance(producer, Producer):
            producer.rest()
        return groups

    def _check_restarts(self, producer: Producer | Replay, error: Exception) -> None:
        """Raises errors that another engine would not fix."""
        if not isinstance(producer, Producer) or producer.listener.engine_error is None:
            raise error
        if not self._holder.may_restart:
            raise error

    def restart_engine(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replaces an engine that hangs or failed; groups that lack completions are sampled again.

        Everything received from the old engine is kept. If the new one fails to start, the next `take` raises its
        error.
        """
        producer = self._started()
        error = producer.listener.engine_error if isinstance(producer, Producer) else None
        if not isinstance(producer, Producer) or error is None:
            raise InvariantError("an engine that works is to be restarted")
        self._holder.restart(producer, error, weights)

    @property
    def engine_restarts(self) -> str:
        """Number of engines that were replaced, and why the last one was; empty if none was."""
        return f"{self._holder.num_restarts}; last: {self._holder.last_error}" if self._holder.num_restarts else ""

    @property
    def has_begun(self) -> bool:
        """Whether its engine was set up, also for another source, or its producer started; one serves a single fit."""
        return self._holder.engine.is_used or self._producer is not None

    def stats(self) -> ProducerStats | None:
        """Totals of sampling and scoring since the start; None before it."""
        return self._producer.stats() if self._producer else None

    def state_dict(self, step: int) -> dict[str, Any]:
        """Every group admitted and not trained on before `step`, see `lit_async_rl.rollouts.checkpoint`."""
        if self._producer is None:
            return self._saved
        is_done = step > self._step_began
        if isinstance(self._producer, Replay):
            state = self._producer.state_dict(step_is_done=is_done)
        else:
            state = save_producer(self._producer, step_is_done=is_done)
        if self.replay is None:
            return state
        return state | {"replay": self.replay.state_dict(None if is_done else self._replay_before)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Stores the state; `start` restores it."""
        self._saved = state
        if self.replay is not None and "replay" in state:
            self.replay.load_state_dict(state["replay"])

    def stop(self) -> None:
        """Stops the background thread and closes the engine. Safe to call twice."""
        if self._producer is not None:
            self._producer.stop()
        self._holder.close()

    def end(self) -> None:
        """Closes what the engines of all fits and validations share, such as an environment. Safe to call twice."""
        self._holder.end()

    def _started(self) -> Producer | Replay:
        if self._producer is None:
            raise SetupError("add the WeightSync callback: it starts the producer")
        return self._producer


# -- Micro-batches of optimizer steps from finished groups: a whole step at once, or streamed as groups finish --------


class StepBatches:
    """Makes the micro-batches of all ranks, on the leading rank.

    Args:
        source: of groups.
        collate: `collate_step` with the arguments that are the same in every step.
        aggregation: weight of each token in the average over the step.
        num_groups: groups of a step.
        num_micro_batches: micro-batches of a step on each rank.
        streams: whether to return each micro-batch as soon as its groups are finished.

    Attributes:
        groups: of the current step so far.
    """

    def __init__(
        self,
        source: RolloutSource,
        collate: Callable[..., list[RolloutBatch]],
        aggregation: Aggregation,
        num_groups: int,
        num_micro_batches: int,
        streams: bool,
    ) -> None:
        self.source = source
        self.collate = collate
        self.aggregation = aggregation
        self.num_groups = num_groups
        self.num_micro_batches = num_micro_batches
        self.streams = streams
        self.groups: Sequence[RolloutGroup] = ()
        self._streamed: StreamedStep | None = None

    def next(self, step: int, num_places: int, should_stop: Callable[[], bool]) -> list[RolloutBatch] | None:
        """All micro-batches of a step, or the next one of each rank; None when the run is asked to stop.

        Args:
            step: number of the optimizer step.
            num_places: ranks with different data; micro-batches that run concurrently are adjacent.
            should_stop: polled while waiting.
        """
        if self.streams:
            return self._next_part(step, num_places, should_stop)
        groups = self.source.take_step(step, should_stop)
        if groups is None:
            return None
        self.groups = groups
        number = self.num_micro_batches * num_places
        batches = self.collate(groups, aggregation=self.aggregation, num_micro_batches=number)
        return [self._stamp(batch, step, n // num_places) for n, batch in enumerate(batches)]

    def _next_part(self, step: int, num_places: int, should_stop: Callable[[], bool]) -> list[RolloutBatch] | None:
        if self._streamed is None or self._streamed.is_done:
            self.source.begin_step(step)
            self._streamed = StreamedStep(self.aggregation, self.num_groups, self.num_micro_batches)
        groups = self.source.take(self._streamed.next_size, should_stop)
        if groups is None:
            self._streamed = None
            return None
        weights = self._streamed.add(groups)
        self.groups = self._streamed.groups
        batches = self.collate(groups, aggregation=weights, num_micro_batches=num_places)
        scale = self._streamed.gradient_scale
        number = self._streamed.num_begun - 1
        return [self._stamp(batch, step, number, gradient_scale=scale) for batch in batches]

    def _stamp(self, batch: RolloutBatch, step: int, number: int, **changes: float) -> RolloutBatch:
        return batch.replace(step=step, micro_batch=number, num_micro_batches=self.num_micro_batches, **changes)


# -- The rollout source shared by all ranks: weights go in, the micro-batches of each step come out -------------------
# The leading rank has engine, producer and replay buffer (`RolloutSource`); the others take part in gathering the
# weights and receive their micro-batches. Everything here is called from the trainer's thread, in the same order on all
# ranks.


Weights = Iterator[tuple[str, Tensor]]


class SharedSource:
    """Publishes weights and hands out optimizer steps among the ranks of a run; `WeightSync` publishes through it.

    Args:
        source: used on the leading rank only.
        batches: turns its groups into micro-batches.

    Attributes:
        ranks: of the run; replaced when the data module is set up.
        num_restarts: engines that were replaced; the same on all ranks, of which one has the engine.
    """

    def __init__(self, source: RolloutSource, batches: StepBatches) -> None:
        self.source = source
        self.batches = batches
        self.ranks: StepScatter | OneProcess = OneProcess()
        self.num_restarts = 0
        self._stream_weights: Callable[[], Weights] | None = None

    def publish(self, version: int, weights: Weights) -> None:
        """Loads new weights into the engine; the first call also sets it up. A collective."""
        self._give(weights, partial(self.source.publish, version))

    def start(
        self,
        version: int,
        step: int,
        stream_weights: Callable[[], Weights],
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Starts the background thread; the engine already has the weights of `version`.

        Args:
            version: of the policy.
            step: number of the first optimizer step.
            stream_weights: iterates over the current weights, for an engine that is restarted; a collective.
            should_stop: whether the run is asked to stop; no collective.
        """
        self._stream_weights = stream_weights
        self.ranks.take_over_sigterm()
        if self.ranks.leads:
            self.source.start(version, step, should_stop)

    def advance(self, version: int) -> None:
        """Ends a round of admission: the slots of the groups trained on are returned."""
        if self.ranks.leads:
            self.source.advance(version)

    def set_max_staleness(self, max_staleness: int) -> None:
        """Changes the staleness bound of groups admitted from now on."""
        if self.ranks.leads:
            self.source.set_max_staleness(max_staleness)
        else:
            self.source.admission.max_staleness = max_staleness

    def evaluate(self, plan: EvaluationPlan) -> EvaluationRun:
        """Starts sampling held-out prompts concurrently with the rollouts; on the leading rank only."""
        return self.source.evaluate(plan)

    def next_step(self, trainer: AnyTrainer) -> list[RolloutBatch] | None:
        """This rank's micro-batches of the next optimizer step; a single one of them when groups are streamed.

        None when the run is asked to stop. Replaces an engine that fails meanwhile. A collective.
        """
        began = monotonic()
        while (batches := self.ranks.exchange(partial(self._make_batches, trainer))) == RELOAD:
            if self._stream_weights is None:
                raise SetupError("add the WeightSync callback: it gives the engine its weights")
            self._give(self._stream_weights(), self.source.restart_engine)
            self.num_restarts += 1
        if not self.ranks.leads:  # there the producer does it
            recorder().lane(TRAINER).add("wait", began, monotonic() - began)
        return batches

    def is_any_asked_to_stop(self, trainer: AnyTrainer) -> bool:
        """Whether any rank was asked to stop. A collective."""
        return self.any_rank(self.ranks.is_asked_to_stop(trainer))

    def bounded_wait(self, what: str) -> AbstractContextManager[None]:
        """Context in which this rank does not count as hung, because what it waits for has a timeout of its own."""
        return self.ranks.progress.own_limit(what)

    def any_rank(self, value: bool) -> bool:
        """Whether `value` is true on any rank. A collective."""
        return self.ranks.any(value)

    def _make_batches(self, trainer: AnyTrainer) -> Exchanged:
        ranks = self.ranks
        try:
            return self.batches.next(trainer.global_step, ranks.num_places, lambda: ranks.is_asked_to_stop(trainer))
        except EngineDown:
            return RELOAD

    def _give(self, weights: Weights, take: Callable[[Weights], None]) -> None:
        """Calls `take` with the weights on the leading rank; the other ranks only iterate over them."""
        progress = self.ranks.progress
        weights = progress.over(weights, "gathering the weights")
        try:
            if self.ranks.leads:
                with progress.own_limit("the engine takes the weights"):
                    take(weights)
        finally:
            deque(weights, maxlen=0)  # to the end even in an error: gathering them is a collective


# -- Iterables for Lightning's loops: micro-batches of rollouts, and held-out prompts ---------------------------------
# Both have a length. Without one Lightning prefetches a batch, which would break the staleness bound and deadlock a
# synchronous run.


ENDLESS = 10**9


class StepFeed:
    """Iterates over the micro-batches of successive optimizer steps.

    Args:
        trainer: stopped when there is no next step.
        micro_batches_per_step: number in each step.
        source: its `next_step` returns this rank's micro-batches of the next step (all, or some); None ends training.
    """

    def __init__(self, trainer: AnyTrainer, micro_batches_per_step: int, source: SharedSource) -> None:
        self._trainer = trainer
        self._micro_batches_per_step = micro_batches_per_step
        self._source = source
        self._micro_batches: list[RolloutBatch] = []

    def __len__(self) -> int:
        """Length of the whole run, also after a resume: Lightning keeps counting from the checkpoint."""
        max_steps = self._trainer.max_steps
        return max_steps * self._micro_batches_per_step if max_steps > 0 else ENDLESS

    def __iter__(self) -> Iterator[RolloutBatch]:
        return self

    def __next__(self) -> RolloutBatch:
        if not self._micro_batches:
            step = self._source.next_step(self._trainer)
            if step is None:
                # all ranks agree on it; Lightning's own flag is one rank's
                if self._trainer.world_size > 1 and self._source.is_any_asked_to_stop(self._trainer):
                    raise SIGTERMException
                self._trainer.should_stop = True
                raise StopIteration
            self._micro_batches = step
        return self._micro_batches.pop(0)


class PromptFeed:
    """Batches of held-out prompts in order; rank r of n gets batches r, r + n, r + 2n, ...

    All ranks have the same number of batches, some of them empty: Lightning skips validation on a rank without any.

    Args:
        source: of the prompts.
        batch_size: prompts sampled together.
        rank: of this process.
        num_ranks: among which the batches are divided.
    """

    def __init__(self, source: PromptSource, batch_size: int, rank: int = 0, num_ranks: int = 1) -> None:
        self._source = source
        self._batch_size = batch_size
        self._rank = rank
        self._num_ranks = num_ranks

    def __len__(self) -> int:
        return -(-len(self._source) // (self._batch_size * self._num_ranks))

    def __iter__(self) -> Iterator[PromptBatch]:
        for n in range(len(self)):
            index = n * self._num_ranks + self._rank
            begin = min(index * self._batch_size, len(self._source))
            end = min(begin + self._batch_size, len(self._source))
            yield PromptBatch([self._source[k] for k in range(begin, end)], index)
