"""Sorting of digits, a task that a small model learns on a CPU in about a minute."""

from __future__ import annotations

import random
from collections.abc import Iterator

from lit_async_rl.tasks.splits import Split, SplitPrompts
from lit_async_rl.types import Prompt
from lit_async_rl.utils.checks import check_range


class SortDigits(SplitPrompts):
    """`3142=` asks for `1234`. Training and held-out problems never share a string of digits.

    Args:
        num_digits: length of the string.
        size: number of problems, drawn with repetition.
        split: training or held-out set, which are disjoint.
        seed: seed of the problems.
        min_digits: smallest length, with lengths drawn uniformly; None is `num_digits`.

    Raises:
        ValueError: there are fewer than two digits, `min_digits` is above `num_digits`, or the size is not positive.
    """

    def __init__(
        self,
        num_digits: int = 8,
        size: int = 4096,
        split: Split = "train",
        seed: int = 0,
        min_digits: int | None = None,
    ) -> None:
        super().__init__(size, split)
        check_range("SortDigits", ">= 2", num_digits=num_digits)
        check_range("SortDigits", f"in [2, {num_digits}]", min_digits=min_digits)
        self.num_digits, self.seed = num_digits, seed
        self.min_digits = num_digits if min_digits is None else min_digits

    def candidates(self, index: int) -> Iterator[tuple[str, Prompt]]:
        """Random strings of digits, and their problems."""
        chance = random.Random(f"{self.seed}/{self.split}/{index}")
        while True:
            # a draw for the length only where there is a choice: problems of one length stay what they were
            mixed = self.min_digits < self.num_digits
            length = chance.randint(self.min_digits, self.num_digits) if mixed else self.num_digits
            digits = "".join(chance.choices("0123456789", k=length))
            yield digits, Prompt(text=f"{digits}=", answer="".join(sorted(digits)))
