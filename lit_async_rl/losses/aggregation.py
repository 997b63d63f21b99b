"""How tokens are averaged over one optimizer step: the weight of each token of each rollout.

B rollouts, L_i trained tokens of rollout i. The loss of the step is the sum over tokens of weight times loss, whatever
the split into micro-batches and ranks. `TokenMean`, `SequenceMean` and `PromptMean` are averages: their weights sum to
1 over the step (0 if it has no token). A rollout without tokens is left out of an average.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, islice

from lit_async_rl.errors import InvariantError
from lit_async_rl.types import Rollout, RolloutGroup


class Aggregation(ABC):
    """Lengths of all rollouts of a step to the weight of one token of each."""

    def select(self, groups: Sequence[RolloutGroup]) -> Sequence[RolloutGroup]:
        """The groups of a step, with what is not to train masked: nothing, unless a subclass says otherwise."""
        return groups

    def of_step(self, groups: Sequence[RolloutGroup]) -> list[float]:
        """Weight of a token of each rollout of these groups, one after the other."""
        lengths = [rollout.num_trained_tokens for group in groups for rollout in group.rollouts]
        return self(lengths, [len(group.rollouts) for group in groups])

    @abstractmethod
    def __call__(self, lengths: Sequence[int], group_sizes: Sequence[int]) -> list[float]:
        """Weight of a token of each rollout; `group_sizes` add up to the number of rollouts."""

    def divisor(self, lengths: Sequence[int], group_sizes: Sequence[int]) -> float | None:
        """What the weights are divided by: a number that adds up over groups. None where it does not depend on them.

        Where groups are streamed, the divisor of their step is not known when the first are trained on.

        Raises:
            ValueError: the weights of a step are not those of its parts up to a factor, or that was not said.
        """
        raise ValueError(
            f"data.intake.stream_groups with data.aggregation={type(self).__name__}: it has no `divisor` that adds up over "
            "the groups of a step. Use TokenMean, SequenceMean, PromptMean, FixedLength or TokenBudget."
        )


@dataclass(frozen=True)
class TokenMean(Aggregation):
    """1 / sum L: every token counts the same, long rollouts count more. DAPO, arXiv:2503.14476."""

    def __call__(self, lengths: Sequence[int], group_sizes: Sequence[int]) -> list[float]:
        """Weights that sum to 1 over all tokens."""
        total = max(1, sum(lengths))
        return [1 / total for _ in lengths]

    def divisor(self, lengths: Sequence[int], group_sizes: Sequence[int]) -> float:
        """Tokens."""
        return float(sum(lengths))


@dataclass(frozen=True)
class SequenceMean(Aggregation):
    """1 / (B L_i): every rollout counts the same. GRPO, arXiv:2402.03300. B counts rollouts with tokens."""

    def __call__(self, lengths: Sequence[int], group_sizes: Sequence[int]) -> list[float]:
        """Weights that sum to 1 / B over each rollout."""
        num_rollouts = sum(length > 0 for length in lengths)
        return [1 / (num_rollouts * length) if length else 0.0 for length in lengths]

    def divisor(self, lengths: Sequence[int], group_sizes: Sequence[int]) -> float:
        """Rollouts with tokens."""
        return float(sum(length > 0 for length in lengths))


@dataclass(frozen=True)
class PromptMean(Aggregation):
    """1 / (G sum of the group's L): every prompt counts the same, its tokens share. ScaleRL, arXiv:2510.13786.

    G counts groups with tokens. The paper's text could not be checked for the average within a prompt.
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
        """Groups with tokens."""
        return float(sum(total > 0 for total in _group_totals(lengths, group_sizes)))


def _group_totals(lengths: Sequence[int], group_sizes: Sequence[int]) -> list[int]:
    if sum(group_sizes) != len(lengths):
        raise InvariantError(f"groups of {sum(group_sizes)} rollouts in all, and {len(lengths)} rollouts")
    rest = iter(lengths)
    return [sum(islice(rest, size)) for size in group_sizes]


@dataclass(frozen=True)
class FixedLength(Aggregation):
    """1 / (B M) with a constant M: no length bias at all. Dr. GRPO, arXiv:2503.20783.

    Sums to mean L / M, not to 1. M = 1 is the mean over rollouts of sums over tokens, REINFORCE's own.

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
        """The same weight for every token of every step with as many rollouts."""
        return [1 / (len(lengths) * self.max_tokens) for _ in lengths]

    def divisor(self, lengths: Sequence[int], group_sizes: Sequence[int]) -> float:
        """Rollouts."""
        return float(len(lengths))


@dataclass(frozen=True)
class TokenBudget(Aggregation):
    """1 / Phi with a constant Phi: every token of every step counts the same. C3PO (Ring-lite), arXiv:2506.14731.

    With `fill` a step trains on exactly Phi tokens, if it has as many: in the order of admission, which does not depend
    on the length, rollouts are taken until they have Phi tokens; the last one is cut, those behind it do not train. All
    of them stay in the baselines of their groups. So `data.groups_per_step` is the pool, which should hold a little
    more than Phi tokens. How the paper samples from its pool could not be checked; it adds terms for entropy
    (`model.entropy_coefficient`) and the balance of experts. Without `fill` the gradient's size follows the tokens.

    Args:
        num_tokens: Phi.
        fill: train on no more than Phi tokens.

    Raises:
        ValueError: Phi is not positive.
    """

    num_tokens: int
    fill: bool = False

    def __post_init__(self) -> None:
        if self.num_tokens < 1:
            raise ValueError(f"TokenBudget.num_tokens must be >= 1, got {self.num_tokens}")

    def select(self, groups: Sequence[RolloutGroup]) -> Sequence[RolloutGroup]:
        """Masks what is behind the budget."""
        if not self.fill:
            return groups
        left, selected = self.num_tokens, []
        for group in groups:
            rollouts = []
            for rollout in group.rollouts:
                rollouts.append(_first_tokens(rollout, left))
                left -= rollouts[-1].num_trained_tokens
            selected.append(replace(group, rollouts=tuple(rollouts)))
        return selected

    def __call__(self, lengths: Sequence[int], group_sizes: Sequence[int]) -> list[float]:
        """The same weight for every token of every step."""
        return [1 / self.num_tokens for _ in lengths]

    def divisor(self, lengths: Sequence[int], group_sizes: Sequence[int]) -> None:
        """A constant.

        Raises:
            ValueError: which tokens are within the budget is known only when all groups are there.
        """
        if self.fill:
            raise ValueError("data.intake.stream_groups with TokenBudget.fill=true: the budget is that of a whole step")


@dataclass(frozen=True)
class SourceMean(Aggregation):
    """(1 / n) times the average over each of n sources: each counts the same, however many of its groups have finished.

    The average of Malenia NIGT (arXiv:2509.24305), g = (1 / n) sum_i mean of source i's gradients, where the sources'
    distributions differ and a fast one must not count for more than a slow one. Its stopping rule (a harmonic mean of
    the sources' numbers) is not here: a step has `data.groups_per_step` groups, and n counts the sources among them.

    Args:
        key: of the prompts' metadata, which names the source.
        aggregation: average within a source.
    """

    key: str
    aggregation: Aggregation = field(default_factory=SequenceMean)

    def __call__(self, lengths: Sequence[int], group_sizes: Sequence[int]) -> list[float]:
        """One source."""
        return self.aggregation(lengths, group_sizes)

    def of_step(self, groups: Sequence[RolloutGroup]) -> list[float]:
        """Weights within the sources, divided by their number.

        Raises:
            ValueError: a prompt does not say its source.
        """
        sources: dict[object, list[int]] = {}
        for n, group in enumerate(groups):
            if self.key not in group.prompt.metadata:
                known = sorted(group.prompt.metadata)
                raise ValueError(f"SourceMean.key={self.key!r}: a prompt's metadata has only {known}")
            sources.setdefault(group.prompt.metadata[self.key], []).append(n)
        weights: dict[int, list[float]] = {}
        for members in sources.values():
            inner = iter(self.aggregation.of_step([groups[n] for n in members]))
            for n in members:
                weights[n] = [next(inner) / len(sources) for _ in groups[n].rollouts]
        return [weight for n in range(len(groups)) for weight in weights[n]]


def _first_tokens(rollout: Rollout, num_tokens: int) -> Rollout:
    """The same rollout, of which only the first `num_tokens` of those that train do."""
    if rollout.num_trained_tokens <= num_tokens:
        return rollout
    mask = rollout.loss_mask or (True,) * len(rollout.completion_ids)
    places = accumulate(mask)
    return replace(rollout, loss_mask=tuple(on and n <= num_tokens for on, n in zip(mask, places, strict=True)))
