"""Choosing a number from a list: a task with room for language models of a hundred million parameters."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from lit_async_rl.problem import Prompt
from lit_async_rl.tasks.splits import Split, SplitPrompts
from lit_async_rl.utils.checks import check_range

KINDS = {"largest": max, "smallest": min}


class PickNumber(SplitPrompts):
    """Chat prompts such as `Which is the largest of the numbers 80, 4, 55 and 97?`, for the reward `last_number`.

    SmolLM2-135M-Instruct answers about every seventh sample rightly. The defaults have 180 million problems, so few are
    drawn twice; training and held-out ones never share a set of numbers.

    Args:
        num_numbers: length of the list.
        largest: numbers are distinct, from 1 to this.
        kinds: what is asked for, `largest` or `smallest`.
        size: number of problems.
        split: training or held-out set, which are disjoint.
        seed: of the problems.

    Raises:
        ValueError: a setting is out of range, or a kind is unknown.
    """

    def __init__(
        self,
        num_numbers: int = 4,
        largest: int = 99,
        kinds: Sequence[str] = ("largest", "smallest"),
        size: int = 20000,
        split: Split = "train",
        seed: int = 0,
    ) -> None:
        super().__init__(size, split)
        check_range("PickNumber", "integer >= 2", num_numbers=num_numbers)
        check_range("PickNumber", f"integer >= {num_numbers}", largest=largest)
        check_range("PickNumber", "integer", seed=seed)
        if not kinds or set(kinds) - set(KINDS):
            raise ValueError(f"PickNumber.kinds must be chosen from {list(KINDS)}, got {list(kinds)}")
        self.num_numbers = num_numbers
        self.largest = largest
        self.kinds = tuple(kinds)
        self.seed = seed

    def candidates(self, index: int) -> Iterator[tuple[str, Prompt]]:
        """Random lists of numbers, and their problems."""
        chance = random.Random(f"{self.seed}/{self.split}/{index}")
        while True:
            kind = chance.choice(self.kinds)
            numbers = chance.sample(range(1, self.largest + 1), self.num_numbers)
            *first, last = map(str, numbers)
            question = f"Which is the {kind} of the numbers {', '.join(first)} and {last}? Answer with just the number."
            answer = str(KINDS[kind](numbers))
            yield str(sorted(numbers)), Prompt(messages=[{"role": "user", "content": question}], answer=answer)
