"""What Lightning's loops iterate over. Both feeds have a length: without one Lightning fetches a batch ahead, which
would break the staleness bound and, in a synchronous run, wait for ever.
"""  # noqa: D205

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lightning.pytorch.utilities.exceptions import SIGTERMException

from lit_async_rl.errors import SetupError
from lit_async_rl.prompts.sources import PromptSource
from lit_async_rl.types import PromptBatch, RolloutBatch
from lit_async_rl.utils.lightning_types import AnyTrainer

if TYPE_CHECKING:
    from lit_async_rl.data.module import RolloutDataModule

ENDLESS = 10**9


class StepFeed:
    """Sized, so that Lightning fetches nothing ahead."""

    def __init__(self, data: RolloutDataModule) -> None:
        self._data = data
        self._micro_batches: list[RolloutBatch] = []

    def __len__(self) -> int:
        """Of the whole run, also when it is resumed: Lightning goes on counting where the checkpoint was saved."""
        max_steps = trainer_of(self._data).max_steps
        return max_steps * self._data.micro_batches_per_step if max_steps > 0 else ENDLESS

    def __iter__(self) -> Iterator[RolloutBatch]:
        return self

    def __next__(self) -> RolloutBatch:
        if not self._micro_batches:
            step = self._data.next_step()
            if step is None:
                trainer = trainer_of(self._data)
                if trainer.world_size > 1:  # agreed upon by all ranks; Lightning's own flag is not
                    raise SIGTERMException
                trainer.should_stop = True
                raise StopIteration
            self._micro_batches = step
        return self._micro_batches.pop(0)


class PromptFeed:
    """Held-out prompts in their own order; of several ranks each gets every so-many-th batch.

    All ranks have as many batches, some of them empty: Lightning leaves out a validation without any on one rank only.

    Args:
        source: of prompts.
        batch_size: prompts sampled together.
        rank: this one.
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


def trainer_of(data: RolloutDataModule) -> AnyTrainer:
    """The trainer that a data module feeds.

    Raises:
        SetupError: there is none.
    """
    if data.trainer is None:
        raise SetupError("a RolloutDataModule feeds a Trainer: give it to `trainer.fit(..., datamodule=data)`")
    return data.trainer
