"""Rollout tape: every group trained on, in atomically written Arrow files.

A folder of files `steps-<first>-<last>-<checksum>.arrow` (Arrow IPC, one row per rollout, see
`lit_async_rl.replay.tape_rows`), each written under a temporary name and renamed. The checksum in the name, 16
hexadecimal digits of the content's SHA-256, is verified on reading, and `manifest.jsonl` lists the files of the tape.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from lit_async_rl.errors import describe
from lit_async_rl.replay.manifest import TapeFile, add_to_manifest, tape_files, write_manifest
from lit_async_rl.replay.tape_rows import SCHEMA, from_rows, to_row
from lit_async_rl.types import RolloutGroup
from lit_async_rl.utils.files import check_writable, is_disk_full, replacing, tolerate_full_disk
from lit_async_rl.utils.folder_lock import FolderLock, remove_stale_parts
from lit_async_rl.utils.plain import plain

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TapeStep:
    """Groups of one optimizer step, and the policy's version at that step."""

    step: int
    version: int
    groups: tuple[RolloutGroup, ...]


class TapeWriter:
    """Appends steps to a tape.

    Nothing is lost when the disk is full: a warning is logged, and the rows stay in memory and are written with the
    next step. At the end `close` waits for space.

    Args:
        folder: created if missing.
        first_step: of the writing run, after a resume. Recorded steps from this one on are superseded: their files are
            renamed to `*.undone`, which readers ignore.
        waiting: unwritten rows of earlier steps (`waiting` of the interrupted run).

    Raises:
        ValueError: a file is damaged.
        OSError: the folder cannot be written to.
    """

    def __init__(self, folder: str | Path, first_step: int = 0, waiting: Sequence[dict[str, Any]] = ()) -> None:
        self.folder = Path(folder)
        check_writable(self.folder, "the tape's folder")
        self._rows: list[dict[str, Any]] = list(waiting)
        self._unlisted: list[TapeFile] = []  # written; the disk was full for the manifest
        self._lock = FolderLock(self.folder, "the tape's folder")
        try:
            remove_stale_parts(self.folder)
            self._undo(first_step)
        except BaseException:
            self._lock.release()
            raise

    def _undo(self, first_step: int) -> None:
        """Sets aside recorded steps from `first_step` on; takes effect with the new manifest."""
        files = tape_files(self.folder)
        undone = [file for file in files if file.last >= first_step]
        files = [file for file in files if file.last < first_step]
        for file in undone:
            if file.first < first_step:
                files += self._keep_before(first_step, file, files)
            file.path.replace(file.path.with_suffix(".undone"))
        if undone:
            log.warning("tape %s: %d files of step %d and later were set aside", self.folder, len(undone), first_step)
        with tolerate_full_disk(f"the manifest of tape {self.folder}"):
            write_manifest(self.folder, files)

    def _keep_before(self, first_step: int, undone: TapeFile, whole: Sequence[TapeFile]) -> list[TapeFile]:
        """Writes the steps of a file before `first_step` to a new file."""
        known = {n for file in whole for n in range(file.first, file.last + 1)} | {row["step"] for row in self._rows}
        rows = _read(undone, None).to_pylist()
        self._rows = [row for row in rows if row["step"] < first_step and row["step"] not in known] + self._rows
        return self._write()

    @property
    def waiting(self) -> list[dict[str, Any]]:
        """Rows not written to disk yet, as plain values."""
        return [plain(row) for row in self._rows]

    def append(self, step: int, version: int, groups: Sequence[RolloutGroup]) -> None:
        """Adds a step; `flush` writes it to disk."""
        known = dict(step=step, policy_version=version, written_at=time.time())
        self._rows += [known | to_row(group, sample) for group in groups for sample in range(len(group.rollouts))]

    def close(self, timeout_s: float) -> None:
        """Writes the remaining rows; retries while the disk is full.

        Raises:
            OSError: the disk is still full after `timeout_s`.
        """
        try:
            self._wait_for_room(timeout_s)
        finally:
            self.release()

    def release(self) -> None:
        """Releases the lock of the folder. Safe to call twice."""
        self._lock.release()

    def _wait_for_room(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        self.flush()
        while self._rows or self._unlisted:
            if time.monotonic() > deadline:
                missing = [n for file in self._unlisted for n in (file.first, file.last)]
                missing += [row["step"] for row in self._rows]
                steps = f"steps {missing[0]} to {missing[-1]} are not on the tape"
                problem = f"the disk was full for RolloutTape.full_disk_timeout_s={timeout_s:g}: {steps}"
                raise OSError(errno.ENOSPC, problem, str(self.folder))
            time.sleep(min(1.0, timeout_s))
            self.flush()

    def flush(self) -> None:
        """Writes the appended steps as one file, and lists it."""
        self._unlisted += self._write()
        with tolerate_full_disk(f"the manifest of tape {self.folder}"):
            while self._unlisted:
                add_to_manifest(self.folder, self._unlisted[0])
                del self._unlisted[0]

    def _write(self) -> list[TapeFile]:
        """The file that holds the appended steps; None if there are none, or the disk is full."""
        if not self._rows:
            return []
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, SCHEMA, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
            writer.write_table(pa.Table.from_pylist(self._rows, schema=SCHEMA))
        data = sink.getvalue().to_pybytes()
        first, last = self._rows[0]["step"], self._rows[-1]["step"]
        path = self.folder / f"steps-{first:09d}-{last:09d}-{_checksum(data)}.arrow"
        try:
            with replacing(path) as file:
                file.write(data)
        except OSError as error:
            if not is_disk_full(error):
                raise
            log.warning("tape %s: the disk is full; steps %d to %d wait in memory", self.folder, first, last)
            return []
        rows, self._rows = len(self._rows), []
        return [TapeFile(path, first, last, _checksum(data), rows)]


class Tape:
    """Reader of a tape.

    Args:
        folder: of a `TapeWriter`.

    Raises:
        FileNotFoundError: there is no tape.
        ValueError: files are missing, or hold the same steps.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._files = tape_files(self.folder)
        if not self._files:
            raise FileNotFoundError(f"{self.folder} holds no tape (no file steps-*.arrow)")

    @property
    def num_files(self) -> int:
        """Number of files of the tape."""
        return len(self._files)

    def table(self, first_step: int = 0, columns: Sequence[str] | None = None) -> pa.Table:
        """All rows from a step on, in order of steps.

        Raises:
            ValueError: a file is damaged.
        """
        empty = SCHEMA.empty_table() if columns is None else SCHEMA.empty_table().select(list(columns))
        tables = [_read(f, columns) for f in self._files if f.last >= first_step] or [empty]
        return pa.concat_tables(tables, promote_options="default")  # older files lack columns

    def steps(self, first_step: int = 0) -> Iterator[TapeStep]:
        """Iterates over the steps in order; holds one file at a time in memory.

        Raises:
            ValueError: a file is damaged.
        """
        for file in self._files:
            if file.last < first_step:
                continue
            yield from (step for step in _steps_of(file) if step.step >= first_step)

    def some_steps(self, most: int) -> Iterator[TapeStep]:
        """The first step of each of at most `most` files at equal distances, the last one among them."""
        parts = min(most, len(self._files))
        for number in sorted({round(n * (len(self._files) - 1) / max(1, parts - 1)) for n in range(parts)}):
            yield from _steps_of(self._files[number], only_first=True)


def _steps_of(file: TapeFile, only_first: bool = False) -> list[TapeStep]:
    table = _read(file, None)
    rows = (table.filter(pc.equal(table["step"], file.first)) if only_first else table).to_pylist()
    if len({(row["step"], row["group"], row["sample"]) for row in rows}) < len(rows):
        raise ValueError(f"{file.path} holds a rollout twice")
    if any(not file.first <= row["step"] <= file.last for row in rows):
        raise ValueError(f"{file.path} holds other steps than {file.first} to {file.last}")
    steps = []
    try:
        for step, of_step in itertools.groupby(rows, lambda row: row["step"]):
            grouped = [list(rows) for _, rows in itertools.groupby(of_step, lambda row: row["group"])]
            steps.append(TapeStep(step, grouped[0][0]["policy_version"], tuple(from_rows(rows) for rows in grouped)))
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{file.path} holds an invalid rollout: {describe(error)}") from error
    return steps


def _checksum(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _read(file: TapeFile, columns: Sequence[str] | None) -> pa.Table:
    data = file.path.read_bytes()
    if _checksum(data) != file.checksum:
        raise ValueError(
            f"{file.path} was damaged: its {len(data)} bytes do not have the checksum in its name. Restore it "
            f"from a copy, or move it away to go on without steps {file.first} to {file.last}"
        )
    try:
        table = pa.ipc.open_file(pa.BufferReader(data)).read_all()
        table.validate(full=True)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{file.path} is not a tape file: {error}") from error
    if missing := {"step", "group", "sample", "policy_version"} - set(table.column_names):
        raise ValueError(f"{file.path} is not a tape file: it has no column {min(missing)}")
    if file.rows is not None and table.num_rows != file.rows:
        raise ValueError(f"{file.path} holds {table.num_rows} rows, and the manifest says {file.rows}")
    return table if columns is None else table.select(list(columns))
