"""Rewards: `reward(prompt, completion) -> float`, a function or an object that can be called."""

from __future__ import annotations

from lit_async_rl.types import Prompt


def exact_match(prompt: Prompt, completion: str) -> float:
    """1 if the completion is the answer, apart from space around it; else 0."""
    return float(completion.strip() == (prompt.answer or "").strip())
