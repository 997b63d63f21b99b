"""Answers with known flaws: demonstrations of a policy that RL can improve."""

from __future__ import annotations

import random
import string
from dataclasses import replace

from lit_async_rl.problem import Prompt
from lit_async_rl.prompts.sources import PromptSource
from lit_async_rl.utils.checks import check_range


class FlawedAnswers(PromptSource):
    """Prompts with some answers backwards, and some characters of answers replaced by random digits.

    A perfect imitator writes an answer of n characters correctly with probability (1 - reversed) (1 - 0.9 noise)^n: a
    random digit may be the correct one.

    Args:
        prompts: with correct answers.
        reversed: share of answers written backwards.
        noise: share of characters replaced.
        seed: of the flaws.

    Raises:
        ValueError: a share is not in [0, 1].
    """

    def __init__(self, prompts: PromptSource, reversed: float = 0.5, noise: float = 0.03, seed: int = 0) -> None:
        check_range("FlawedAnswers", "in [0, 1]", reversed=reversed, noise=noise)
        check_range("FlawedAnswers", "integer", seed=seed)
        self.prompts = prompts
        self.reversed = reversed
        self.noise = noise
        self.seed = seed

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: int) -> Prompt:
        prompt = self.prompts[index]
        chance = random.Random(f"{self.seed}/{index}")
        answer = prompt.answer or ""
        answer = answer[::-1] if chance.random() < self.reversed else answer
        flawed = (chance.choice(string.digits) if chance.random() < self.noise else one for one in answer)
        return replace(prompt, answer="".join(flawed))
