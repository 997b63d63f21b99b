"""Interface of multi-turn environments.

An environment starts an *episode* for each rollout; policy and episode take turns until it is done. All methods are
coroutines, and all episodes of a run share one event loop: a thousand of them can await a slow tool concurrently.

Each episode that `start` has returned is closed exactly once, however it ends: done, cut, dropped, failed, or because
the engine is closed. `close` comes when no other method of the episode runs. A `start` or `step` that is not wanted any
more is cancelled; a `start` that raises or is cancelled has to free by itself what it had acquired.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from lit_async_rl.rewards.references import References
from lit_async_rl.types import Prompt


@dataclass(frozen=True, kw_only=True)
class Observation:
    """An episode's response to a turn of the policy.

    Attributes:
        text: read by the policy as it is, including the markers of its chat template if needed. Never trained on.
        reward: of this turn; a rollout's reward is the sum over its turns.
        state: of the environment, if `text` does not determine it; `GiGPO` compares turns that start in equal states.
            None is `text`.
        done: whether the episode ends; `text` is then not used.
    """

    text: str = ""
    reward: float = 0.0
    done: bool = False
    state: str | None = None


class Episode(ABC):
    """One episode of an environment."""

    @abstractmethod
    async def step(self, completion: str) -> Observation:
        """Responds to one turn of the policy, without special tokens. Must not block: use `await`."""

    async def step_cut(self, completion: str) -> Observation:
        """Rewards a turn that was cut at `sampling.max_tokens`; the episode ends with it.

        The default calls `step`. Override it where half a turn must not be executed.
        """
        return await self.step(completion)

    async def close(self) -> None:  # noqa: B027  (most have nothing to free)
        """Frees what the episode holds; called exactly once, after its last step. Errors are logged."""


class Environment(ABC):
    """Starts the episodes of an `EpisodeEngine`, whose rewards replace `data.reward`.

    Attributes:
        references: where an episode ends with one turn that is compared with the prompt's answer, which turn is right:
            a run then checks a sample of its prompts at the start. None checks nothing.
    """

    references: ClassVar[References | None] = None

    @abstractmethod
    async def start(self, prompt: Prompt) -> Episode:
        """A new episode; the policy reads the prompt (`prompt.text` or `prompt.messages`) first."""

    async def close(self) -> None:  # noqa: B027  (most have nothing to free)
        """Frees what the environment holds; called at the end of a run, when all of its episodes are closed.

        Another run of the same process may use the environment again, and closes it again: acquire in `start` what is
        freed here. Errors are logged.
        """
