"""Rewards: `reward(prompt, completion) -> float`, a function or an object that can be called."""

from __future__ import annotations

import logging

from lit_async_rl.types import Prompt


def exact_match(prompt: Prompt, completion: str) -> float:
    """1 if the completion is the answer, apart from space around it; else 0."""
    return float(completion.strip() == (prompt.answer or "").strip())


def share_correct(prompt: Prompt, completion: str) -> float:
    """Share of the answer's characters that stand in their place; 1 only for the answer itself.

    Denser than `exact_match`: an almost right completion is worth more than a wrong one.
    """
    answer = prompt.answer or ""
    right = sum(a == b for a, b in zip(completion, answer, strict=False))
    return right / max(len(answer), len(completion), 1)


class MathVerify:
    """1 if the completion's final answer equals the reference, whatever its form (`1/2` or `0.5`), else 0.

    Uses the `math-verify` library: pip install "lit-async-rl[tasks]". A reference may be a whole worked solution in
    GSM8K's form, whose answer stands behind `####`.

    Raises:
        ModuleNotFoundError: the library is not installed.
    """

    def __init__(self) -> None:
        try:
            import math_verify
        except ImportError:
            raise ModuleNotFoundError('MathVerify needs: pip install "lit-async-rl[tasks]"') from None
        # its own time limits are signals, which only the main thread may use; `data.reward_timeout_s` bounds the time
        for module in ("math_verify.parser", "math_verify.grader"):
            logging.getLogger(module).setLevel(logging.ERROR)
        self._parse, self._verify = math_verify.parse, math_verify.verify

    def __call__(self, prompt: Prompt, completion: str) -> float:
        """Compares final answers."""
        if prompt.answer is None:
            raise ValueError("MathVerify needs a reference answer: set the prompt source's answer_field")
        reference = prompt.answer.rpartition("####")[2].strip()
        gold = self._parse(f"${reference}$", parsing_timeout=None) or self._parse(reference, parsing_timeout=None)
        answer = self._parse(completion, parsing_timeout=None)
        return float(self._verify(gold, answer, timeout_seconds=None))
