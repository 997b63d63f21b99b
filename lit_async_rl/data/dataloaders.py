"""Iterables for Lightning's loops: micro-batches of rollouts, and held-out prompts.

Both have a length. Without one Lightning prefetches a batch, which would break the staleness bound and deadlock a
synchronous run.
"""

from __future__ import annotations

from collections.abc import Iterator

from lightning.pytorch.utilities.exceptions import SIGTERMException

from lit_async_rl.data.shared_source import SharedSource
from lit_async_rl.prompts.sources import PromptSource
from lit_async_rl.types import PromptBatch, RolloutBatch
from lit_async_rl.utils.lightning_types import AnyTrainer

ENDLESS = 10**9


class StepFeed:
    """Iterates over the micro-batches of successive optimizer steps.

    Args:
        trainer: stopped when there is no next step.
        micro_batches_per_step: number in each step.
        source: its `next_step` returns this rank's micro-batches of the next step (all, or some); None ends training.
    """

    def __init__(self, trainer: AnyTrainer, micro_batches_per_step: int, source: SharedSource) -> None:
        self._trainer, self._micro_batches_per_step, self._source = trainer, micro_batches_per_step, source
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
        self._source, self._batch_size = source, batch_size
        self._rank, self._num_ranks = rank, num_ranks

    def __len__(self) -> int:
        return -(-len(self._source) // (self._batch_size * self._num_ranks))

    def __iter__(self) -> Iterator[PromptBatch]:
        for n in range(len(self)):
            index = n * self._num_ranks + self._rank
            begin = min(index * self._batch_size, len(self._source))
            end = min(begin + self._batch_size, len(self._source))
            yield PromptBatch([self._source[k] for k in range(begin, end)], index)
