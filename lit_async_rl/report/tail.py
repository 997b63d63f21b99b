"""Incremental reading of files that a running process appends to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path


class Tail:
    """Complete lines of a growing file, each read once.

    A file that was replaced or truncated (as in a resume) is read anew.

    Attributes:
        path: of the file.
        was_replaced: whether it was, since the last `refresh`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.was_replaced = False
        self._identity: tuple[int, int] | None = None
        self._offset = 0  # end of the last complete line
        self._read_until = 0  # end of the bytes read, including an incomplete line

    def refresh(self, clear: Callable[[], object], add: Callable[[int, bytes], object]) -> bool:
        """Reads the new lines; returns whether there were new bytes.

        Args:
            clear: called before the lines of a replaced file, to forget earlier ones.
            add: called with the offset and content of each new complete line.
        """
        if not self.begin():
            return False
        if self.was_replaced:
            self.was_replaced = False
            clear()
        for offset, line in self.lines():
            add(offset, line)
        return True

    def begin(self) -> bool:
        """Whether there are new bytes; detects a replaced file. Call it before `lines`."""
        try:
            status = self.path.stat()
        except OSError:
            return False
        identity = status.st_dev, status.st_ino
        if self._identity is not None and (identity != self._identity or status.st_size < self._offset):
            self._offset = 0
            self._read_until = 0
            self.was_replaced = True
        self._identity = identity
        return status.st_size > self._read_until

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Offset and content of each new complete line; an incomplete last one is read next time."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                for line in file:
                    self._read_until = self._offset + len(line)
                    if not line.endswith(b"\n"):
                        break
                    offset = self._offset
                    self._offset = self._offset + len(line)
                    yield offset, line
        except OSError:
            return
