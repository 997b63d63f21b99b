"""Interface of multi-turn environments.

An environment starts an *episode* for each rollout; policy and episode take turns until it is done. All methods are
coroutines in one event loop: a thousand episodes can await a slow tool concurrently.

Each episode that `start` returns is closed exactly once, when none of its other methods runs, whether it is done, cut,
dropped or failed, or the engine is closed. A `start` or `step` is cancelled when its result is no longer needed; a
`start` that raises or is cancelled must free its own resources.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from lit_async_rl.problem import Prompt
from lit_async_rl.rewards.references import References
from lit_async_rl.utils.elsewhere import Rebuildable


@dataclass(frozen=True, kw_only=True)
class Observation:
    """An episode's response to a turn of the policy.

    Attributes:
        text: text for the policy, unchanged, with the markers of its chat template if needed. Never trained on.
        reward: reward of this turn; a rollout's reward is the sum over its turns.
        done: whether the episode ends; `text` is then not used.
        state: state of the environment, if `text` does not determine it; `GiGPO` compares turns that start in equal
            states. None is `text`.
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

        The default calls `step`. Override it if an incomplete turn must not be executed.
        """
        return await self.step(completion)

    async def close(self) -> None:  # noqa: B027  (most have nothing to free)
        """Frees the episode's resources, once, after its last step. Errors are logged."""


class Environment(Rebuildable, ABC):
    """Starts the episodes of an `EpisodeEngine`; their rewards replace `data.reward`.

    An environment is pickled as its class and constructor arguments, and rebuilt in another process.

    Attributes:
        references: correct turns for prompts, if an episode is one turn that is compared with the prompt's answer: a
            run then checks the rewards of some prompts at its start. None checks nothing.
    """

    references: ClassVar[References | None] = None

    @abstractmethod
    async def start(self, prompt: Prompt) -> Episode:
        """Starts an episode; the policy reads the prompt (`prompt.text` or `prompt.messages`) first."""

    async def close(self) -> None:
        """Frees the environment's resources at the end of a run, when all episodes are closed.

        Another run of the process may use the environment and close it again, so acquire resources in `start`. Errors
        are logged.
        """


async def close_one(owner: Any) -> None:
    """Calls `close` of an episode or environment, if it has one; it may be a plain function."""
    ended = owner.close() if hasattr(owner, "close") else None
    if inspect.isawaitable(ended):
        await ended
