"""The endless, seeded, resumable order in which the prompts of a source are used."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from lit_async_rl.prompts.sources import PromptSource
from lit_async_rl.prompts.usable import UsablePrompts
from lit_async_rl.types import Prompt


class PromptStream:
    """A source's prompts for ever: each epoch a new permutation, which depends on nothing but seed and epoch.

    Args:
        source: where prompts come from.
        seed: of the order.

    Raises:
        ValueError: the source is empty.
    """

    def __init__(self, source: PromptSource, seed: int = 0) -> None:
        if len(source) == 0:
            raise ValueError(f"data.prompts: {type(source).__name__} holds no prompts")
        self.source = source
        self.seed = seed
        self.position = 0  # prompts handed out so far
        self._orders: dict[int, torch.Tensor] = {}  # of this epoch and the one before, which groups are still of
        self.usable: UsablePrompts | None = None  # numbers of prompts that are not passed over; None is all

    def next(self) -> Prompt:
        """The next prompt."""
        return self.at(self.advance())

    def advance(self) -> int:
        """The position of the next prompt that can be used; it and those passed over count as handed out."""
        while True:
            self.position += 1
            if self.usable is None or self.number_at(self.position - 1) in self.usable:
                return self.position - 1

    def at(self, position: int) -> Prompt:
        """The prompt that is handed out at this position."""
        return self.source[self.number_at(position)]

    def number_at(self, position: int) -> int:
        """That prompt's number in the source."""
        epoch, offset = divmod(position, len(self.source))
        if epoch not in self._orders:
            generator = torch.Generator().manual_seed(hash((self.seed, epoch)) % 2**63)
            self._orders[epoch] = torch.randperm(len(self.source), generator=generator)
            if len(self._orders) > 2:
                del self._orders[min(set(self._orders) - {epoch})]
        return int(self._orders[epoch][offset])

    def state_dict(self) -> dict[str, int]:
        """The position; the order follows from the seed."""
        return {"position": self.position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continues where `state_dict` was taken."""
        self.position = state["position"]
