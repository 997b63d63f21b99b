"""Results of agents. Imports nothing large: the processes of agents load it, and need no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lit_async_rl.utils.checks import as_reward


@dataclass(frozen=True, kw_only=True)
class AgentResult:
    """Result of an agent, in place of a plain number.

    Attributes:
        reward: of the whole episode.
        parts: of the reward, by name, for reports and `GDPO`.
    """

    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)


def result_of(returned: Any) -> AgentResult:
    """Converts the return value of an agent to an `AgentResult`.

    Raises:
        ValueError: it is none.
    """
    if isinstance(returned, AgentResult):
        as_reward(returned.reward)
        return returned
    return AgentResult(reward=as_reward(returned))


def stated_result(value: Any) -> AgentResult | None:
    """Result that JSON of another process states: a number, or an object with `reward` and perhaps `parts`.

    None if it states none.
    """
    stated = value if isinstance(value, dict) else {"reward": value}
    reward = stated.get("reward")
    parts = stated.get("parts", {})
    numbers = [reward, *parts.values()] if isinstance(parts, dict) else [None]
    if not all(isinstance(x, int | float) and math.isfinite(x) for x in numbers):  # True and False are 1 and 0
        return None
    return AgentResult(reward=float(reward or 0.0), parts={name: float(x) for name, x in parts.items()})
