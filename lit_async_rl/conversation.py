"""A rollout of several turns while it is made."""

from __future__ import annotations

from dataclasses import dataclass, field

from lit_async_rl.engine import Completion, GenerationRequest
from lit_async_rl.environments import Episode
from lit_async_rl.types import FinishReason


@dataclass(eq=False)
class Conversation:
    """One rollout so far; lists have an entry for each token after the prompt."""

    request: GenerationRequest
    sample_index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    reward: float = 0.0
    num_turns: int = 0
    episode: Episode | None = None

    def add_turn(self, turn: Completion) -> None:
        """Adds what the policy wrote."""
        self.token_ids += turn.token_ids
        self.logprobs += turn.logprobs
        self.versions += turn.versions
        self.loss_mask += [True] * len(turn.token_ids)
        self.num_turns += 1

    def add_observation(self, token_ids: tuple[int, ...]) -> None:
        """Adds what the environment wrote."""
        self.token_ids += token_ids
        self.logprobs += [0.0] * len(token_ids)
        self.versions += [self.versions[-1]] * len(token_ids)
        self.loss_mask += [False] * len(token_ids)

    def completion(self, finish_reason: FinishReason) -> Completion:
        """What is handed out."""
        return Completion(
            request_id=self.request.id,
            sample_index=self.sample_index,
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            versions=tuple(self.versions),
            finish_reason=finish_reason,
            loss_mask=tuple(self.loss_mask),
            reward=self.reward,
        )
