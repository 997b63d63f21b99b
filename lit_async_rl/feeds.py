"""What Lightning's loops iterate over. Both feeds have a length: without one Lightning fetches a batch ahead, which
would break the staleness bound and, in a synchronous run, wait for ever.
"""  # noqa: D205

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lightning.pytorch.utilities.exceptions import SIGTERMException

from lit_async_rl.prompts import PromptSource
from lit_async_rl.types import PromptBatch, RolloutBatch

if TYPE_CHECKING:
    from lit_async_rl.data import RolloutDataModule

ENDLESS = 10**9


class StepFeed:
    """Sized, so that Lightning fetches nothing ahead."""

    def __init__(self, data: RolloutDataModule) -> None:
        self._data = data
        self._micro_batches: list[RolloutBatch] = []

    def __len__(self) -> int:
        trainer = self._data.trainer
        assert trainer is not None
        steps_left = trainer.max_steps - trainer.global_step
        return steps_left * self._data.micro_batches_per_step if trainer.max_steps > 0 else ENDLESS

    def __iter__(self) -> Iterator[RolloutBatch]:
        return self

    def __next__(self) -> RolloutBatch:
        if not self._micro_batches:
            step = self._data.next_step()
            if step is None:
                trainer = self._data.trainer
                assert trainer is not None
                if trainer.world_size > 1:  # agreed upon by all ranks; Lightning's own flag is not
                    raise SIGTERMException
                trainer.should_stop = True
                raise StopIteration
            self._micro_batches = step
        return self._micro_batches.pop(0)


class PromptFeed:
    """Held-out prompts in their own order."""

    def __init__(self, source: PromptSource, batch_size: int) -> None:
        self._source, self._batch_size = source, batch_size

    def __len__(self) -> int:
        return -(-len(self._source) // self._batch_size)

    def __iter__(self) -> Iterator[PromptBatch]:
        for begin in range(0, len(self._source), self._batch_size):
            end = min(begin + self._batch_size, len(self._source))
            yield PromptBatch([self._source[n] for n in range(begin, end)])
