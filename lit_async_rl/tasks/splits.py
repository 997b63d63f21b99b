"""Training and held-out problems that are different by construction, for every seed and size."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Iterator
from itertools import islice
from typing import Literal

from lit_async_rl.prompts.sources import PromptSource
from lit_async_rl.types import Prompt

Split = Literal["train", "held_out"]
MAX_DRAWS = 256  # an eighth is held out: none among so many is a chance of 1e-15


def is_held_out(problem: str) -> bool:
    """One problem in eight, decided by its text alone."""
    return random.Random(problem).random() < 0.125


class SplitPrompts(PromptSource):
    """Problems drawn at random, with repetition, from one of two disjoint sets.

    Args:
        size: number of problems.
        split: which of the two sets.

    Raises:
        ValueError: the size is not positive.
    """

    def __init__(self, size: int, split: Split) -> None:
        if size < 1:
            raise ValueError(f"{type(self).__name__}: size must be >= 1, got {size}")
        self.size, self.split = size, split

    @abstractmethod
    def candidates(self, index: int) -> Iterator[tuple[str, Prompt]]:
        """Random problems, always the same for the same index, and the texts that decide who may train on them."""

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Prompt:
        if not 0 <= index < self.size:
            raise IndexError(index)
        for text, prompt in islice(self.candidates(index), MAX_DRAWS):
            if is_held_out(text) == (self.split == "held_out"):
                return prompt
        raise ValueError(f"{type(self).__name__} has too few different problems for split={self.split!r}")
