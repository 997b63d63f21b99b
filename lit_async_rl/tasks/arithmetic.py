"""Mental arithmetic: addition as text, and a mixture of small problems as chat."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from lit_async_rl.prompts.sources import PromptSource
from lit_async_rl.tasks.splits import Split, SplitPrompts, is_held_out
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


class MentalArithmetic(PromptSource):
    """Chat prompts such as `What is 7 x 8? Answer with just the number.`, to be scored by `last_number`.

    Each problem occurs once: sums a + b and differences a - b >= 0 of numbers up to `largest`, products up to 12 x 12,
    and two steps on the digits 1 to 9, a + b + c or a + b - c >= 0. One in eight is held out, with all problems of the
    same numbers (a and b in either order).

    Args:
        largest: largest number of sums and differences.
        split: training or held-out set, which are disjoint.

    Raises:
        ValueError: `largest` is not positive.
    """

    def __init__(self, largest: int = 20, split: Split = "train") -> None:
        check_range("MentalArithmetic", ">= 1", largest=largest)
        self.largest, self.split = largest, split
        problems = [p for p in _problems(largest) if is_held_out(p.key) == (split == "held_out")]
        random.Random(0).shuffle(problems)
        self._problems = problems

    def __len__(self) -> int:
        return len(self._problems)

    def __getitem__(self, index: int) -> Prompt:
        problem = self._problems[index]
        question = f"What is {problem.text}? Answer with just the number."
        return Prompt(messages=[{"role": "user", "content": question}], answer=str(problem.answer))


class _Problem(NamedTuple):
    text: str
    answer: int
    key: str  # of problems that are held out together


def _problems(largest: int) -> Iterator[_Problem]:
    for a, b in product(range(largest + 1), repeat=2):
        low, high = sorted((a, b))
        yield _Problem(f"{a} + {b}", a + b, f"+ {low} {high}")
        if a >= b:
            yield _Problem(f"{a} - {b}", a - b, f"- {low} {high}")
    for a, b in product(range(2, 13), repeat=2):
        yield _Problem(f"{a} x {b}", a * b, f"x {min(a, b)} {max(a, b)}")
    for a, b, c in product(range(1, 10), repeat=3):
        for sign, answer in (("+", a + b + c), ("-", a + b - c)):
            if answer >= 0:
                yield _Problem(f"{a} + {b} {sign} {c}", answer, f"+{sign} {min(a, b)} {max(a, b)} {c}")
