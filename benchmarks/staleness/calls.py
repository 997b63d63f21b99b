"""A task of one turn for the calculator's policy: to call the tool with the numbers of the problem."""

from __future__ import annotations

from lit_async_rl.problem import Prompt


def calls_calculator(prompt: Prompt, completion: str) -> float:
    """1 if the completion to `17+25=` is the call `[17+25]`."""
    return float(completion.strip() == f"[{prompt.text.removesuffix('=')}]")
