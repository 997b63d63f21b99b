"""Manifest of a rollout tape: its files and their numbers of rows.

`manifest.jsonl` has one line per file, appended after the file was renamed into place. A crash in between leaves a file
that directly follows the last one listed; readers include it. A resume first renames superseded files to `*.undone` and
then rewrites the manifest, so a listed file of which only the `*.undone` exists counts as superseded.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from lit_async_rl.utils.files import append, replacing

NAME = re.compile(r"steps-(\d+)-(\d+)-([0-9a-f]{16})\.arrow")
MANIFEST = "manifest.jsonl"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TapeFile:
    """A file of a tape.

    Attributes:
        path: of the file; `first` and `last`: its steps; `checksum`: of its content. All of them are in its name.
        rows: number of rows; None if no manifest lists it.
    """

    path: Path
    first: int
    last: int
    checksum: str
    rows: int | None = None


def tape_file(path: Path, rows: int | None = None) -> TapeFile | None:
    """Parses a file name; None if it is not a tape file."""
    match = NAME.fullmatch(path.name)
    return None if match is None else TapeFile(path, int(match[1]), int(match[2]), match[3], rows)


def tape_files(folder: Path) -> list[TapeFile]:
    """Files that belong to a tape, in order of steps.

    Raises:
        ValueError: a file is missing, does not belong to the tape, or overlaps with another.
    """
    there = [file for path in sorted(folder.glob("steps-*.arrow")) if (file := tape_file(path))]
    listed = _read_manifest(folder)
    if listed is None:
        _check_order(there)
        if there:
            log.warning(
                "%s has no %s (an earlier version wrote it): a missing file would go unnoticed", folder, MANIFEST
            )
        return there
    files = [file for file in listed if not _is_undone(file)]
    for file in files:
        if not file.path.is_file():
            raise ValueError(f"{file.path} is missing, which {MANIFEST} lists: the tape lacks steps {_steps(file)}")
    _check_order(files)
    names = {file.path.name for file in listed}
    for file in there:
        if file.path.name in names:
            continue
        if not files or file.first > files[-1].last:
            if files and file.first != files[-1].last + 1:
                raise ValueError(f"{file.path} is not in {MANIFEST}, and does not follow step {files[-1].last}")
            files.append(file)
        else:
            log.warning("%s is left out: %s does not list it, and its steps are in other files", file.path, MANIFEST)
    return files


def add_to_manifest(folder: Path, file: TapeFile) -> None:
    """Appends a file to the manifest.

    Raises:
        OSError: it cannot be written.
    """
    append(folder / MANIFEST, _line(file))


def write_manifest(folder: Path, files: Sequence[TapeFile]) -> None:
    """Rewrites the manifest with exactly these files."""
    with replacing(folder / MANIFEST) as manifest:
        manifest.write("".join(_line(file) for file in files).encode())


def _line(file: TapeFile) -> str:
    return json.dumps({"file": file.path.name, "rows": file.rows}) + "\n"


def _read_manifest(folder: Path) -> list[TapeFile] | None:
    path = folder / MANIFEST
    if not path.is_file():
        return None
    files = []
    lines = path.read_bytes().split(b"\n")  # what follows the last newline was cut off by a crash
    for number, line in enumerate(lines[:-1], start=1):
        try:
            entry = json.loads(line)
            file, rows = tape_file(folder / entry["file"]), entry["rows"]
        except (ValueError, KeyError, TypeError, RecursionError):
            file, rows = None, None
        if file is None or not (rows is None or isinstance(rows, int)) or file.path.parent != folder:
            raise ValueError(f"{path}, line {number} is damaged: {line[:80]!r}")
        files.append(TapeFile(file.path, file.first, file.last, file.checksum, rows))
    return sorted(files, key=lambda file: file.first)


def _check_order(files: Sequence[TapeFile]) -> None:
    for before, after in pairwise(files):
        if after.first <= before.last:
            raise ValueError(f"{after.path} holds steps {_steps(after)}, of which {before.path.name} has some, too")


def _is_undone(file: TapeFile) -> bool:
    return not file.path.is_file() and file.path.with_suffix(".undone").is_file()


def _steps(file: TapeFile) -> str:
    return f"{file.first} to {file.last}"
