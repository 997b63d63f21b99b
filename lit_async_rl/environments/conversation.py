"""State of a multi-turn rollout while it is sampled."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace

from lit_async_rl.engines.base import Completion, GenerationRequest
from lit_async_rl.environments.base import Environment, Episode, Observation
from lit_async_rl.errors import EnvironmentFailure, InvariantError
from lit_async_rl.expert_choices import ExpertChoices
from lit_async_rl.sampler_head import SamplerHead, blank_head, join_heads
from lit_async_rl.types import FinishReason, Prompt, Turn

NO_PROMPT = "an environment needs the prompt, not only its tokens"


@dataclass(eq=False)
class Conversation:
    """A multi-turn rollout so far; lists have one entry per token after the prompt."""

    request: GenerationRequest
    sample_index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    heads: list[SamplerHead] = field(default_factory=list)  # one for each stretch of tokens
    experts: ExpertChoices | None = None  # of the prompt, too
    reward: float = 0.0
    turns: list[Turn] = field(default_factory=list)
    state: int = 0  # what the environment showed last
    episode: Episode | None = None
    num_failed: int = 0  # tries
    is_over: bool = False  # ended, given up or dropped: its episode is to be closed

    @classmethod
    def of(cls, request: GenerationRequest) -> list[Conversation]:
        """Conversations of a request, one for each sample.

        Raises:
            InvariantError: the request has no prompt.
        """
        if request.prompt is None:
            raise InvariantError(NO_PROMPT)
        return [cls(request, n) for n in range(request.num_samples)]

    @property
    def prompt(self) -> Prompt:
        """The prompt as the environment gets it."""
        if self.request.prompt is None:
            raise InvariantError(NO_PROMPT)
        return self.request.prompt

    def add_turn(self, turn: Completion) -> None:
        """Appends a turn of the policy, without reward so far."""
        self.token_ids += turn.token_ids
        self.logprobs += turn.logprobs
        self.versions += turn.versions
        self.loss_mask += [True] * len(turn.token_ids)
        if turn.head is not None:
            self.heads.append(turn.head)
        if turn.experts is not None:  # its prompt is the whole conversation
            self.experts = turn.experts if self.experts is None else self.experts.continued(turn.experts)
        self.turns.append(Turn(end=len(self.token_ids), reward=0.0, state=self.state))

    def add_answer(self, observation: Observation) -> None:
        """Sets the reward of the last turn and the state of the next."""
        self.reward += observation.reward
        self.turns[-1] = replace(self.turns[-1], reward=observation.reward)
        self.state = _number(observation.text if observation.state is None else observation.state)

    def add_observation(self, token_ids: tuple[int, ...]) -> None:
        """Appends tokens of the environment."""
        self.token_ids += token_ids
        self.logprobs += [0.0] * len(token_ids)
        self.versions += [self.versions[-1]] * len(token_ids)
        self.loss_mask += [False] * len(token_ids)
        if self.heads:
            self.heads.append(blank_head(len(token_ids), self.heads[0].width))

    def next_request(self, number: int, observation: tuple[int, ...]) -> GenerationRequest:
        """Appends tokens of the environment and asks for the next turn, as request `number`."""
        self.add_observation(observation)
        return self._request(number)

    def begin_again(self, number: int) -> GenerationRequest:
        """Forgets all turns, and asks for the first one again, as request `number`."""
        blank = Conversation(self.request, self.sample_index)
        for name in ("token_ids", "logprobs", "versions", "loss_mask", "heads", "experts", "reward", "turns", "state"):
            setattr(self, name, getattr(blank, name))
        return self._request(number)

    def _request(self, number: int) -> GenerationRequest:
        so_far = self.request.prompt_ids + tuple(self.token_ids)
        seed = None if self.request.seed is None else self.request.seed + self.sample_index
        return replace(self.request, id=number, prompt_ids=so_far, num_samples=1, seed=seed)

    def failure(self, environment: Environment, text: str, what: str) -> EnvironmentFailure:
        """The error of an environment that failed at the turn `text`; `what` it did."""
        where = f"on prompt {self.prompt.text[:200]!r}, turn {text[:200]!r}"
        return EnvironmentFailure(f"environment {type(environment).__name__} {where} {what}")

    def completion(self, finish_reason: FinishReason) -> Completion:
        """The rollout as a completion."""
        num_read = len(self.request.prompt_ids) + len(self.token_ids) - 1  # a last observation was not read
        return Completion(
            request_id=self.request.id,
            sample_index=self.sample_index,
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            versions=tuple(self.versions),
            finish_reason=finish_reason,
            loss_mask=tuple(self.loss_mask),
            reward=self.reward,
            turns=tuple(self.turns),
            head=join_heads(self.heads) if self.heads else None,
            experts=None if self.experts is None else self.experts.padded(num_read),
        )


def _number(state: str) -> int:
    """Hash of a text: 63 bits, the same in every process."""
    return int.from_bytes(hashlib.blake2b(state.encode(), digest_size=8).digest(), "big") >> 1
