"""Mental arithmetic: addition as text, and a mixture of small problems as chat."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import combinations_with_replacement, product, starmap
from typing import NamedTuple

from lit_async_rl.problem import Prompt
from lit_async_rl.prompts.sources import PromptSource
from lit_async_rl.tasks.splits import HELD_OUT_SHARE, Split, SplitPrompts, is_held_out
from lit_async_rl.utils.checks import check_range


class Addition(SplitPrompts):
    """`17+25=` asks for `42`. Training and held-out problems never share a pair of numbers, in either order.

    Args:
        num_digits: largest number of digits of each summand.
        size: number of problems, drawn with repetition.
        split: training or held-out set, which are disjoint.
        seed: of the problems.

    Raises:
        ValueError: a setting is not positive.
    """

    def __init__(self, num_digits: int = 2, size: int = 4096, split: Split = "train", seed: int = 0) -> None:
        super().__init__(size, split)
        check_range("Addition", "integer >= 1", num_digits=num_digits)
        check_range("Addition", "integer", seed=seed)
        self.num_digits = num_digits
        self.seed = seed

    def candidates(self, index: int) -> Iterator[tuple[str, Prompt]]:
        """Random pairs of summands, and their problems."""
        chance = random.Random(f"{self.seed}/{self.split}/{index}")
        while True:
            a = chance.randrange(10**self.num_digits)
            b = chance.randrange(10**self.num_digits)
            yield f"{min(a, b)}+{max(a, b)}", Prompt(text=f"{a}+{b}=", answer=str(a + b))


class MentalArithmetic(PromptSource):
    """Chat prompts such as `What is 7 x 8? Answer with just the number.`, for the reward `last_number`.

    Each problem occurs once. Problems of the same numbers (a and b in either order) belong to the same split.

    | kind | problems |
    |---|---|
    | `sums` | a + b of numbers from 0 to `largest` |
    | `differences` | a - b >= 0 of the same |
    | `products` | a x b of numbers from `smallest_factor` to `largest_factor` |
    | `tens` | a + b of 10, 20 to 90 |
    | `two_steps` | a + b + c and a + b - c >= 0 of digits from 1 to 9 |

    Args:
        largest: largest number of sums and differences.
        split: training or held-out set, which are disjoint.
        largest_factor: largest number of products.
        kinds: of problems.
        held_out: share of held-out problems.
        smallest_factor: smallest number of products.
        worked: answers are `7 x 8 = 56`, not `56`: demonstrations for fine-tuning.

    Raises:
        ValueError: a number is too small, a kind is unknown, or `held_out` is not between 0 and 1.
    """

    def __init__(
        self,
        largest: int = 20,
        split: Split = "train",
        largest_factor: int = 12,
        kinds: Sequence[str] = ("sums", "differences", "products", "two_steps"),
        held_out: float = HELD_OUT_SHARE,
        smallest_factor: int = 2,
        worked: bool = False,
    ) -> None:
        check_range("MentalArithmetic", "integer >= 1", largest=largest, smallest_factor=smallest_factor)
        check_range("MentalArithmetic", f"integer >= {smallest_factor}", largest_factor=largest_factor)
        check_range("MentalArithmetic", "<= 1000", largest=largest, largest_factor=largest_factor)  # all pairs are made
        check_range("MentalArithmetic", "in (0, 1)", held_out=held_out)
        if unknown := set(kinds) - set(_KINDS):
            raise ValueError(f"MentalArithmetic.kinds={list(kinds)}: {sorted(unknown)} are none of {list(_KINDS)}")
        self.largest = largest
        self.split = split
        self.smallest_factor = smallest_factor
        self.largest_factor = largest_factor
        self.worked = worked
        distinct = {p.text: p for kind in kinds for p in _KINDS[kind](self)}  # 10 + 10 belongs to two kinds
        problems = [p for p in distinct.values() if is_held_out(p.key, held_out) == (split == "held_out")]
        random.Random(0).shuffle(problems)
        self._problems = problems

    def __len__(self) -> int:
        return len(self._problems)

    def __getitem__(self, index: int) -> Prompt:
        problem = self._problems[index]
        question = f"What is {problem.text}? Answer with just the number."
        answer = f"{problem.text} = {problem.answer}" if self.worked else str(problem.answer)
        return Prompt(messages=[{"role": "user", "content": question}], answer=answer)


class _Problem(NamedTuple):
    text: str
    answer: int
    key: str  # problems with the same key belong to the same split


def _sum(a: int, b: int) -> _Problem:
    return _Problem(f"{a} + {b}", a + b, f"+ {min(a, b)} {max(a, b)}")


def _difference(b: int, a: int) -> _Problem:
    return _Problem(f"{a} - {b}", a - b, f"- {b} {a}")


def _product(a: int, b: int) -> _Problem:
    return _Problem(f"{a} x {b}", a * b, f"x {min(a, b)} {max(a, b)}")


def _two_steps() -> Iterator[_Problem]:
    for a, b, c in product(range(1, 10), repeat=3):
        for sign, answer in (("+", a + b + c), ("-", a + b - c)):
            if answer >= 0:
                yield _Problem(f"{a} + {b} {sign} {c}", answer, f"+{sign} {min(a, b)} {max(a, b)} {c}")


_KINDS: dict[str, Callable[[MentalArithmetic], Iterable[_Problem]]] = {
    "sums": lambda task: starmap(_sum, product(range(task.largest + 1), repeat=2)),
    "differences": lambda task: starmap(_difference, combinations_with_replacement(range(task.largest + 1), 2)),
    "products": lambda task: starmap(_product, product(range(task.smallest_factor, task.largest_factor + 1), repeat=2)),
    "tens": lambda task: starmap(_sum, product(range(10, 100, 10), repeat=2)),
    "two_steps": lambda task: _two_steps(),
}
