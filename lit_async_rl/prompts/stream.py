"""Infinite, seeded, resumable stream over the prompts of a source."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from lit_async_rl.prompts.sources import PromptSource
from lit_async_rl.prompts.usable import UsablePrompts
from lit_async_rl.types import Prompt


class PromptStream:
    """Infinite stream over a source, with a new permutation per epoch that depends on seed and epoch only.

    Args:
        source: source of the prompts.
        seed: seed of the permutations.

    Raises:
        ValueError: the source is empty.
    """

    def __init__(self, source: PromptSource, seed: int = 0) -> None:
        if len(source) == 0:
            raise ValueError(f"data.prompts: {type(source).__name__} holds no prompts")
        self.source = source
        self.seed = seed
        self.position = 0  # prompts handed out so far
        self._orders: dict[int, torch.Tensor] = {}  # epoch -> permutation, of this epoch and the one before
        self.usable: UsablePrompts | None = None  # indices of usable prompts; None is all

    def next(self) -> Prompt:
        """Returns the next prompt."""
        return self.at(self.advance())

    def advance(self) -> int:
        """Advances to the next usable prompt and returns its position; skipped prompts count as positions."""
        while True:
            self.position += 1
            if self.usable is None or self.number_at(self.position - 1) in self.usable:
                return self.position - 1

    def at(self, position: int) -> Prompt:
        """Prompt at a position of the stream."""
        return self.source[self.number_at(position)]

    def number_at(self, position: int) -> int:
        """Index in the source of the prompt at a position of the stream."""
        epoch, offset = divmod(position, len(self.source))
        if epoch not in self._orders:
            generator = torch.Generator().manual_seed(hash((self.seed, epoch)) % 2**63)
            self._orders[epoch] = torch.randperm(len(self.source), generator=generator)
            if len(self._orders) > 2:
                del self._orders[min(set(self._orders) - {epoch})]
        return int(self._orders[epoch][offset])

    def state_dict(self) -> dict[str, int]:
        """State: the position; the order follows from the seed."""
        return {"position": self.position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restores the position of `state_dict`."""
        self.position = state["position"]
