"""Rollout tape: every group trained on, in atomically written Arrow files.

A folder of files `steps-<first>-<last>-<checksum>.arrow` (Arrow IPC, one row per rollout, see
`lit_async_rl.replay.tape_rows`), each written under a temporary name and renamed. The checksum in the name, 16
hexadecimal digits of the content's SHA-256, is verified on reading, and `manifest.jsonl` lists the files of the tape.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from lit_async_rl.errors import describe
from lit_async_rl.replay.manifest import TapeFile, tape_files
from lit_async_rl.replay.tape_rows import SCHEMA, from_rows
from lit_async_rl.types import RolloutGroup


@dataclass(frozen=True)
class TapeStep:
    """Groups of one optimizer step, and the policy's version at that step.

    `sampling` has the settings that their log-probabilities depend on; None on tapes that do not say.
    """

    step: int
    version: int
    groups: tuple[RolloutGroup, ...]
    sampling: Mapping[str, float] | None = None


class Tape:
    """Reader of a tape.

    Args:
        folder: of a `TapeWriter`.
        sampling: settings that the log-probabilities of its steps must be of; None reads any.

    Raises:
        FileNotFoundError: there is no tape.
        ValueError: files are missing, or hold the same steps.
    """

    def __init__(self, folder: str | Path, sampling: Mapping[str, float] | None = None) -> None:
        self.folder, self._sampling = Path(folder), sampling
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
        tables = [read_file(f, columns) for f in self._files if f.last >= first_step] or [empty]
        return pa.concat_tables(tables, promote_options="default")  # older files lack columns

    def steps(self, first_step: int = 0) -> Iterator[TapeStep]:
        """Iterates over the steps in order; holds one file at a time in memory.

        Raises:
            ValueError: a file is damaged, or a step was sampled with other settings than `sampling`.
        """
        for file in self._files:
            if file.last < first_step:
                continue
            yield from (self._checked(step) for step in _steps_of(file) if step.step >= first_step)

    def some_steps(self, most: int) -> Iterator[TapeStep]:
        """The first step of each of at most `most` files at equal distances, the last one among them."""
        parts = min(most, len(self._files))
        for number in sorted({round(n * (len(self._files) - 1) / max(1, parts - 1)) for n in range(parts)}):
            yield from map(self._checked, _steps_of(self._files[number], only_first=True))

    def _checked(self, step: TapeStep) -> TapeStep:
        for name, value in (self._sampling or {}).items():
            if step.sampling is not None and step.sampling.get(name) != value:
                recorded = step.sampling.get(name)
                raise ValueError(
                    f"data.sampling.{name}={value} with tape {self.folder}: its step {step.step} was sampled with "
                    f"{name}={recorded}, and log-probabilities cannot be compared. Use data.sampling.{name}={recorded}"
                )
        return step


def _steps_of(file: TapeFile, only_first: bool = False) -> list[TapeStep]:
    table = read_file(file, None)
    rows = (table.filter(pc.equal(table["step"], file.first)) if only_first else table).to_pylist()
    if len({(row["step"], row["group"], row["sample"]) for row in rows}) < len(rows):
        raise ValueError(f"{file.path} holds a rollout twice")
    if any(not file.first <= row["step"] <= file.last for row in rows):
        raise ValueError(f"{file.path} holds other steps than {file.first} to {file.last}")
    steps = []
    try:
        for step, of_step in itertools.groupby(rows, lambda row: row["step"]):
            grouped = [list(rows) for _, rows in itertools.groupby(of_step, lambda row: row["group"])]
            head = grouped[0][0]
            sampling = head.get("sampling")  # older tapes have no such column
            settings = None if sampling is None else {str(k): float(v) for k, v in json.loads(sampling).items()}
            steps.append(TapeStep(step, head["policy_version"], tuple(map(from_rows, grouped)), settings))
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{file.path} holds an invalid rollout: {describe(error)}") from error
    return steps


def checksum(data: bytes) -> str:
    """The part of a file's name that its content determines."""
    return hashlib.sha256(data).hexdigest()[:16]


def read_file(file: TapeFile, columns: Sequence[str] | None) -> pa.Table:
    """Rows of one file.

    Raises:
        ValueError: it is damaged, or no file of a tape.
    """
    data = file.path.read_bytes()
    if checksum(data) != file.checksum:
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
