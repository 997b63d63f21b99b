"""Rewards: `reward(prompt, completion) -> float`, a function or an object that can be called."""

from __future__ import annotations

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
