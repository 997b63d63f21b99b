"""Addition of two numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator

from lit_async_rl.tasks.splits import Split, SplitPrompts
from lit_async_rl.types import Prompt
from lit_async_rl.utils.checks import check_range


class Addition(SplitPrompts):
    """`17+25=` asks for `42`. Training and held-out problems never share a pair of numbers, in either order.

    Args:
        num_digits: largest number of digits of each summand.
        size: number of problems, drawn with repetition.
        split: training or held-out set, which are disjoint.
        seed: seed of the problems.

    Raises:
        ValueError: a setting is not positive.
    """

    def __init__(self, num_digits: int = 2, size: int = 4096, split: Split = "train", seed: int = 0) -> None:
        super().__init__(size, split)
        check_range("Addition", ">= 1", num_digits=num_digits)
        self.num_digits, self.seed = num_digits, seed

    def candidates(self, index: int) -> Iterator[tuple[str, Prompt]]:
        """Random pairs of summands, and their problems."""
        chance = random.Random(f"{self.seed}/{self.split}/{index}")
        while True:
            a, b = (chance.randrange(10**self.num_digits) for _ in range(2))
            yield f"{min(a, b)}+{max(a, b)}", Prompt(text=f"{a}+{b}=", answer=str(a + b))
