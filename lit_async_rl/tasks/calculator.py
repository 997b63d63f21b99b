"""Multi-turn environment: addition with a calculator as a tool."""

from __future__ import annotations

import asyncio
import re

from lit_async_rl.environments.base import Environment, Episode, Observation
from lit_async_rl.problem import Prompt
from lit_async_rl.rewards.functions import exact_match
from lit_async_rl.rewards.references import References
from lit_async_rl.utils.checks import check_range

CALL = re.compile(r"\[(\d{1,18})\+(\d{1,18})\]")


def observation(result: str) -> str:
    """Observation text of a calculator result."""
    return f"{result}:"


class Calculator(Environment):
    """Responds to a turn `[17+25]` with `42:`; any other turn is the final answer, with reward 1 if correct.

    Args:
        latency_s: seconds per calculator call, to simulate slow tools.
        max_calls: largest number of calls per episode; a further call ends it with reward 0.

    Raises:
        ValueError: a setting is out of range.
    """

    references = References(lambda prompt: prompt.answer)

    def __init__(self, latency_s: float = 0.0, max_calls: int = 2) -> None:
        check_range("Calculator", ">= 0", latency_s=latency_s)
        check_range("Calculator", "integer >= 1", max_calls=max_calls)
        self.latency_s = latency_s
        self.max_calls = max_calls

    async def start(self, prompt: Prompt) -> CalculatorEpisode:
        """Starts an episode for one prompt."""
        return CalculatorEpisode(prompt, self.latency_s, self.max_calls)


class CalculatorEpisode(Episode):
    """Episode of one sum, with limited calculator calls."""

    def __init__(self, prompt: Prompt, latency_s: float, calls_left: int) -> None:
        self.prompt = prompt
        self.latency_s = latency_s
        self.calls_left = calls_left

    async def step(self, completion: str) -> Observation:
        """Responds to a calculator call, or scores the final answer."""
        call = CALL.fullmatch(completion.strip())
        if call is None:
            return Observation(reward=exact_match(self.prompt, completion), done=True)
        if not self.calls_left:
            return Observation(done=True)
        self.calls_left -= 1
        await asyncio.sleep(self.latency_s)
        return Observation(text=observation(str(int(call[1]) + int(call[2]))))
