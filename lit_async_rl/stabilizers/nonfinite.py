"""Updates that are left out because their gradient is no number, and when that is too often."""

from __future__ import annotations

import logging

from lightning.fabric.utilities.rank_zero import rank_zero_only

from lit_async_rl.errors import NonFiniteError

log = logging.getLogger(__name__)


class DroppedUpdates:
    """Counts; each drop is one line in the log.

    Args:
        owner: names the callback in messages.
        max_in_a_row: with more, `check` ends the run; None never does.

    Attributes:
        total: drops so far, over resumes.

    Raises:
        ValueError: the limit is negative.
    """

    def __init__(self, owner: str, max_in_a_row: int | None) -> None:
        if max_in_a_row is not None and max_in_a_row < 0:
            raise ValueError(f"{owner}.max_in_a_row must be >= 0, or null for no limit, got {max_in_a_row}")
        self.owner, self.max_in_a_row = owner, max_in_a_row
        self.total = 0
        self._in_a_row: dict[int, int] = {}

    @property
    def num_in_a_row(self) -> int:
        """Drops of one optimizer since its last good update; the most of all optimizers."""
        return max(self._in_a_row.values(), default=0)

    def begin(self) -> None:
        """A new run: drops in a row are counted from here."""
        self._in_a_row = {}

    def note(self, is_dropped: bool, index: int = 0) -> None:
        """One update by the optimizer at position `index`; the same on all ranks."""
        self._in_a_row[index] = self._in_a_row.get(index, 0) + 1 if is_dropped else 0
        if is_dropped:
            self.total += 1
            _say(
                f"{self.owner}: the gradient contains NaN or infinity, so this update is dropped (number {self.total}, "
                f"{self.num_in_a_row} in a row, max_in_a_row={self.max_in_a_row}): weights and moments stay"
            )

    def check(self) -> None:
        """Between two steps.

        Raises:
            NonFiniteError: too many in a row.
        """
        if self.max_in_a_row is not None and self.num_in_a_row > self.max_in_a_row:
            raise NonFiniteError(
                f"{self.num_in_a_row} updates in a row had a gradient with NaN or infinity, more than {self.owner}."
                f"max_in_a_row={self.max_in_a_row}; the weights are those before them. Look at model.learning_rate, "
                "the loss, and the precision."
            )


@rank_zero_only
def _say(message: str) -> None:
    log.warning(message)
