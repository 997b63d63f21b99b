"""From finished groups to the micro-batches of optimizer steps: a step at once, or part by part as groups finish."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lit_async_rl.data.rollout_source import RolloutSource
from lit_async_rl.data.streaming import StreamedStep
from lit_async_rl.losses.aggregation import Aggregation
from lit_async_rl.types import RolloutBatch, RolloutGroup


class StepBatches:
    """What the leading rank hands out.

    Args:
        source: of groups.
        collate: `lit_async_rl.data.collate.collate_step` with all that stays the same from step to step.
        aggregation: what a token counts in the average over the step.
        num_groups: of a step.
        num_micro_batches: of a step, on each rank.
        streams: whether to hand out each micro-batch as soon as its groups have finished.

    Attributes:
        groups: those of the step so far.
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
        """All micro-batches of the step, or the next one of each rank; None when the run is asked to stop.

        Args:
            step: that they are for.
            num_places: ranks with different data; micro-batches that run at the same time are side by side.
            should_stop: looked at while waiting.
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
