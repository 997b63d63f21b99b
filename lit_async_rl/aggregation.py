"""How tokens are averaged over one optimizer step: the weight of each token of each rollout.

B rollouts, L_i trained tokens of rollout i. The loss of the step is the sum over tokens of weight times loss, whatever
the split into micro-batches and ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass


class Aggregation(ABC):
    """Lengths of all rollouts of a step to the weight of one token of each."""

    @abstractmethod
    def __call__(self, lengths: Sequence[int], group_sizes: Sequence[int]) -> list[float]:
        """Weight of a token of each rollout; `group_sizes` add up to the number of rollouts."""


class TokenMean(Aggregation):
    """1 / sum L: every token counts the same, long rollouts count more. DAPO, arXiv:2503.14476."""

    def __call__(self, lengths: Sequence[int], group_sizes: Sequence[int]) -> list[float]:
        """Weights that sum to 1 over all tokens."""
        total = max(1, sum(lengths))
        return [1 / total for _ in lengths]


class SequenceMean(Aggregation):
    """1 / (B L_i): every rollout counts the same. GRPO, arXiv:2402.03300. Empty rollouts count as 0."""

    def __call__(self, lengths: Sequence[int], group_sizes: Sequence[int]) -> list[float]:
        """Weights that sum to 1 / B over each rollout."""
        return [1 / (len(lengths) * max(1, length)) for length in lengths]


class PromptMean(Aggregation):
    """1 / (G sum of the group's L): every prompt counts the same, its tokens share. G groups."""

    def __call__(self, lengths: Sequence[int], group_sizes: Sequence[int]) -> list[float]:
        """Weights that sum to 1 / G over each group."""
        weights: list[float] = []
        for size in group_sizes:
            tokens = sum(lengths[len(weights) : len(weights) + size])
            weights += [1 / (len(group_sizes) * max(1, tokens))] * size
        return weights


@dataclass(frozen=True)
class FixedLength(Aggregation):
    """1 / (B M) with a constant M: no length bias at all. Dr. GRPO, arXiv:2503.20783.

    Args:
        max_tokens: M, usually `sampling.max_tokens`.

    Raises:
        ValueError: M is not positive.
    """

    max_tokens: int

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"FixedLength.max_tokens must be >= 1, got {self.max_tokens}")

    def __call__(self, lengths: Sequence[int], group_sizes: Sequence[int]) -> list[float]:
        """The same weight for every token of every step."""
        return [1 / (len(lengths) * self.max_tokens) for _ in lengths]
