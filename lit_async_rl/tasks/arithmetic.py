"""Adding and multiplying numbers."""

from __future__ import annotations

import random
from typing import Literal

from lit_async_rl.prompts import PromptSource
from lit_async_rl.types import Prompt


class Addition(PromptSource):
    """`17+25=` asks for `42`. Training and held-out problems never share a pair of numbers.

    Args:
        num_digits: of each number, at most.
        size: number of problems.
        split: which of the two disjoint sets.
        seed: of the problems.

    Raises:
        ValueError: a number is not positive.
    """

    def __init__(
        self, num_digits: int = 2, size: int = 4096, split: Literal["train", "held_out"] = "train", seed: int = 0
    ) -> None:
        if num_digits < 1 or size < 1:
            raise ValueError(f"Addition needs positive num_digits and size, got {num_digits} and {size}")
        self.num_digits, self.size, self.split, self.seed = num_digits, size, split, seed

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Prompt:
        if not 0 <= index < self.size:
            raise IndexError(index)
        chance = random.Random(f"{self.seed}/{self.split}/{index}")
        while True:
            a, b = (chance.randrange(10**self.num_digits) for _ in range(2))
            is_held_out = random.Random(f"{a}+{b}").random() < 0.125
            if is_held_out == (self.split == "held_out"):
                return Prompt(text=f"{a}+{b}=", answer=str(a + b))
