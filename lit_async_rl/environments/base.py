"""What a policy talks to when one completion is not enough: environments with turns.

An environment starts an *episode* for each rollout; the policy writes, the episode answers, until it is done. Both are
coroutines, and all episodes of a run share one event loop: a thousand of them may wait for a slow tool at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from lit_async_rl.types import Prompt


@dataclass(frozen=True, kw_only=True)
class Observation:
    """An episode's answer to what the policy wrote.

    Attributes:
        text: what the policy reads next, as it is: with the markers of its chat template, if it needs any. Never
            trained on.
        reward: of this turn; a rollout's reward is the sum over its turns.
        state: what the environment's state is now, where `text` does not say it; `GiGPO` compares turns that begin in
            equal states. None is `text`.
        done: whether the episode ends here; `text` is then not used.
    """

    text: str = ""
    reward: float = 0.0
    done: bool = False
    state: str | None = None


class Episode(ABC):
    """One conversation."""

    @abstractmethod
    async def step(self, completion: str) -> Observation:
        """Answers one turn of the policy, without special tokens. Must not block: wait with `await`."""


class Environment(ABC):
    """Starts episodes; `environment` of an `EpisodeEngine`, whose rewards take the place of `data.reward`."""

    @abstractmethod
    async def start(self, prompt: Prompt) -> Episode:
        """A new episode; the policy sees the prompt (`prompt.text` or `prompt.messages`) first."""
