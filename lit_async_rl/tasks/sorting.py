"""Sorting of digits, which a small model learns on a CPU in about a minute."""

from __future__ import annotations

import random
from collections.abc import Iterator

from lit_async_rl.problem import Prompt
from lit_async_rl.tasks.splits import Split, SplitPrompts
from lit_async_rl.utils.checks import check_range


class SortDigits(SplitPrompts):
    """`3142=` asks for `1234`. Training and held-out problems never share a string of digits.

    Args:
        num_digits: length of the string.
        size: number of problems, drawn with repetition.
        split: training or held-out set, which are disjoint.
        seed: of the problems.
        min_digits: smallest length; lengths are uniform from there to `num_digits`. None is `num_digits`.
        tail: exponent of a Pareto distribution of lengths from `min_digits`, capped at `num_digits`: a few problems are
            many times longer than most.

    Raises:
        ValueError: there are fewer than two digits, `min_digits` is above `num_digits`, or size or tail not positive.
    """

    def __init__(
        self,
        num_digits: int = 8,
        size: int = 4096,
        split: Split = "train",
        seed: int = 0,
        min_digits: int | None = None,
        tail: float | None = None,
    ) -> None:
        super().__init__(size, split)
        check_range("SortDigits", "integer >= 2", num_digits=num_digits)
        check_range("SortDigits", "integer", seed=seed)
        check_range("SortDigits", f"integer in [2, {num_digits}]", min_digits=min_digits)
        check_range("SortDigits", "positive", tail=tail)
        self.num_digits = num_digits
        self.seed = seed
        self.tail = tail
        self.min_digits = num_digits if min_digits is None else min_digits

    def candidates(self, index: int) -> Iterator[tuple[str, Prompt]]:
        """Random strings of digits, and their problems."""
        chance = random.Random(f"{self.seed}/{self.split}/{index}")
        while True:
            digits = "".join(chance.choices("0123456789", k=self._length(chance)))
            yield digits, Prompt(text=f"{digits}=", answer="".join(sorted(digits)))

    def _length(self, chance: random.Random) -> int:
        if self.min_digits == self.num_digits:
            return self.num_digits  # without a random number, so that problems are the same as in earlier versions
        if self.tail is None:
            return chance.randint(self.min_digits, self.num_digits)
        return min(self.num_digits, int(self.min_digits * (1 - chance.random()) ** (-1 / self.tail)))
