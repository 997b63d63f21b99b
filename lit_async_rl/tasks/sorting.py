"""Sorting digits: small enough to learn on a laptop in a minute, with one right answer."""

from __future__ import annotations

import random
from typing import Literal

from lit_async_rl.prompts import PromptSource
from lit_async_rl.types import Prompt


class SortDigits(PromptSource):
    """`3142=` asks for `1234`. Training and held-out problems never share a string of digits.

    Args:
        num_digits: length of the string.
        size: number of problems.
        split: which of the two disjoint sets.
        seed: of the problems.

    Raises:
        ValueError: a number is not positive.
    """

    def __init__(
        self, num_digits: int = 8, size: int = 4096, split: Literal["train", "held_out"] = "train", seed: int = 0
    ) -> None:
        if num_digits < 1 or size < 1:
            raise ValueError(f"SortDigits needs positive num_digits and size, got {num_digits} and {size}")
        self.num_digits, self.size, self.split, self.seed = num_digits, size, split, seed

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Prompt:
        if not 0 <= index < self.size:
            raise IndexError(index)
        chance = random.Random(f"{self.seed}/{self.split}/{index}")
        while True:
            digits = "".join(chance.choices("0123456789", k=self.num_digits))
            # one problem in eight is held out, decided by its digits alone: the sets are disjoint for every seed
            is_held_out = random.Random(digits).random() < 0.125
            if is_held_out == (self.split == "held_out"):
                return Prompt(text=f"{digits}=", answer="".join(sorted(digits)))
