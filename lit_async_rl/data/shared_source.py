"""The rollout source shared by all ranks: weights go in, the micro-batches of each step come out.

The leading rank has engine, producer and replay buffer (`RolloutSource`); the others take part in gathering the weights
and receive their micro-batches. Everything here is called from the trainer's thread, in the same order on all ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from time import monotonic

from torch import Tensor

from lit_async_rl.data.rollout_source import RolloutSource
from lit_async_rl.data.step_batches import StepBatches
from lit_async_rl.distributed.scatter import RELOAD, Exchanged, OneProcess, StepScatter
from lit_async_rl.errors import EngineDown, SetupError
from lit_async_rl.rollouts.evaluation import EvaluationPlan, EvaluationRun
from lit_async_rl.types import RolloutBatch
from lit_async_rl.utils.lightning_types import AnyTrainer
from lit_async_rl.utils.spans import TRAINER, Lane, Spans

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
        self.source, self.batches = source, batches
        self.ranks: StepScatter | OneProcess = OneProcess()
        self.num_restarts = 0
        self._stream_weights: Callable[[], Weights] | None = None
        self._lane: Lane | None = None  # of the trainer in a timeline

    def observe(self, spans: Spans, rank: int) -> None:
        """Records this rank, and on the leading one engine and rewards, in a timeline."""
        self._lane = spans.lane(rank, TRAINER, "trainer", "trainer", merges=False)
        if self.ranks.leads:
            self.source.observe(spans)

    def note_publication(self, version: int, began: float, seconds: float) -> None:
        """Records a publication in the timeline, if there is one."""
        if self._lane is not None:
            self._lane.add("publish", began, seconds, ("publish", version), version=version)

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
        if self._lane is not None and not self.ranks.leads:  # there the producer does it
            self._lane.add("wait", began, monotonic() - began)
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
