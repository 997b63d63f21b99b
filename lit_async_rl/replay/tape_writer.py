"""Writer of rollout tapes, whose format `lit_async_rl.replay.tape` describes."""

from __future__ import annotations

import errno
import json
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from lit_async_rl.replay.manifest import TapeFile, add_to_manifest, tape_files, write_manifest
from lit_async_rl.replay.tape import checksum, read_file
from lit_async_rl.replay.tape_rows import SCHEMA, to_row
from lit_async_rl.types import RolloutGroup
from lit_async_rl.utils.files import check_writable, is_disk_full, replacing, tolerate_full_disk
from lit_async_rl.utils.folder_lock import FolderLock, remove_stale_parts
from lit_async_rl.utils.plain import plain

log = logging.getLogger(__name__)


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
        rows = read_file(undone, None).to_pylist()
        self._rows = [row for row in rows if row["step"] < first_step and row["step"] not in known] + self._rows
        return self._write()

    @property
    def waiting(self) -> list[dict[str, Any]]:
        """Rows not written to disk yet, as plain values."""
        return [plain(row) for row in self._rows]

    def append(
        self,
        step: int,
        version: int,
        groups: Sequence[RolloutGroup],
        sampling: Mapping[str, float] | None = None,
    ) -> None:
        """Adds a step, see `TapeStep`; `flush` writes it to disk."""
        settings = None if sampling is None else json.dumps(dict(sampling))
        known = dict(step=step, policy_version=version, written_at=time.time(), sampling=settings)
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
        path = self.folder / f"steps-{first:09d}-{last:09d}-{checksum(data)}.arrow"
        try:
            with replacing(path) as file:
                file.write(data)
        except OSError as error:
            if not is_disk_full(error):
                raise
            log.warning("tape %s: the disk is full; steps %d to %d wait in memory", self.folder, first, last)
            return []
        rows, self._rows = len(self._rows), []
        return [TapeFile(path, first, last, checksum(data), rows)]
