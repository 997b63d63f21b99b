"""Aggregation: the weight of each token in the average over one optimizer step.

B rollouts, L_i trained tokens of rollout i. The loss of the step is the sum over tokens of weight times loss, for any
split into micro-batches and ranks. `TokenMean`, `SequenceMean` and `PromptMean` are averages over the rollouts that
have tokens: their weights sum to 1 over the step (0 if it has no token).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, islice

from lit_async_rl.errors import InvariantError
from lit_async_rl.types import Rollout, RolloutGroup
from lit_async_rl.utils.checks import check_range


class Aggregation(ABC):
    """Maps the lengths of all rollouts of a step to token weights."""

    def select(self, groups: Sequence[RolloutGroup]) -> Sequence[RolloutGroup]:
        """Masks tokens that do not train; by default returns the groups unchanged."""
        return groups

    def of_step(self, groups: Sequence[RolloutGroup]) -> list[float]:
        """Token weight of each rollout of the groups, concatenated."""
        lengths = [rollout.num_trained_tokens for group in groups for rollout in group.rollouts]
        return self(lengths, [len(group.rollouts) for group in groups])

    @abstractmethod
    def __call__(self, lengths: Sequence[int], group_sizes: Sequence[int]) -> list[float]:
        """Token weight of each rollout; `group_sizes` sum to the number of rollouts."""

    def divisor(self, lengths: Sequence[int], group_sizes: Sequence[int]) -> float | None:
        """Normaliser of the weights, additive over groups; None where it is a constant.

        For `data.stream_groups`, which knows the total only at the end of the step.

        Raises:
            ValueError: the aggregation has no additive normaliser.
        """
        raise ValueError(
            f"data.stream_groups does not work with data.aggregation={type(self).__name__}: the `divisor` of this "
            "aggregation is not a sum over the groups of a step. Use TokenMean, SequenceMean, PromptMean, FixedLength "
            "or TokenBudget."
        )


@dataclass(frozen=True)
class TokenMean(Aggregation):
    """1 / sum L: every token counts the same, long rollouts count more. DAPO, arXiv:2503.14476."""

    def __call__(self, lengths: Sequence[int], group_sizes: Sequence[int]) -> list[float]:
        """Weights that sum to 1 over all tokens of the step."""
        total = max(1, sum(lengths))
        return [1 / total for _ in lengths]

    def divisor(self, lengths: Sequence[int], group_sizes: Sequence[int]) -> float:
        """Number of trained tokens."""
        return float(sum(lengths))


@dataclass(frozen=True)
class SequenceMean(Aggregation):
    """1 / (B L_i): every rollout counts the same. GRPO, arXiv:2402.03300. B counts rollouts with tokens."""

    def __call__(self, lengths: Sequence[int], group_sizes: Sequence[int]) -> list[float]:
        """Weights that sum to 1 / B over each rollout."""
        num_rollouts = sum(length > 0 for length in lengths)
        return [1 / (num_rollouts * length) if length else 0.0 for length in lengths]

    def divisor(self, lengths: Sequence[int], group_sizes: Sequence[int]) -> float:
        """Number of rollouts with tokens."""
        return float(sum(length > 0 for length in lengths))


@dataclass(frozen=True)
class PromptMean(Aggregation):
    """1 / (G sum of the group's L): every prompt counts the same, and so does every token within it.

    ScaleRL, arXiv:2510.13786; its average within a prompt could not be checked. G counts groups with tokens.
    """

    def __call__(self, lengths: Sequence[int], group_sizes: Sequence[int]) -> list[float]:
        """Weights that sum to 1 / G over each group."""
        tokens = _group_totals(lengths, group_sizes)
        num_groups = sum(total > 0 for total in tokens)
        return [
            1 / (num_groups * total) if total else 0.0
            for total, size in zip(tokens, group_sizes, strict=True)
            for _ in range(size)
        ]

    def divisor(self, lengths: Sequence[int], group_sizes: Sequence[int]) -> float:
        """Number of groups with tokens."""
        return float(sum(total > 0 for total in _group_totals(lengths, group_sizes)))


def _group_totals(lengths: Sequence[int], group_sizes: Sequence[int]) -> list[int]:
    if sum(group_sizes) != len(lengths):
        raise InvariantError(f"group sizes sum to {sum(group_sizes)}, but there are {len(lengths)} rollouts")
    rest = iter(lengths)
    return [sum(islice(rest, size)) for size in group_sizes]


@dataclass(frozen=True)
class FixedLength(Aggregation):
    """1 / (B M) with a constant M: no length bias. Dr. GRPO, arXiv:2503.20783.

    Sums to mean L / M, not to 1. M = 1 is the mean over rollouts of sums over tokens, REINFORCE's own.

    Args:
        max_tokens: M, usually `sampling.max_tokens`.

    Raises:
        ValueError: M is not positive.
    """

    max_tokens: int

    def __post_init__(self) -> None:
        check_range("FixedLength", "integer >= 1", max_tokens=self.max_tokens)

    def __call__(self, lengths: Sequence[int], group_sizes: Sequence[int]) -> list[float]:
        """The same weight for each rollout."""
        return [1 / (len(lengths) * self.max_tokens) for _ in lengths]

    def divisor(self, lengths: Sequence[int], group_sizes: Sequence[int]) -> float:
        """Number of rollouts."""
        return float(len(lengths))


@dataclass(frozen=True)
class TokenBudget(Aggregation):
    """1 / Phi with a constant Phi: every token of every step counts the same. C3PO (Ring-lite), arXiv:2506.14731.

    With `fill` a step trains on at most Phi tokens: rollouts are taken in admission order (independent of length) until
    they have Phi tokens; the last one is truncated, and later ones do not train, but stay in the baselines of their
    groups. `data.groups_per_step` is then the pool, and should hold slightly more than Phi tokens. Without `fill` the
    size of the gradient is proportional to the number of tokens. The paper's sampling from its pool could not be
    checked; it adds terms for entropy (`model.entropy_coefficient`) and expert balance.

    Args:
        num_tokens: Phi.
        fill: train on at most Phi tokens.

    Raises:
        ValueError: Phi is not positive.
    """

    num_tokens: int
    fill: bool = False

    def __post_init__(self) -> None:
        check_range("TokenBudget", "integer >= 1", num_tokens=self.num_tokens)

    def select(self, groups: Sequence[RolloutGroup]) -> Sequence[RolloutGroup]:
        """Masks the tokens beyond the budget."""
        if not self.fill:
            return groups
        budget = self.num_tokens
        selected = []
        for group in groups:
            rollouts = []
            for rollout in group.rollouts:
                rollouts.append(_first_tokens(rollout, budget))
                budget -= rollouts[-1].num_trained_tokens
            selected.append(replace(group, rollouts=tuple(rollouts)))
        return selected

    def __call__(self, lengths: Sequence[int], group_sizes: Sequence[int]) -> list[float]:
        """Equal weights, the same in every step."""
        return [1 / self.num_tokens for _ in lengths]

    def divisor(self, lengths: Sequence[int], group_sizes: Sequence[int]) -> None:
        """None: the normaliser is a constant.

        Raises:
            ValueError: `fill` needs all groups of the step before it selects tokens.
        """
        if self.fill:
            raise ValueError(
                "data.stream_groups cannot be combined with TokenBudget.fill=true, because the budget applies to whole "
                "steps"
            )


@dataclass(frozen=True)
class SourceMean(Aggregation):
    """(1 / n) times the average over each of n sources: every source counts the same.

    The average of Malenia NIGT (arXiv:2509.24305), for sources with different distributions and speeds. The paper's
    stopping rule (by the harmonic mean of gradients per source) is not implemented: a step has `data.groups_per_step`
    groups, and n counts their sources.

    Args:
        key: key of `Prompt.metadata` that names the source.
        aggregation: average within a source; with `TokenBudget.fill` each source has its own budget.
    """

    key: str
    aggregation: Aggregation = field(default_factory=SequenceMean)

    def __call__(self, lengths: Sequence[int], group_sizes: Sequence[int]) -> list[float]:
        """Weights of a single source."""
        return self.aggregation(lengths, group_sizes)

    def select(self, groups: Sequence[RolloutGroup]) -> Sequence[RolloutGroup]:
        """Masks tokens within each source."""
        selected = list(groups)
        for members in self._sources(groups):
            for n, group in zip(members, self.aggregation.select([groups[n] for n in members]), strict=True):
                selected[n] = group
        return selected

    def of_step(self, groups: Sequence[RolloutGroup]) -> list[float]:
        """Weights within each source, divided by the number of sources."""
        weights: dict[int, list[float]] = {}
        sources = self._sources(groups)
        for members in sources:
            inner = iter(self.aggregation.of_step([groups[n] for n in members]))
            for n in members:
                weights[n] = [next(inner) / len(sources) for _ in groups[n].rollouts]
        return [weight for n in range(len(groups)) for weight in weights[n]]

    def _sources(self, groups: Sequence[RolloutGroup]) -> list[list[int]]:
        """Positions of the groups of each source.

        Raises:
            ValueError: a prompt has no such key.
        """
        sources: dict[object, list[int]] = {}
        for n, group in enumerate(groups):
            if self.key not in group.prompt.metadata:
                has = f"the metadata of a prompt, which has {sorted(group.prompt.metadata)}"
                raise ValueError(f"SourceMean.key={self.key!r} is missing in {has}")
            sources.setdefault(group.prompt.metadata[self.key], []).append(n)
        return list(sources.values())


def within_sources(aggregation: Aggregation) -> Aggregation:
    """The innermost aggregation, which averages within a source."""
    return within_sources(aggregation.aggregation) if isinstance(aggregation, SourceMean) else aggregation


def _first_tokens(rollout: Rollout, num_tokens: int) -> Rollout:
    """Copy of the rollout that trains on its first `num_tokens` trained tokens only."""
    if rollout.num_trained_tokens <= num_tokens:
        return rollout
    branches = []
    left = num_tokens - rollout.num_own_tokens
    for branch in rollout.branches:
        branches.append(replace(branch, loss_mask=_first_true(branch.loss_mask, left)))
        left -= branch.num_own_tokens
    mask = _first_true(rollout.loss_mask or (True,) * len(rollout.token_ids), num_tokens)
    return replace(rollout, loss_mask=mask, branches=tuple(branches))


def _first_true(mask: Sequence[bool], number: int) -> tuple[bool, ...]:
    """The mask with only its first `number` ones."""
    return tuple(on and n <= number for on, n in zip(mask, accumulate(mask), strict=True))
