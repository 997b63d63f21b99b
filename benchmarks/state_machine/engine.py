"""Prompts, tokenizer and engine of the state machine: a token depends on weights, prompt, draw and position only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lit_async_rl.engines.base import Completion, GenerationRequest, RolloutEngine
from lit_async_rl.models.loading import EndTokens
from lit_async_rl.models.tokenizer import TextCodec
from lit_async_rl.prompts.sources import PromptSource
from lit_async_rl.types import Prompt

MODULUS = 2**61 - 1
LONGEST = 3  # tokens of a completion


def mix(*values: int) -> int:
    """Hash of integers, which depends on their order."""
    mixed = 1469598103
    for value in values:
        mixed = (mixed * 6364136223846793005 + value + 1442695040888963407) % MODULUS
        mixed ^= mixed >> 29
    return mixed


def sample_length(draw: int) -> int:
    """Number of tokens of a completion."""
    return 1 + mix(draw) % LONGEST


def sample_token(weights: int, prompt: int, draw: int, position: int) -> int:
    """A token of a completion; it depends on the weights that sampled it."""
    return mix(weights, prompt, draw, position) % 100_000


class NumberedPrompts(PromptSource):
    """Prompts whose single token is their number."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Prompt:
        return Prompt(text=str(index))


class NumberCodec(TextCodec):
    """Tokenizer of numbers."""

    vocab_size = 2**62
    special_tokens = "none"
    model = ""
    ends = EndTokens(ids=())

    def __init__(self) -> None:
        """Needs no tokenizer."""

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        return (int(prompt.text),)

    def decode(self, token_ids: Sequence[int], stop: Sequence[str] = (), stop_token_ids: Sequence[int] = ()) -> str:
        return ",".join(map(str, token_ids))


@dataclass
class _Running:
    request: GenerationRequest
    number: int
    draw: int
    tokens: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def completion(self, reason: Any) -> Completion:
        return Completion(
            request_id=self.request.id,
            sample_index=self.number,
            token_ids=tuple(self.tokens),
            logprobs=(-1.0,) * len(self.tokens),
            versions=tuple(self.versions),
            finish_reason=reason,
        )


class VirtualEngine(RolloutEngine):
    """Engine that samples one token per call of `step`; its weights are a number."""

    busy_s = 0.0
    num_tokens = 0
    max_model_len = 2**31 - 1

    def __init__(self, in_flight_weight_updates: bool) -> None:
        self.in_flight_weight_updates = in_flight_weight_updates
        self.running: list[_Running] = []
        self.outbox: list[Completion] = []
        self.fault: Exception | None = None
        self.num_draws = self.weights = self.version = 0

    def setup(self, model: str) -> None:
        """Does nothing."""

    def _check(self) -> None:
        if self.fault is not None:
            raise self.fault

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Starts all samples; their random draws depend only on their order."""
        self._check()
        for request in requests:
            for number in range(request.num_samples):
                self.running.append(_Running(request, number, self.num_draws))
                self.num_draws += 1

    def step(self, chosen: int) -> None:
        """Samples one token of a running sample."""
        sample = self.running[chosen % len(self.running)]
        known, limit = sample.request.prompt_ids, sample.request.sampling.max_tokens
        sample.tokens.append(sample_token(self.weights, known[0], sample.draw, len(known) - 1 + len(sample.tokens)))
        sample.versions.append(self.version)
        self.num_tokens += 1
        if len(sample.tokens) >= min(limit, sample_length(sample.draw)):
            self.running.remove(sample)
            self.outbox.append(sample.completion("stop"))

    def poll(self, timeout_s: float) -> list[Completion]:
        self._check()
        found, self.outbox = self.outbox, []
        return found

    def load_weights(self, version: int, weights: Iterable[tuple[str, Any]]) -> None:
        """Without in-flight updates finishes all running samples first."""
        self._check()
        while self.running and not self.in_flight_weight_updates:
            self.step(0)
        ((_, self.weights),) = list(weights)
        self.version = version

    def abort(self, request_ids: Sequence[int]) -> None:
        self._check()
        self.running = [sample for sample in self.running if sample.request.id not in request_ids]
        self.outbox = [completion for completion in self.outbox if completion.request_id not in request_ids]

    def partial_completions(self) -> list[Completion]:
        self._check()
        return [sample.completion("abort") for sample in self.running if sample.tokens]

    def random_state(self) -> Tensor:
        return torch.tensor([self.num_draws])

    def set_random_state(self, state: Tensor) -> None:
        self.num_draws = int(state[0])

    def close(self) -> None:
        """Does nothing."""
