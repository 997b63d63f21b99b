"""Order of the rows of an embedded engine: much longer ones come first, and attention reads few positions of others.

Completions of very different length are decoded together, and every row of a batched product has the length of the
longest. With the long rows in front there are two products: all positions of those, fewer of the others.
"""

from __future__ import annotations

from collections.abc import Sequence

WINDOW = 16  # decode steps until the rows are looked at again
_MIN_ROWS = 8  # below, a second product costs more than it saves
_MAX_SHARE = 0.6  # of the positions that one product reads, for two to be worth it


def split(lengths: Sequence[int], max_len: int) -> tuple[int, int]:
    """Number of rows to have in front, and how many positions the rows behind them have at most.

    Args:
        lengths: positions that each row will have read in the next `WINDOW` steps.
        max_len: positions of the rows in front.

    Returns:
        The split that reads the fewest positions in all; all rows and `max_len` if that hardly saves any.
    """
    num_rows = len(lengths)
    best, least = (num_rows, max_len), _MAX_SHARE * num_rows * max_len
    if num_rows < _MIN_ROWS:
        return best
    for num_short, length in enumerate(sorted(lengths), start=1):
        positions = (num_rows - num_short) * max_len + num_short * length
        if positions < least:
            best, least = (num_rows - num_short, length), positions
    return best


class RowOrder:
    """Brings rows that are much longer than most to the front, every `WINDOW` steps and when there are new ones.

    Rows that end, and rows from the end that take their slots, leave it in order.

    Args:
        is_of_use: whether attention can read fewer positions of some rows; otherwise nothing is moved.
    """

    def __init__(self, is_of_use: bool = True) -> None:
        self._is_of_use = is_of_use
        self._num_long = self._short_len = self._steps_left = 0

    def forget(self) -> None:
        """Has the rows looked at before the next step: there are new ones."""
        self._steps_left = 0

    @property
    def is_due(self) -> bool:
        """Whether to `sort` before the next step."""
        return self._is_of_use and self._steps_left == 0

    def sort(self, positions: Sequence[int], max_len: int) -> tuple[list[int], list[int]]:
        """Rows to move, and where to; `positions` of all rows, 0 of free ones."""
        self._steps_left = WINDOW
        lengths = [position + WINDOW for position in positions]
        self._num_long, self._short_len = split(lengths, max_len)
        down = [row for row in range(self._num_long, len(lengths)) if lengths[row] > self._short_len]
        up = [row for row in range(self._num_long) if lengths[row] <= self._short_len][: len(down)]
        return down + up, up + down

    def step(self, num_rows: int) -> tuple[int, int]:
        """Begins a step: how many rows are long, and how many positions the others have at most."""
        if not self._is_of_use:
            return num_rows, 0
        self._steps_left -= 1
        return min(self._num_long, num_rows), self._short_len
