"""The rollout tape: every group that was trained on, in Arrow files that are whole or not there at all.

A folder of files `steps-<first>-<last>-<checksum>.arrow` (Arrow IPC, one row for each rollout, columns in `SCHEMA`),
each written beside its name and renamed. The checksum in the name, 16 hexadecimal digits of the content's SHA-256, is
compared before a file is read. `docs/checkpoints.md` describes the columns.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import logging
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from lit_async_rl.checkpoint_io import check_writable, is_disk_full, sync_folder
from lit_async_rl.types import Prompt, Rollout, RolloutGroup, Turn

log = logging.getLogger(__name__)
SCHEMA = pa.schema(
    [
        ("step", pa.int64()),  # optimizer step that was trained on it, from 0
        ("policy_version", pa.int64()),  # of the policy in that step
        ("group", pa.int64()),
        ("sample", pa.int32()),
        ("admitted_version", pa.int64()),
        ("prompt", pa.string()),
        ("answer", pa.string()),
        ("metadata", pa.string()),  # JSON
        ("prompt_ids", pa.list_(pa.int32())),
        ("completion_ids", pa.list_(pa.int32())),
        ("behavior_logprobs", pa.list_(pa.float32())),
        ("versions", pa.list_(pa.int64())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("finish_reason", pa.string()),
        ("text", pa.string()),
        ("reward", pa.float64()),
        ("generation_s", pa.float64()),
        ("queue_s", pa.float64()),
        ("turns", pa.list_(pa.struct([("end", pa.int32()), ("reward", pa.float64()), ("state", pa.int64())]))),
        ("written_at", pa.float64()),  # seconds since 1970
    ]
)
NAME = re.compile(r"steps-(\d+)-(\d+)-([0-9a-f]{16})\.arrow")


@dataclass(frozen=True)
class TapeStep:
    """What one optimizer step was trained on, and the version of the policy then."""

    step: int
    version: int
    groups: tuple[RolloutGroup, ...]


class TapeWriter:
    """Appends steps to a tape.

    When the disk is full nothing is lost: one line says so, the rows stay in memory and are written with the next step.
    At the end `close` waits for room.

    Args:
        folder: made if it is not there.
        first_step: of the run that writes, after a resume. What the tape holds of this step and later ones was undone
            by the interruption: it is renamed to `*.undone`, which no reader looks at.

        waiting: rows of earlier steps that are not on the disk yet (`waiting` of the run before).

    Raises:
        ValueError: a file was damaged.
        OSError: the folder cannot be written to.
    """

    def __init__(self, folder: str | Path, first_step: int = 0, waiting: Sequence[dict[str, Any]] = ()) -> None:
        self.folder = Path(folder)
        check_writable(self.folder, "the tape's folder")
        self._rows: list[dict[str, Any]] = list(waiting)
        for file in _files(self.folder):
            if file.last >= first_step:
                if file.first < first_step:
                    self._keep_before(first_step, file)
                file.path.replace(file.path.with_suffix(".undone"))

    def _keep_before(self, first_step: int, undone: _File) -> None:
        """Writes a file's steps before `first_step` to one of their own."""
        whole = {n for f in _files(self.folder) if f.last < first_step for n in range(f.first, f.last + 1)}
        known = whole | {row["step"] for row in self._rows}
        rows = _read(undone, None).to_pylist()
        self._rows = [row for row in rows if row["step"] < first_step and row["step"] not in known] + self._rows
        self.flush()

    @property
    def waiting(self) -> list[dict[str, Any]]:
        """Rows that are not on the disk yet; plain values."""
        return list(self._rows)

    def append(self, step: int, version: int, groups: Sequence[RolloutGroup]) -> None:
        """Adds a step; it is on the disk after `flush`."""
        known = dict(step=step, policy_version=version, written_at=time.time())
        self._rows += [known | _row(group, sample) for group in groups for sample in range(len(group.rollouts))]

    def close(self, timeout_s: float) -> None:
        """Writes the rest, and tries again and again while the disk is full.

        Raises:
            OSError: it is still full after `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        self.flush()
        while self._rows:
            if time.monotonic() > deadline:
                steps = f"steps {self._rows[0]['step']} to {self._rows[-1]['step']} are not on the tape"
                problem = f"the disk was full for RolloutTape.full_disk_timeout_s={timeout_s:g}: {steps}"
                raise OSError(errno.ENOSPC, problem, str(self.folder))
            time.sleep(min(1.0, timeout_s))
            self.flush()

    def flush(self) -> None:
        """Writes what was appended, as one file."""
        if not self._rows:
            return
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, SCHEMA, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
            writer.write_table(pa.Table.from_pylist(self._rows, schema=SCHEMA))
        data = sink.getvalue().to_pybytes()
        first, last = self._rows[0]["step"], self._rows[-1]["step"]
        part = self.folder / f".{os.getpid()}.part"
        try:
            with part.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            part.replace(self.folder / f"steps-{first:09d}-{last:09d}-{_checksum(data)}.arrow")
            sync_folder(self.folder)
        except OSError as error:
            part.unlink(missing_ok=True)
            if not is_disk_full(error):
                raise
            log.warning("tape %s: the disk is full; steps %d to %d wait in memory", self.folder, first, last)
            return
        self._rows = []


class Tape:
    """Reads a tape.

    Args:
        folder: of a `TapeWriter`.

    Raises:
        FileNotFoundError: there is no tape.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._files = _files(self.folder)
        if not self._files:
            raise FileNotFoundError(f"{self.folder} holds no tape (no file steps-*.arrow)")

    @property
    def num_files(self) -> int:
        """Files of the tape."""
        return len(self._files)

    def table(self, first_step: int = 0, columns: Sequence[str] | None = None) -> pa.Table:
        """All rows from a step on, in the order of steps.

        Raises:
            ValueError: a file was damaged.
        """
        return pa.concat_tables([_read(f, columns) for f in self._files if f.last >= first_step] or [_empty(columns)])

    def steps(self, first_step: int = 0) -> Iterator[TapeStep]:
        """Steps in order; one file at a time is in memory.

        Raises:
            ValueError: a file was damaged.
        """
        for file in self._files:
            if file.last < first_step:
                continue
            rows = _read(file, None).to_pylist()
            for step, of_step in itertools.groupby(rows, lambda row: row["step"]):
                if step < first_step:
                    continue
                grouped = [list(rows) for _, rows in itertools.groupby(of_step, lambda row: row["group"])]
                yield TapeStep(step, grouped[0][0]["policy_version"], tuple(_group(rows) for rows in grouped))


@dataclass(frozen=True)
class _File:
    path: Path
    first: int
    last: int
    checksum: str


def _files(folder: Path) -> list[_File]:
    names = [(path, NAME.fullmatch(path.name)) for path in sorted(folder.glob("steps-*.arrow"))]
    return [_File(path, int(match[1]), int(match[2]), match[3]) for path, match in names if match]


def _checksum(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _read(file: _File, columns: Sequence[str] | None) -> pa.Table:
    data = file.path.read_bytes()
    if _checksum(data) != file.checksum:
        raise ValueError(
            f"{file.path} was damaged: its {len(data)} bytes do not have the checksum in its name. Restore it "
            f"from a copy, or move it away to go on without steps {file.first} to {file.last}"
        )
    table = pa.ipc.open_file(pa.BufferReader(data)).read_all()
    return table if columns is None else table.select(list(columns))


def _empty(columns: Sequence[str] | None) -> pa.Table:
    table = SCHEMA.empty_table()
    return table if columns is None else table.select(list(columns))


def _row(group: RolloutGroup, sample: int) -> dict[str, Any]:
    rollout = group.rollouts[sample]
    return {
        "group": group.index,
        "sample": sample,
        "admitted_version": group.admitted_version,
        "prompt": group.prompt.text,
        "answer": group.prompt.answer,
        "metadata": json.dumps(dict(group.prompt.metadata), default=str),
        "prompt_ids": group.prompt_ids,
        "completion_ids": rollout.completion_ids,
        "behavior_logprobs": rollout.behavior_logprobs,
        "versions": rollout.versions,
        "loss_mask": rollout.loss_mask,
        "finish_reason": rollout.finish_reason,
        "text": rollout.text,
        "reward": rollout.reward,
        "generation_s": group.generation_s,
        "queue_s": group.queue_s,
        "turns": None if rollout.turns is None else [vars(turn) for turn in rollout.turns],
    }


def _group(rows: Sequence[dict[str, Any]]) -> RolloutGroup:
    head = rows[0]
    return RolloutGroup(
        index=head["group"],
        prompt=Prompt(text=head["prompt"], answer=head["answer"], metadata=json.loads(head["metadata"])),
        prompt_ids=tuple(head["prompt_ids"]),
        rollouts=tuple(
            Rollout(
                completion_ids=tuple(row["completion_ids"]),
                behavior_logprobs=tuple(row["behavior_logprobs"]),
                versions=tuple(row["versions"]),
                finish_reason=row["finish_reason"],
                text=row["text"],
                reward=row["reward"],
                loss_mask=None if row["loss_mask"] is None else tuple(row["loss_mask"]),
                turns=_turns(row.get("turns")),  # tapes written before there were turns have no such column
            )
            for row in rows
        ),
        admitted_version=head["admitted_version"],
        generation_s=head["generation_s"],
        queue_s=head["queue_s"],
    )


def _turns(rows: list[dict[str, Any]] | None) -> tuple[Turn, ...] | None:
    return None if rows is None else tuple(Turn(**row) for row in rows)
