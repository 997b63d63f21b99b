"""The way of a training step's data: `RolloutFeed` on every rank, `RolloutSource` on the leading one.

    Lightning -> RolloutFeed.__next__ -> RolloutSource.next_batches -> Producer.take -> Admission.take

Everything here runs in the trainer's thread; the producer alone has threads of its own.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from time import monotonic
from typing import Any

from lightning.pytorch.utilities.exceptions import SIGTERMException

from lit_async_rl.data.collate import StreamedStep
from lit_async_rl.data.engine_restarts import ReplaceableEngine, Weights
from lit_async_rl.data.settings import Limits, check_ends
from lit_async_rl.distributed.scatter import PROBE, RELOAD, Exchanged, OneProcess, StepScatter
from lit_async_rl.engines.base import Probe, RolloutEngine
from lit_async_rl.errors import EngineDown, InvariantError, ProbeWanted, ProducerError, SetupError, StalledError
from lit_async_rl.losses.aggregation import Aggregation
from lit_async_rl.prompts.stream import UsablePrompts
from lit_async_rl.replay.buffer import ReplayBuffer, Snapshot
from lit_async_rl.replay.tape_source import TAPE, Replay
from lit_async_rl.rewards import hooks
from lit_async_rl.rollouts.evaluation import FIRST_ID, EvaluationPlan, EvaluationRun
from lit_async_rl.rollouts.producer import Producer
from lit_async_rl.rollouts.resume import restore_producer, save_producer
from lit_async_rl.rollouts.totals import ProducerStats
from lit_async_rl.runtime.spans import TRAINER, recorder
from lit_async_rl.scheduling.admission import Admission, check_bound
from lit_async_rl.types import RolloutBatch, RolloutGroup
from lit_async_rl.utils.lightning_types import AnyTrainer

MAX_LENGTH = 10**9  # micro-batches of a run without `trainer.max_steps`

log = logging.getLogger(__name__)


class RolloutFeed:
    """Publishes weights and yields this rank's micro-batches; the training dataloader.

    The leading rank has engine, producer and replay buffer; the others help to gather the weights, and receive their
    micro-batches. All ranks call the methods in the same order, because some are collectives.

    Args:
        source: used on the leading rank only.
        micro_batches_per_step: of each rank.

    Attributes:
        ranks: of the run; replaced when the data module is set up.
        trainer: set when Lightning asks for the dataloader.
        num_restarts: engines replaced; the same on all ranks.
    """

    def __init__(self, source: RolloutSource, micro_batches_per_step: int) -> None:
        self.source = source
        self.ranks: StepScatter | OneProcess = OneProcess()
        self.trainer: AnyTrainer = None
        self.num_restarts = 0
        self._micro_batches_per_step = micro_batches_per_step
        self._micro_batches: list[RolloutBatch] = []  # received, and not yielded yet
        self._stream_weights: Callable[[], Weights] | None = None
        self._make_probe: Callable[[], Probe | None] = lambda: None

    # -- micro-batches, for Lightning's loop --------------------------------------------------------------------------

    def __len__(self) -> int:
        """Micro-batches of the whole run, also after a resume: Lightning counts on from the checkpoint.

        Without a length Lightning prefetches, which would break the staleness bound and deadlock a synchronous run.
        """
        max_steps = self.trainer.max_steps
        return max_steps * self._micro_batches_per_step if max_steps > 0 else MAX_LENGTH

    def __iter__(self) -> Iterator[RolloutBatch]:
        return self

    def __next__(self) -> RolloutBatch:
        """The next micro-batch of this rank; meanwhile sees to an engine in need. A collective at some calls.

        Raises:
            StopIteration: the run is asked to stop.
            SIGTERMException: the same, where there are several ranks.
        """
        if not self._micro_batches:
            began = monotonic()
            trainer = self.trainer
            ranks = self.ranks
            while True:
                made: Exchanged = None
                with ranks.making_step():
                    if ranks.leads and not ranks.is_stop_requested:
                        try:
                            made = self.source.next_batches(
                                step=trainer.global_step,
                                num_places=ranks.num_places,
                                should_stop=lambda: ranks.is_asked_to_stop(trainer),
                            )
                        except EngineDown:
                            made = RELOAD
                        except ProbeWanted:
                            made = PROBE
                        except StopIteration as error:  # of an estimator, say: Lightning would end the run in silence
                            raise ProducerError(
                                "the data of a step could not be assembled, because a function called to assemble "
                                "it raised StopIteration"
                            ) from error
                # The first collective of the step: only here the other ranks learn what the leading one has made.
                received = ranks.exchange(made)
                if received == RELOAD:
                    self._reload()
                elif received == PROBE:
                    self._compute_probe()
                else:
                    break
            if not ranks.leads:  # the leading rank's wait is recorded by the producer
                recorder().lane(TRAINER).add("wait", began, monotonic() - began)
            if received is None:
                # All ranks must agree, or those that go on would wait for the others: Lightning's flag is one rank's.
                if trainer.world_size > 1 and ranks.any(ranks.is_asked_to_stop(trainer)):
                    raise SIGTERMException
                trainer.should_stop = True
                raise StopIteration
            self._micro_batches = received
        return self._micro_batches.pop(0)

    def _reload(self) -> None:
        """Gives the weights of all ranks to a replacing engine."""
        if self._stream_weights is None:
            raise SetupError("the engine gets no weights without the WeightSync callback: add it to trainer.callbacks")
        if self.source.engine.uses_probe:
            self.source.engine.probe = self._make_probe()  # of the weights that the new engine gets
        self._give(self._stream_weights(), self.source.restart_engine)
        self.num_restarts += 1

    def _compute_probe(self) -> None:
        """Gives the engine log-probabilities of the weights that it has."""
        probe = self._make_probe()
        if self.ranks.leads and probe is not None:
            self.source.engine.take_probe(probe)

    # -- weights, for the WeightSync callback -------------------------------------------------------------------------

    def publish(self, version: int, weights: Weights) -> None:
        """Loads new weights into the engine; the first call also sets it up. A collective."""
        self._give(weights, lambda given: self.source.publish(version, given))

    def start(
        self,
        version: int,
        step: int,
        stream_weights: Callable[[], Weights],
        should_stop: Callable[[], bool] = lambda: False,
        make_probe: Callable[[], Probe | None] = lambda: None,
    ) -> None:
        """Starts the background thread; the engine already has the weights of `version`.

        Args:
            version: of the policy.
            step: number of the first optimizer step.
            stream_weights: iterates over the current weights, for a restarted engine; a collective.
            should_stop: whether the run is asked to stop; no collective.
            make_probe: log-probabilities under the current weights, for an engine that asks; a collective.
        """
        self._make_probe = make_probe
        self._stream_weights = stream_weights
        self.ranks.take_over_sigterm()
        if self.ranks.leads:
            self.source.start(version, step, should_stop)

    def advance(self, version: int) -> None:
        """Ends a round of admission: returns the slots of groups trained on."""
        if self.ranks.leads:
            self.source.producer.advance(version)

    def set_max_staleness(self, max_staleness: int) -> None:
        """Changes the staleness bound of groups admitted from now on."""
        if self.ranks.leads:
            self.source.set_max_staleness(max_staleness)
        else:
            self.source.admission.max_staleness = max_staleness

    def take_rewards(self) -> list[float]:
        """Mean rewards that have arrived, see `RolloutDataModule.take_rewards`. A collective."""
        with self.ranks.progress.own_limit("waiting for rewards"):
            taken = self.source.producer.take_rewards() if self.ranks.leads else []
        return self.ranks.share(taken)

    def discard_after(self, version: int) -> None:
        """Discards what later versions have sampled."""
        if self.ranks.leads:
            self.source.discard_after(version)

    def _give(self, weights: Weights, take: Callable[[Weights], None]) -> None:
        """Calls `take` with the weights on the leading rank; the other ranks only iterate over them."""
        progress = self.ranks.progress
        weights = progress.over(weights, "gathering the weights")
        try:
            if self.ranks.leads:
                with progress.own_limit("the engine takes the weights"):
                    take(weights)
        finally:
            # To the end even after an error: each weight is gathered by a collective, and the other ranks would wait.
            deque(weights, maxlen=0)


class RolloutSource:
    """Engine, producer (or tape) and replay buffer of the leading rank: weights go in, micro-batches come out.

    Args:
        engine: set up with the first weights, closed by `stop`.
        model: argument of the engine's `setup`.
        admission: of the producer.
        make_producer: called with the first step's number when the engine has its weights.
        collate: `collate_step` with the arguments of every step.
        aggregation: weight of each token in the average over the step.
        groups_per_step: groups of an optimizer step.
        fresh_per_step: how many of them come from the producer.
        micro_batches_per_step: of each rank.
        streams: whether to return each micro-batch once its groups are finished.
        replay: supplies the groups that are not fresh; None if all are.
        limits: restarts of the engine, and timeout of its calls.
        should_stop: whether to stop, which ends the wait for an engine.

    Attributes:
        groups: of the current step; when groups are streamed, those received so far.
    """

    def __init__(
        self,
        *,
        engine: RolloutEngine,
        model: str | None,
        admission: Admission,
        make_producer: Callable[[int], Producer | Replay],
        collate: Callable[..., list[RolloutBatch]],
        aggregation: Aggregation,
        groups_per_step: int,
        fresh_per_step: int,
        micro_batches_per_step: int,
        streams: bool,
        replay: ReplayBuffer | None,
        limits: Limits,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.admission = admission
        self.replay = replay
        self.collate = collate
        self.aggregation = aggregation
        self.groups_per_step = groups_per_step
        self.fresh_per_step = fresh_per_step
        self.micro_batches_per_step = micro_batches_per_step
        self.streams = streams
        self.groups: Sequence[RolloutGroup] = ()
        self._make_producer = make_producer
        self._holder = ReplaceableEngine(engine, model, limits, should_stop=should_stop)
        self._producer: Producer | Replay | None = None
        self._saved: dict[str, Any] = {}  # state of the run that this one resumes
        self._step_began = -1  # the step whose groups were handed out last
        self._replay_before: Snapshot | None = None  # of the buffer, before it was mixed with the step's groups
        self._taken: list[RolloutGroup] = []  # by a call of `next_batches` that has not returned yet
        self._streamed: StreamedStep | None = None
        self._first_bound: int | None = None  # set before the start

    # -- start and end ------------------------------------------------------------------------------------------------

    @property
    def engine(self) -> RolloutEngine:
        """The engine in use; another one after a restart."""
        return self._holder.engine

    @property
    def has_begun(self) -> bool:
        """Whether its engine was set up, also for another source, or its producer started: it serves a single fit."""
        return self.engine.is_used or self._producer is not None

    def use_model(self, model: str) -> None:
        """Sets the model that the engine loads."""
        self._holder.model = model

    def start(self, version: int, step: int, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Starts the background thread, from the restored state if any; the engine has its weights.

        No more prompts are admitted when `should_stop()` becomes true.
        """
        producer = self._producer = self._make_producer(step)
        if isinstance(producer, Replay):  # whose bound nothing changes
            producer.load_state_dict(self._saved)
            producer.start(version)
            return
        self._check_prompts(producer)
        # Restored completions are scored at once, by other threads; their rewards would admit prompts before all
        # restored groups are filed and the version is set.
        with producer.changed:
            if self._saved and TAPE not in self._saved:  # the checkpoint of a replay says nothing of prompts
                producer.listener.has_loaded(version)
                if restore_producer(producer, self._saved) and self.replay is not None:
                    self.replay.clear()
            if self._first_bound is not None:
                self.admission.max_staleness = self._first_bound
                self._first_bound = None
            producer.start(version, should_stop)

    def _check_prompts(self, producer: Producer) -> None:
        """Refuses unusable prompts, or excludes them from the stream."""
        stream = producer.stream
        codec = producer.book.codec
        sampling = producer.book.sampling
        length = self.engine.max_model_len
        usable = UsablePrompts(
            stream.source,
            hooks.checking(codec.encode, producer.scorer.reward),
            length - sampling.max_tokens,
            why=f"the engine's max_model_len={length} leaves besides sampling.max_tokens={sampling.max_tokens}",
        )
        usable.check()
        hooks.end_check(producer.scorer.reward)
        stream.usable = usable
        check_ends(codec, sampling, stream.source)
        if codec.special_tokens == "tags" and (tags := codec.tags):
            log.info(
                "the completions that are passed to rewards contain the special tokens %s; to remove these tokens, set "
                "data.scoring.special_tokens=none",
                tags,
            )
        if codec.ends.are_disputed and sampling.end_token_ids is None:
            log.warning("model.model=%r: %s", codec.model, codec.ends.describe(codec.tokenizer))

    def stop(self) -> None:
        """Stops the background thread and closes the engine. Safe to call twice."""
        if self._producer is not None:
            self._producer.stop()
        self._holder.close()

    def end(self) -> None:
        """Closes what the engines of all fits and validations share, such as an environment. Safe to call twice."""
        self._holder.end()

    @property
    def producer(self) -> Producer | Replay:
        """The producer, or the tape in its place, once sampling has started."""
        if self._producer is None:
            raise SetupError("sampling does not start without the WeightSync callback: add it to trainer.callbacks")
        return self._producer

    # -- weights, and what depends on their version -------------------------------------------------------------------

    def publish(self, version: int, weights: Weights) -> None:
        """Loads new weights into the engine; the first call also sets it up."""
        self._holder.set_up()
        if isinstance(self._producer, Producer):
            self._producer.listener.load_weights(version, weights)
        else:
            self._holder.calls.load_weights(version, weights)

    @property
    def max_staleness(self) -> int:
        """Bound of groups admitted from now on, or from the start on."""
        return self.admission.max_staleness if self._first_bound is None else self._first_bound

    def set_max_staleness(self, max_staleness: int) -> None:
        """Changes the bound of groups admitted from now on; a checkpoint's groups keep theirs."""
        if self._producer is None:
            self._first_bound = max_staleness
        else:
            self._producer.set_max_staleness(max_staleness)

    def discard_after(self, version: int) -> None:
        """Discards what later versions have sampled: stored completions now, groups at the next publication."""
        self.producer.discard_after(version)
        if self.replay is not None:
            self.replay.discard_after(version)

    def evaluate(self, plan: EvaluationPlan) -> EvaluationRun:
        """Starts sampling held-out prompts concurrently with the rollouts."""
        producer = self.producer
        if not isinstance(producer, Producer):
            raise SetupError("evaluation needs an engine, but data.admission=FromTape runs without one")
        evaluation = EvaluationRun(producer.listener, producer.scorer, producer.book.codec, plan=plan)
        with producer.changed:  # the producer's thread looks owners up
            producer.owners.add(FIRST_ID, evaluation)
        evaluation.submit()
        return evaluation

    # -- micro-batches ------------------------------------------------------------------------------------------------

    def next_batches(self, step: int, num_places: int, should_stop: Callable[[], bool]) -> list[RolloutBatch] | None:
        """All micro-batches of a step, or with streamed groups the next one of each rank; None to stop.

        Every token is within its bound.

        Args:
            step: number of the optimizer step.
            num_places: ranks with different data; micro-batches that run concurrently are adjacent.
            should_stop: polled while waiting; whether the run is asked to stop.

        Raises:
            EngineDown: call `restart_engine`, then this again; groups already taken are kept.
            ProbeWanted: call `take_probe` of the engine, then this again; likewise.
            ProducerError, StalledError: the failure is not the engine's, or it was restarted too often.
        """
        producer = self.producer
        streamed = self._streamed
        if not self._taken and (streamed is None or streamed.is_done):
            producer.begin_step()
            self._step_began = step
            self._replay_before = None
            if self.streams:
                streamed = StreamedStep(self.aggregation, self.groups_per_step, self.micro_batches_per_step)
                self._streamed = streamed
        num_groups = self.fresh_per_step if streamed is None else streamed.next_size
        while len(self._taken) < num_groups:
            if self._lacks_probe:
                raise ProbeWanted
            try:
                group = producer.take(lambda: should_stop() or self._lacks_probe)
            except (ProducerError, StalledError) as error:
                if not self._can_restart(producer):
                    raise
                raise EngineDown from error
            if group is None and isinstance(producer, Producer) and not should_stop():
                continue  # interrupted by the engine
            if group is None:
                self._taken = []
                self._streamed = None
                return None
            self._taken.append(group)
        groups = self._taken
        self._taken = []
        self._holder.note_step(has_delivered=not isinstance(producer, Producer) or producer.listener.has_delivered)
        check_bound(groups, producer.version)
        if isinstance(producer, Producer):
            producer.rest()
        if streamed is not None:
            return self._streamed_batches(streamed, groups, step, num_places=num_places)
        if self.replay is not None:
            self._replay_before = self.replay.snapshot()
            groups = self.replay.mix(groups, self.groups_per_step, producer.version)
        self.groups = groups
        number = self.micro_batches_per_step * num_places
        batches = self.collate(groups, aggregation=self.aggregation, num_micro_batches=number)
        return [self._stamped(batch, step, n // num_places) for n, batch in enumerate(batches)]

    @property
    def _lacks_probe(self) -> bool:
        return self.engine.uses_probe and self.engine.needs_probe

    def _streamed_batches(
        self, streamed: StreamedStep, groups: Sequence[RolloutGroup], step: int, num_places: int
    ) -> list[RolloutBatch]:
        """The next micro-batch of each rank, of the groups finished since the last."""
        weights = streamed.add(groups)
        self.groups = streamed.groups
        batches = self.collate(groups, aggregation=weights, num_micro_batches=num_places)
        number = streamed.num_begun - 1
        return [self._stamped(batch, step, number, gradient_scale=streamed.gradient_scale) for batch in batches]

    def _stamped(self, batch: RolloutBatch, step: int, number: int, **changes: float) -> RolloutBatch:
        """The micro-batch with its place in the step, which `StepGuard` checks."""
        return batch.replace(step=step, micro_batch=number, num_micro_batches=self.micro_batches_per_step, **changes)

    def _can_restart(self, producer: Producer | Replay) -> bool:
        """Whether the failure is the engine's, which another one can replace."""
        is_engines = isinstance(producer, Producer) and producer.listener.engine_error is not None
        return is_engines and self._holder.may_restart

    def restart_engine(self, weights: Weights) -> None:
        """Replaces an engine that hangs or failed; groups that lack completions are sampled again.

        Everything received from the old one is kept. If the new one fails to start, the next `next_batches` raises its
        error.
        """
        producer = self.producer
        error = producer.listener.engine_error if isinstance(producer, Producer) else None
        if not isinstance(producer, Producer) or error is None:
            raise InvariantError("only a failed engine can be restarted, and this one has not failed")
        self._holder.restart(producer, error, weights)

    @property
    def engine_restarts(self) -> str:
        """Number of engines replaced, and why the last was; empty without one."""
        return f"{self._holder.num_restarts}; last: {self._holder.last_error}" if self._holder.num_restarts else ""

    def stats(self) -> ProducerStats | None:
        """Totals of sampling and scoring since the start; None before it."""
        return self._producer.stats() if self._producer else None

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self, step: int) -> dict[str, Any]:
        """Every group admitted and not trained on before `step`, see `lit_async_rl.rollouts.resume`."""
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
