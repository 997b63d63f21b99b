"""Sorting digits: small enough to learn on a laptop in a minute, with one right answer."""

from __future__ import annotations

import random
from collections.abc import Iterator

from lit_async_rl.tasks.splits import Split, SplitPrompts
from lit_async_rl.types import Prompt


class SortDigits(SplitPrompts):
    """`3142=` asks for `1234`. Training and held-out problems never share a string of digits.

    Args:
        num_digits: length of the string.
        size: number of problems, drawn with repetition.
        split: which of the two disjoint sets.
        seed: of the problems.
        min_digits: shortest string, when lengths are mixed (each is as likely); None is `num_digits`.

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
        if num_digits < 2:
            raise ValueError(f"SortDigits: num_digits must be >= 2, got {num_digits}")
        if min_digits is not None and not 2 <= min_digits <= num_digits:
            raise ValueError(f"SortDigits: min_digits must be between 2 and num_digits={num_digits}, got {min_digits}")
        self.num_digits, self.seed = num_digits, seed
        self.min_digits = num_digits if min_digits is None else min_digits

    def candidates(self, index: int) -> Iterator[tuple[str, Prompt]]:
        """Strings of random digits."""
        chance = random.Random(f"{self.seed}/{self.split}/{index}")
        while True:
            # a draw for the length only where there is a choice: problems of one length stay what they were
            mixed = self.min_digits < self.num_digits
            length = chance.randint(self.min_digits, self.num_digits) if mixed else self.num_digits
            digits = "".join(chance.choices("0123456789", k=length))
            yield digits, Prompt(text=f"{digits}=", answer="".join(sorted(digits)))
