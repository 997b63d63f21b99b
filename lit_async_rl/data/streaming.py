"""A step that is trained on while it is still being sampled (Periodic Asynchrony, arXiv:2511.18871).

Groups come in the order in which they finish. Every so many of them are a micro-batch, which is trained on at once;
the optimizer step comes after the last. The gradient of a step is a sum over its groups, so their order does not
matter; but what the sum is divided by (the tokens of the step, say) is known only at its end. Micro-batches are
therefore weighted by a guess Z' of that divisor, made from the first of them, and the gradient is rescaled by Z' / Z,
once, before anybody looks at it.

What differs from the paper: a micro-batch may be several groups, and `max_staleness` above 0 may be streamed too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lit_async_rl.advantages.group import AdvantageEstimator
from lit_async_rl.errors import InvariantError
from lit_async_rl.losses.aggregation import Aggregation
from lit_async_rl.types import RolloutGroup


def check_streamable(
    advantage: AdvantageEstimator, aggregation: Aggregation, groups_per_step: int, micro_batches_per_step: int
) -> None:
    """Checks that a group's gradient does not depend on later groups, up to one common factor.

    Raises:
        ValueError: it depends on them, or there are fewer groups than micro-batches.
    """
    if micro_batches_per_step > groups_per_step:
        raise ValueError(
            f"data.intake.stream_groups with data.micro_batches_per_step={micro_batches_per_step}: a micro-batch needs "
            f"a group at least, and data.groups_per_step={groups_per_step}"
        )
    rewards, lengths = [[0.0, 1.0, 3.0], [5.0, 5.0, 4.0]], [[1, 2, 3], [4, 5, 6]]
    apart = [advantage([group], [tokens])[0] for group, tokens in zip(rewards, lengths, strict=True)]
    if advantage(rewards, lengths) != apart:
        raise ValueError(
            f"data.intake.stream_groups with data.advantage={type(advantage).__name__}: the advantages of a group "
            "depend on other groups of the step, which are not there yet. Use one of single groups: GroupMeanStd."
        )
    aggregation.divisor(lengths[0], [len(lengths[0])])


@dataclass(frozen=True)
class PartWeights(Aggregation):
    """Token weights of some groups of a step, as if the step's divisor were `divisor_of_step`.

    Args:
        aggregation: of the step.
        divisor_of_step: Z'.
    """

    aggregation: Aggregation
    divisor_of_step: float

    def __call__(self, lengths: Sequence[int], group_sizes: Sequence[int]) -> list[float]:
        """Weights within the part, rescaled from its own divisor to the step's."""
        divisor = self.aggregation.divisor(lengths, group_sizes)
        factor = 1.0 if divisor is None else divisor / self.divisor_of_step
        return [factor * weight for weight in self.aggregation(lengths, group_sizes)]


class StreamedStep:
    """The parts of one optimizer step, in the order in which their groups finish.

    Args:
        aggregation: weight of each token in the average over the step.
        num_groups: of the step.
        num_parts: number of nearly equal parts.

    Attributes:
        groups: received so far.
        num_begun: parts received so far.
    """

    def __init__(self, aggregation: Aggregation, num_groups: int, num_parts: int) -> None:
        self.aggregation, self.num_groups, self.num_parts = aggregation, num_groups, num_parts
        self.groups: list[RolloutGroup] = []
        self.num_begun = 0
        self._divisor = 0.0  # of the groups that have come
        self._guess = 1.0

    @property
    def is_done(self) -> bool:
        """Whether all groups were received."""
        return len(self.groups) == self.num_groups

    @property
    def next_size(self) -> int:
        """Number of groups in the next part."""
        return (self.num_begun + 1) * self.num_groups // self.num_parts - len(self.groups)

    def add(self, groups: Sequence[RolloutGroup]) -> PartWeights:
        """Adds the next part; returns its token weights."""
        if len(groups) != self.next_size:
            raise InvariantError(f"a streamed micro-batch is of {self.next_size} groups, got {len(groups)}")
        lengths = [rollout.num_trained_tokens for group in groups for rollout in group.rollouts]
        divisor = self.aggregation.divisor(lengths, [len(group.rollouts) for group in groups])
        if divisor is not None:
            self._divisor += divisor
        if not self.groups:
            self._guess = self._divisor * self.num_groups / len(groups) or 1.0
        self.groups += groups
        self.num_begun += 1
        return PartWeights(self.aggregation, self._guess)

    @property
    def gradient_scale(self) -> float:
        """Factor of the step's gradient after the last part; 1 after the others."""
        return self._guess / self._divisor if self.is_done and self._divisor else 1.0
