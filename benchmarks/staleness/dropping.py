"""Training on data from which late rollouts were dropped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lit_async_rl.losses.aggregation import Aggregation, SequenceMean
from lit_async_rl.utils.checks import check_range


@dataclass(frozen=True)
class DropLongest(Aggregation):
    """Drops the longest rollouts of a step; the others are averaged as usual.

    Models systems that drop a rollout older than their bound: generation time grows with length, so long ones are lost.

    Args:
        share: of dropped rollouts; ties with the shortest dropped one are kept.
        aggregation: of the others.

    Raises:
        ValueError: `share` is not in [0, 1).
    """

    share: float = 0.25
    aggregation: Aggregation = field(default_factory=SequenceMean)

    def __post_init__(self) -> None:
        check_range("DropLongest", "in [0, 1)", share=self.share)

    def __call__(self, lengths: Sequence[int], group_sizes: Sequence[int]) -> list[float]:
        """Token weights; 0 for dropped rollouts."""
        longest_kept = sorted(lengths)[len(lengths) - int(self.share * len(lengths)) - 1]
        kept = [length if length <= longest_kept else 0 for length in lengths]
        return self.aggregation(kept, group_sizes)
