"""What a system that throws late rollouts away does to its training data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lit_async_rl.losses.aggregation import Aggregation, SequenceMean
from lit_async_rl.utils.checks import check_range


@dataclass(frozen=True)
class DropLongest(Aggregation):
    """The longest rollouts of a step never arrive in time: they count nothing, the others are averaged as usual.

    Stands for systems that drop a rollout which has become older than their bound: the time to generate grows with the
    length, so it is the long ones that are lost.

    Args:
        share: of the rollouts that are dropped; ties with the shortest dropped one are kept.
        aggregation: how the others are averaged.

    Raises:
        ValueError: the share is not in [0, 1).
    """

    share: float = 0.25
    aggregation: Aggregation = field(default_factory=SequenceMean)

    def __post_init__(self) -> None:
        check_range("DropLongest", "in [0, 1)", share=self.share)

    def __call__(self, lengths: Sequence[int], group_sizes: Sequence[int]) -> list[float]:
        """Weights of tokens; 0 for those of dropped rollouts."""
        longest_kept = sorted(lengths)[len(lengths) - int(self.share * len(lengths)) - 1]
        kept = [length if length <= longest_kept else 0 for length in lengths]
        return self.aggregation(kept, group_sizes)
