"""Counter of updates dropped for a non-finite gradient, with a limit of consecutive drops."""

from __future__ import annotations

import logging

from lightning.fabric.utilities.rank_zero import rank_zero_only

from lit_async_rl.errors import NonFiniteError
from lit_async_rl.utils.checks import check_range

log = logging.getLogger(__name__)


class DroppedUpdates:
    """Counts dropped updates, with one log line each.

    Args:
        owner: name of the callback, for messages.
        max_in_a_row: consecutive drops above which `check` raises; None is no limit.

    Attributes:
        total: drops so far, including those before a resume.

    Raises:
        ValueError: the limit is negative.
    """

    def __init__(self, owner: str, max_in_a_row: int | None) -> None:
        check_range(owner, "integer >= 0", max_in_a_row=max_in_a_row)
        self.owner, self.max_in_a_row = owner, max_in_a_row
        self.total = 0
        self._in_a_row: dict[int, int] = {}

    @property
    def num_in_a_row(self) -> int:
        """Consecutive drops, the maximum over optimizers."""
        return max(self._in_a_row.values(), default=0)

    def begin(self) -> None:
        """Resets the consecutive drops, at the start of a run."""
        self._in_a_row = {}

    def note(self, is_dropped: bool, index: int = 0) -> None:
        """Records one update of the optimizer at position `index`; called alike on all ranks."""
        self._in_a_row[index] = self._in_a_row.get(index, 0) + 1 if is_dropped else 0
        if is_dropped:
            self.total += 1
            _say(
                f"{self.owner}: the gradient contains NaN or infinity, so this update is dropped (number {self.total}, "
                f"{self.num_in_a_row} in a row, max_in_a_row={self.max_in_a_row}): weights and moments are unchanged"
            )

    def check(self) -> None:
        """Checks the number of consecutive drops, between two steps.

        Raises:
            NonFiniteError: it exceeds `max_in_a_row`.
        """
        if self.max_in_a_row is not None and self.num_in_a_row > self.max_in_a_row:
            raise NonFiniteError(
                f"{self.num_in_a_row} updates in a row had a gradient with NaN or infinity, more than {self.owner}."
                f"max_in_a_row={self.max_in_a_row}; the weights are those before them. Check model.learning_rate, the "
                "loss and the precision."
            )


@rank_zero_only
def _say(message: str) -> None:
    log.warning(message)
