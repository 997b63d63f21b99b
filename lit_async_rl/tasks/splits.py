"""Disjoint training and held-out problems, for every seed and size."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Iterator
from itertools import islice
from typing import Literal

from lit_async_rl.prompts.sources import PromptSource
from lit_async_rl.types import Prompt
from lit_async_rl.utils.checks import check_range

Split = Literal["train", "held_out"]
HELD_OUT = 0.125
MAX_DRAWS = 256  # an eighth is held out: none among so many is a chance of 1e-15


def is_held_out(problem: str, share: float = HELD_OUT) -> bool:
    """Whether a problem is among the held-out `share`, by a hash of its text."""
    return random.Random(problem).random() < share


class SplitPrompts(PromptSource):
    """Problems drawn at random, with repetition, from one of two disjoint sets.

    Args:
        size: number of problems.
        split: training or held-out set.

    Raises:
        ValueError: the size is not positive.
    """

    def __init__(self, size: int, split: Split) -> None:
        check_range(type(self).__name__, "integer >= 1", size=size)
        self.size = size
        self.split = split

    @abstractmethod
    def candidates(self, index: int) -> Iterator[tuple[str, Prompt]]:
        """Random problems for an index, deterministic, each with the text that decides its split."""

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Prompt:
        if not 0 <= index < self.size:
            raise IndexError(index)
        for text, prompt in islice(self.candidates(index), MAX_DRAWS):
            if is_held_out(text) == (self.split == "held_out"):
                return prompt
        raise ValueError(f"{type(self).__name__} has too few different problems for split={self.split!r}")
