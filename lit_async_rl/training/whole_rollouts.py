"""Rollouts of several rows: the unit of sequence weights, baselines and effective samples is the rollout.

Each sampled token trains in exactly one row. The rows of a rollout are put side by side, as one row, so that losses,
corrections and baselines, which sum over rows, count each token once. B rows of T positions belong to R rollouts of at
most n rows.
"""

from __future__ import annotations

import math

from jaxtyping import Int, Shaped
from torch import Tensor

from lit_async_rl.types import RolloutBatch

BLANK = {"head_logprobs": -math.inf, "behavior_entropy": math.nan}  # fields of a batch that are not 0 without a token


class WholeRollouts:
    """Conversion between the rows of a micro-batch and its rollouts.

    Args:
        rollout: number of each row's rollout, from 0.
    """

    def __init__(self, rollout: Int[Tensor, " B"]) -> None:
        number = (rollout[:, None] == rollout).tril(-1).sum(1)  # of the row within its rollout
        self._num_rollouts = int(rollout.max()) + 1
        self._num_rows = int(number.max()) + 1
        self._place = rollout * self._num_rows + number

    def of_tokens(self, values: Shaped[Tensor, "B T *rest"], blank: float = 0.0) -> Shaped[Tensor, "R nT *rest"]:
        """Values of tokens, with the rows of a rollout side by side; `blank` where it has fewer."""
        wide = values.new_full((self._num_rollouts * self._num_rows, *values.shape[1:]), blank)
        wide = wide.index_copy(0, self._place, values)
        return wide.view(self._num_rollouts, self._num_rows * values.shape[1], *values.shape[2:])

    def of_rows(self, values: Shaped[Tensor, " B"]) -> Shaped[Tensor, " R"]:
        """Values of the first row of each rollout."""
        wide = values.new_zeros(self._num_rollouts * self._num_rows).index_copy(0, self._place, values)
        return wide.view(self._num_rollouts, self._num_rows)[:, 0]

    def of_batch(self, batch: RolloutBatch) -> RolloutBatch:
        """The micro-batch with one row for each rollout; its tokens follow each other without being one text."""
        fields = {name: value for name, value in vars(batch).items() if isinstance(value, Tensor)}
        return batch.replace(
            **{
                name: self.of_rows(value) if value.dim() == 1 else self.of_tokens(value, BLANK.get(name, 0.0))
                for name, value in fields.items()
            }
        )

    def to_rows(self, values: Shaped[Tensor, "R nT"]) -> Shaped[Tensor, "B T"]:
        """Inverse of `of_tokens`."""
        return values.reshape(self._num_rollouts * self._num_rows, -1)[self._place]
