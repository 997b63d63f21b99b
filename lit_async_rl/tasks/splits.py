"""Disjoint training and held-out problems, for every seed and size."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Iterator
from itertools import islice
from typing import Literal

from lit_async_rl.problem import Prompt
from lit_async_rl.prompts.sources import PromptSource
from lit_async_rl.utils.checks import check_range

Split = Literal["train", "held_out"]
HELD_OUT_SHARE = 0.125
MAX_DRAWS_PER_PROBLEM = 256  # with an eighth held out, all of these miss that split with probability 1e-15


def is_held_out(problem: str, share: float = HELD_OUT_SHARE) -> bool:
    """Whether a problem belongs to the held-out `share`, by a hash of its text."""
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
        """Pseudo-random problems of an index, each with the text that determines its split."""

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Prompt:
        if not 0 <= index < self.size:
            raise IndexError(index)
        for text, prompt in islice(self.candidates(index), MAX_DRAWS_PER_PROBLEM):
            if is_held_out(text) == (self.split == "held_out"):
                return prompt
        raise ValueError(f"{type(self).__name__} has too few distinct problems for split={self.split!r}")
