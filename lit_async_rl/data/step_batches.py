"""Micro-batches of optimizer steps from finished groups: a whole step at once, or streamed as groups finish."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lit_async_rl.data.rollout_source import RolloutSource
from lit_async_rl.data.streaming import StreamedStep
from lit_async_rl.losses.aggregation import Aggregation
from lit_async_rl.types import RolloutBatch, RolloutGroup


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
        self.source, self.collate, self.aggregation = source, collate, aggregation
        self.num_groups, self.num_micro_batches, self.streams = num_groups, num_micro_batches, streams
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
        scale, number = self._streamed.gradient_scale, self._streamed.num_begun - 1
        return [self._stamp(batch, step, number, gradient_scale=scale) for batch in batches]

    def _stamp(self, batch: RolloutBatch, step: int, number: int, **changes: float) -> RolloutBatch:
        return batch.replace(step=step, micro_batch=number, num_micro_batches=self.num_micro_batches, **changes)
