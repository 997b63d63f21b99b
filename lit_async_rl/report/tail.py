"""Incremental reading of files that a running process appends to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


class Tail:
    """Complete lines of a file, each read once.

    A file that was replaced or cut (as a resume does) is read again from its beginning, and `generation` grows.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.generation = 0
        self._identity: tuple[int, int] | None = None
        self._offset = 0  # behind the last complete line
        self._seen = 0  # behind all bytes that were read

    def begin(self) -> bool:
        """Whether there is anything new; notices a file that was replaced. Called before `lines`."""
        try:
            found = self.path.stat()
        except OSError:
            return False
        identity = found.st_dev, found.st_ino
        if self._identity is not None and (identity != self._identity or found.st_size < self._offset):
            self._offset = 0
            self._seen = 0
            self.generation = self.generation + 1
        self._identity = identity
        return found.st_size > self._seen

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Offset and content of each new line; one that is not complete yet comes the next time."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                for line in file:
                    self._seen = self._offset + len(line)
                    if not line.endswith(b"\n"):
                        break
                    offset = self._offset
                    self._offset = self._offset + len(line)
                    yield offset, line
        except OSError:
            return
