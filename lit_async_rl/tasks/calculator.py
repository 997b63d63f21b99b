"""Sums that a small policy cannot do in its head, and a calculator that it may call."""

from __future__ import annotations

import asyncio
import re

from lit_async_rl.environments.base import Environment, Episode, Observation
from lit_async_rl.rewards.functions import exact_match
from lit_async_rl.types import Prompt

CALL = re.compile(r"\[(\d{1,18})\+(\d{1,18})\]")


def observation(result: str) -> str:
    """What the calculator shows."""
    return f"{result}:"


class Calculator(Environment):
    """`[17+25]` is answered by `42:`; any other turn is the answer, worth 1 if right.

    Args:
        latency_s: seconds that the calculator takes, for trying out slow tools.
        max_calls: calls in one episode; a further one ends it with reward 0.

    Raises:
        ValueError: a setting is out of range.
    """

    def __init__(self, latency_s: float = 0.0, max_calls: int = 2) -> None:
        if latency_s < 0:
            raise ValueError(f"Calculator.latency_s must be >= 0, got {latency_s}")
        if max_calls < 1:
            raise ValueError(f"Calculator.max_calls must be >= 1, got {max_calls}")
        self.latency_s, self.max_calls = latency_s, max_calls

    async def start(self, prompt: Prompt) -> CalculatorEpisode:
        """A calculator that has not been used."""
        return CalculatorEpisode(prompt, self.latency_s, self.max_calls)


class CalculatorEpisode(Episode):
    """One sum."""

    def __init__(self, prompt: Prompt, latency_s: float, calls_left: int) -> None:
        self.prompt, self.latency_s, self.calls_left = prompt, latency_s, calls_left

    async def step(self, completion: str) -> Observation:
        """Calculates or judges."""
        call = CALL.fullmatch(completion.strip())
        if call is None:
            return Observation(reward=exact_match(self.prompt, completion), done=True)
        if not self.calls_left:
            return Observation(done=True)
        self.calls_left -= 1
        await asyncio.sleep(self.latency_s)
        return Observation(text=observation(str(int(call[1]) + int(call[2]))))
