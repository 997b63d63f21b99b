"""Rollout tape: every group trained on, in atomically written Arrow files.

A folder of files `steps-<first>-<last>-<checksum>.arrow` (Arrow IPC, one row per rollout), each written under a
temporary name and renamed. The checksum in the name, 16 hexadecimal digits of the content's SHA-256, is verified on
reading, and `manifest.jsonl` lists the files.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import logging
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import torch

from lit_async_rl.errors import describe
from lit_async_rl.problem import Prompt
from lit_async_rl.runtime.files import (
    FolderLock,
    append,
    check_writable,
    is_disk_full,
    remove_stale_parts,
    replacing,
    tolerate_full_disk,
)
from lit_async_rl.sampler_records import ExpertChoices, SamplerHead
from lit_async_rl.types import Branch, Rollout, RolloutGroup, TokenRow, Turn
from lit_async_rl.utils.checks import check_range
from lit_async_rl.utils.plain import plain

# -- Manifest of a rollout tape: its files and their numbers of rows --------------------------------------------------
# `manifest.jsonl` has one line per file, appended after the file was renamed into place. A crash in between leaves a
# file that directly follows the last one listed; readers include it. A resume first renames superseded files to
# `*.undone` and then rewrites the manifest, so a listed file counts as superseded if only its `*.undone` exists.


NAME = re.compile(r"steps-(\d+)-(\d+)-([0-9a-f]{16})\.arrow")
MANIFEST = "manifest.jsonl"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TapeFile:
    """A file of a tape.

    Attributes:
        path: its name contains the following three.
        first: first step.
        last: last step.
        checksum: of its content, see `checksum`.
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
    return None if match is None else TapeFile(path, int(match[1]), int(match[2]), checksum=match[3], rows=rows)


def tape_files(folder: Path) -> list[TapeFile]:
    """Files that belong to a tape, in order of steps.

    Raises:
        ValueError: a file is missing, does not belong to the tape, or overlaps another.
    """
    there = [file for path in sorted(folder.glob("steps-*.arrow")) if (file := tape_file(path))]
    listed = _read_manifest(folder)
    if listed is None:
        _check_order(there)
        if there:
            log.warning(
                "the tape %s has no %s, so a missing file cannot be detected: an earlier version of lit-async-rl wrote "
                "this tape",
                folder,
                MANIFEST,
            )
        return there
    files = [file for file in listed if not _is_set_aside(file)]
    for file in files:
        if not file.path.is_file():
            raise ValueError(f"{file.path}, listed in {MANIFEST}, is missing: the tape lacks steps {_steps(file)}")
    _check_order(files)
    names = {file.path.name for file in listed}
    for file in there:
        if file.path.name in names:
            continue
        if not files or file.first > files[-1].last:
            if files and file.first != files[-1].last + 1:
                raise ValueError(
                    f"the file {file.path} does not belong to the tape: {MANIFEST} does not list it, and its steps do "
                    f"not directly follow the tape's step {files[-1].last}"
                )
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
    lines = path.read_bytes().split(b"\n")  # a last line without newline was cut off by a crash
    for number, line in enumerate(lines[:-1], start=1):
        try:
            entry = json.loads(line)
            file = tape_file(folder / entry["file"], entry["rows"])
        except (ValueError, KeyError, TypeError, RecursionError):
            file = None
        if file is None or not isinstance(file.rows, int | None) or file.path.parent != folder:
            raise ValueError(f"{path}, line {number} is damaged: {line[:80]!r}")
        files.append(file)
    return sorted(files, key=lambda file: file.first)


def _check_order(files: Sequence[TapeFile]) -> None:
    for before, after in pairwise(files):
        if after.first <= before.last:
            raise ValueError(
                f"{after.path} holds steps {_steps(after)}, but {before.path.name} also holds some of these steps"
            )


def _is_set_aside(file: TapeFile) -> bool:
    return not file.path.is_file() and file.path.with_suffix(".undone").is_file()


def _steps(file: TapeFile) -> str:
    return f"{file.first} to {file.last}"


# -- Arrow schema of the rollout tape, one row per rollout ------------------------------------------------------------
# `docs/checkpoints.md` describes the columns.


TURNS = pa.list_(
    pa.struct([("end", pa.int32()), ("reward", pa.float64()), ("state", pa.int64()), ("call", pa.int32())])
)
BRANCH = [
    ("prompt_ids", pa.list_(pa.int32())),
    ("completion_ids", pa.list_(pa.int32())),
    ("behavior_logprobs", pa.list_(pa.float32())),
    ("versions", pa.list_(pa.int64())),
    ("loss_mask", pa.list_(pa.bool_())),
    ("credit", pa.float64()),
    ("head_width", pa.int32()),
    ("head_entropy", pa.list_(pa.float32())),
    ("head_ids", pa.list_(pa.int32())),
    ("head_logprobs", pa.list_(pa.float32())),
    ("expert_shape", pa.list_(pa.int32())),
    ("experts", pa.list_(pa.int16())),
    ("turns", TURNS),  # older tapes have none of branches
]
SCHEMA = pa.schema(
    [
        ("step", pa.int64()),  # optimizer step that was trained on it, from 0
        ("policy_version", pa.int64()),  # version of the policy in that step
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
        ("turns", TURNS),
        ("written_at", pa.float64()),  # seconds since 1970
        ("head_width", pa.int32()),  # entries per token of the recorded distributions, null if there are none
        ("head_entropy", pa.list_(pa.float32())),
        ("head_ids", pa.list_(pa.int32())),  # of all tokens, one after the other
        ("head_logprobs", pa.list_(pa.float32())),
        ("expert_shape", pa.list_(pa.int32())),  # (routers, experts per token) of recorded experts, null without
        ("experts", pa.list_(pa.int16())),  # of all tokens of prompt and completion but the last, one after the other
        ("messages", pa.string()),  # JSON, for chat prompts; `prompt` is then their readable form
        ("sampling", pa.string()),  # JSON: settings that the log-probabilities depend on
        ("reward_parts", pa.string()),  # JSON: part -> reward, null of rewards without parts
        ("own_prompt_ids", pa.list_(pa.int32())),  # what the completion follows, null if that is `prompt_ids`
        ("credit", pa.float64()),  # factor of the advantage in the rollout's own row
        ("branches", pa.list_(pa.struct(BRANCH))),  # further rows of the rollout, null without any
        ("arrived", pa.list_(pa.float64())),  # `TapeStep.arrived`, in the first row of a step; null without
    ]
)


def to_row(group: RolloutGroup, sample: int) -> dict[str, Any]:
    """Columns of one rollout without those of its step."""
    rollout = group.rollouts[sample]
    return {
        "group": group.index,
        "sample": sample,
        "admitted_version": group.admitted_version,
        "prompt": group.prompt.text,
        "messages": None if group.prompt.messages is None else json.dumps(group.prompt.messages),
        "answer": group.prompt.answer,
        "metadata": json.dumps(dict(group.prompt.metadata), default=str),
        "prompt_ids": group.prompt_ids,
        "finish_reason": rollout.finish_reason,
        "text": rollout.text,
        "reward": rollout.reward,
        "reward_parts": None if rollout.reward_parts is None else json.dumps(dict(rollout.reward_parts)),
        "generation_s": group.generation_s,
        "queue_s": group.queue_s,
        **_token_columns(rollout),
        "own_prompt_ids": rollout.prompt_ids,
        "credit": None if rollout.credit == 1 else rollout.credit,  # empty for all that are no agents
        "branches": [_branch_columns(branch) for branch in rollout.branches] or None,
    }


def _branch_columns(branch: Branch) -> dict[str, Any]:
    return {"prompt_ids": branch.prompt_ids, "credit": branch.credit, **_token_columns(branch)}


def _branch(row: dict[str, Any]) -> Branch:
    return Branch(
        prompt_ids=tuple(row["prompt_ids"]),
        loss_mask=tuple(row["loss_mask"]),
        credit=row["credit"],
        **_token_fields(row),
    )


def from_rows(rows: Sequence[dict[str, Any]]) -> RolloutGroup:
    """The group with these rollouts, one row each."""
    head = rows[0]
    return RolloutGroup(
        index=head["group"],
        prompt=_prompt(head),
        prompt_ids=tuple(head["prompt_ids"]),
        rollouts=tuple(
            Rollout(
                request_id=row["group"],
                sample_index=row["sample"],
                finish_reason=row["finish_reason"],
                text=row["text"],
                reward=row["reward"],
                reward_parts=json.loads(parts) if (parts := row.get("reward_parts")) is not None else None,
                loss_mask=None if row["loss_mask"] is None else tuple(row["loss_mask"]),
                prompt_ids=None if (own := row.get("own_prompt_ids")) is None else tuple(own),
                credit=1.0 if (credit := row.get("credit")) is None else credit,
                branches=tuple(map(_branch, row.get("branches") or ())),
                **_token_fields(row),
            )
            for row in rows
        ),
        admitted_version=head["admitted_version"],
        generation_s=head["generation_s"],
        queue_s=head["queue_s"],
    )


def _token_columns(row: TokenRow) -> dict[str, Any]:
    """Columns of a row of tokens and of what was recorded of them."""
    return {
        "completion_ids": row.token_ids,
        "behavior_logprobs": row.logprobs,
        "versions": row.versions,
        "loss_mask": row.loss_mask,
        "turns": None if row.turns is None else [vars(turn) for turn in row.turns],
        "expert_shape": None if row.experts is None else row.experts.shape,
        "experts": None if row.experts is None else row.experts.experts.flatten().numpy(),
        **_head_columns(row.head),
    }


def _token_fields(row: dict[str, Any]) -> dict[str, Any]:
    """Inverse of `_token_columns`, but for the mask, which only branches must have."""
    turns = row.get("turns")  # older tapes have no such column
    return {
        "token_ids": tuple(row["completion_ids"]),
        "logprobs": tuple(row["behavior_logprobs"]),
        "versions": tuple(row["versions"]),
        "turns": None if turns is None else tuple(Turn(**turn) for turn in turns),
        "head": _head(row),
        "experts": _experts(row),
    }


def _head_columns(head: SamplerHead | None) -> dict[str, Any]:
    if head is None:
        return {"head_width": None, "head_entropy": None, "head_ids": None, "head_logprobs": None}
    entropy, ids, logprobs = (values.flatten().numpy() for values in head.tensors)
    return {"head_width": head.width, "head_entropy": entropy, "head_ids": ids, "head_logprobs": logprobs}


def _head(row: dict[str, Any]) -> SamplerHead | None:
    width = row.get("head_width")
    if width is None:
        return None
    length = len(row["head_entropy"])
    return SamplerHead(
        torch.tensor(row["head_entropy"], dtype=torch.float32),
        torch.tensor(row["head_ids"], dtype=torch.int32).reshape(length, width),
        torch.tensor(row["head_logprobs"], dtype=torch.float32).reshape(length, width),
    )


def _experts(row: dict[str, Any]) -> ExpertChoices | None:
    shape = row.get("expert_shape")  # older tapes have no such column
    if shape is None:
        return None
    return ExpertChoices(torch.tensor(row["experts"], dtype=torch.int16).reshape(-1, *shape))


def _prompt(row: dict[str, Any]) -> Prompt:
    messages = row.get("messages")  # older tapes have no such column
    metadata = json.loads(row["metadata"])
    if messages is None:
        return Prompt(text=row["prompt"], answer=row["answer"], metadata=metadata)
    return Prompt(messages=json.loads(messages), answer=row["answer"], metadata=metadata)


@dataclass(frozen=True)
class TapeStep:
    """Groups of one optimizer step.

    Attributes:
        step: number of the optimizer step, from 0.
        version: of the policy in that step.
        groups: trained on.
        sampling: settings that the log-probabilities depend on; None on tapes without them.
        arrived: what `RolloutDataModule.take_rewards` returned in the step; None if nobody asked.
    """

    step: int
    version: int
    groups: tuple[RolloutGroup, ...]
    sampling: Mapping[str, float] | None = None
    arrived: Sequence[float] | None = None

    @property
    def staleness(self) -> int:
        """Age of the oldest token in versions; 0 without tokens."""
        return max(map(self.staleness_of, self.groups), default=0)

    def staleness_of(self, group: RolloutGroup) -> int:
        """Age of the oldest token of one of its groups."""
        return self.version - min((v for one in group.rollouts for v in one.all_versions), default=self.version)


class Tape:
    """Reader of a tape.

    Args:
        folder: written by a `TapeWriter`.
        sampling: sampling settings that the recorded log-probabilities must have; None accepts any.
        max_staleness: age in versions; the first step with older tokens is reported. None reports none.

    Raises:
        FileNotFoundError: there is no tape.
        ValueError: files are missing, or contain the same steps; or `max_staleness` is out of range.
    """

    def __init__(
        self, folder: str | Path, sampling: Mapping[str, float] | None = None, max_staleness: int | None = None
    ) -> None:
        check_range("Tape", "integer >= 0", max_staleness=max_staleness)
        self.folder = Path(folder)
        self._sampling = sampling
        self._max_staleness = max_staleness
        self._files = tape_files(self.folder)
        if not self._files:
            raise FileNotFoundError(f"{self.folder} holds no tape (no file steps-*.arrow)")

    @property
    def num_files(self) -> int:
        """Number of files of the tape."""
        return len(self._files)

    def steps(self, first_step: int = 0) -> Iterator[TapeStep]:
        """Iterates over the steps in order, with one file at a time in memory.

        Raises:
            ValueError: a file is damaged, or a step was sampled with other settings than `sampling`.
        """
        for file in self._files:
            if file.last < first_step:
                continue
            yield from (self._checked(step) for step in _steps_of(file) if step.step >= first_step)

    def evenly_spaced_steps(self, max_steps: int) -> Iterator[TapeStep]:
        """The first step of each of at most `max_steps` evenly spaced files, the last file among them."""
        parts = min(max_steps, len(self._files))
        for number in sorted({round(n * (len(self._files) - 1) / max(1, parts - 1)) for n in range(parts)}):
            yield from map(self._checked, _steps_of(self._files[number], only_first=True))

    def _checked(self, step: TapeStep) -> TapeStep:
        for name, value in (self._sampling or {}).items():
            if step.sampling is not None and step.sampling.get(name) != value:
                recorded = step.sampling.get(name)
                raise ValueError(
                    f"data.sampling.{name}={value} does not match tape {self.folder}: step {step.step} was sampled "
                    f"with {name}={recorded}, so the recorded log-probabilities cannot be compared with the "
                    f"policy's. Use data.sampling.{name}={recorded}"
                )
        if self._max_staleness is not None and step.staleness > self._max_staleness:
            log.warning(
                "data.max_staleness=%d is not the bound of tape %s: its step %d was trained on tokens %d versions old, "
                "as this run will be",
                self._max_staleness,
                self.folder,
                step.step,
                step.staleness,
            )
            self._max_staleness = None  # once
        return step


def _steps_of(file: TapeFile, only_first: bool = False) -> list[TapeStep]:
    table = read_file(file)
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
            groups = tuple(map(from_rows, grouped))
            arrived = head.get("arrived")  # older tapes have no such column
            steps.append(TapeStep(step, head["policy_version"], groups, sampling=settings, arrived=arrived))
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{file.path} holds an invalid rollout: {describe(error)}") from error
    return steps


def checksum(data: bytes) -> str:
    """Checksum of a file's content, as in its name: 16 hexadecimal digits of the SHA-256."""
    return hashlib.sha256(data).hexdigest()[:16]


def read_file(file: TapeFile) -> pa.Table:
    """Rows of one file.

    Raises:
        ValueError: it is damaged, or not a tape file.
    """
    data = file.path.read_bytes()
    if checksum(data) != file.checksum:
        raise ValueError(
            f"{file.path} was damaged: its {len(data)} bytes do not match the checksum in its name. Restore it from a "
            f"copy, or move it away to continue without steps {file.first} to {file.last}"
        )
    try:
        table = pa.ipc.open_file(pa.BufferReader(data)).read_all()
        table.validate(full=True)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{file.path} is not a tape file: {error}") from error
    if missing := {"step", "group", "sample", "policy_version"} - set(table.column_names):
        raise ValueError(f"{file.path} is not a tape file: it has no column {min(missing)}")
    if file.rows is not None and table.num_rows != file.rows:
        raise ValueError(f"{file.path} holds {table.num_rows} rows, but the manifest lists {file.rows}")
    return table


# -- Writer ------------------------------------------------------------------------------------------------------------


class TapeWriter:
    """Appends steps to a tape.

    Nothing is lost on a full disk: it logs a warning, and keeps the rows in memory, to be written with the next step.
    At the end `close` waits for space.

    Args:
        folder: of the tape, created if missing.
        first_step: of the writing run, after a resume. Recorded steps from it on are superseded: their files are
            renamed to `*.undone`, which readers ignore.
        unwritten_rows: those of the interrupted run.

    Raises:
        ValueError: a file is damaged.
        OSError: the folder cannot be written to.
    """

    def __init__(self, folder: str | Path, first_step: int = 0, unwritten_rows: Sequence[dict[str, Any]] = ()) -> None:
        self.folder = Path(folder)
        check_writable(self.folder, "the tape's folder")
        self._rows: list[dict[str, Any]] = list(unwritten_rows)
        self._unlisted: list[TapeFile] = []  # written files that a full disk kept from being listed
        self._lock = FolderLock(self.folder, "the tape's folder")
        try:
            remove_stale_parts(self.folder)
            self._set_aside_from(first_step)
        except BaseException:
            self._lock.release()
            raise

    def _set_aside_from(self, first_step: int) -> None:
        """Renames the files of steps from `first_step` on, and rewrites the manifest without them."""
        files = tape_files(self.folder)
        undone = [file for file in files if file.last >= first_step]
        files = [file for file in files if file.last < first_step]
        for file in undone:
            if file.first < first_step:
                files += self._keep_before(first_step, file, files)
            file.path.replace(file.path.with_suffix(".undone"))
        if undone:
            log.warning(
                "tape %s: %d files of step %d and later were renamed to *.undone", self.folder, len(undone), first_step
            )
        with tolerate_full_disk(f"the manifest of tape {self.folder}"):
            write_manifest(self.folder, files)

    def _keep_before(self, first_step: int, undone: TapeFile, whole: Sequence[TapeFile]) -> list[TapeFile]:
        """Writes the steps of a file before `first_step` to a new file."""
        known = {n for file in whole for n in range(file.first, file.last + 1)} | {row["step"] for row in self._rows}
        rows = read_file(undone).to_pylist()
        self._rows = [row for row in rows if row["step"] < first_step and row["step"] not in known] + self._rows
        return self._write()

    @property
    def unwritten_rows(self) -> list[dict[str, Any]]:
        """Rows not written to disk yet, as plain values."""
        return [plain(row) for row in self._rows]

    def append(
        self,
        step: int,
        version: int,
        groups: Sequence[RolloutGroup],
        sampling: Mapping[str, float] | None = None,
        arrived: Sequence[float] | None = None,
    ) -> None:
        """Adds a step, see `TapeStep`; `flush` writes it to disk."""
        settings = None if sampling is None else json.dumps(dict(sampling))
        columns = {"step": step, "policy_version": version, "written_at": time.time(), "sampling": settings}
        rows = [columns | to_row(group, sample) for group in groups for sample in range(len(group.rollouts))]
        if rows and arrived is not None:
            rows[0]["arrived"] = list(arrived)
        self._rows += rows

    def close(self, timeout_s: float) -> None:
        """Writes the remaining rows, with retries while the disk is full.

        Raises:
            OSError: the disk is still full after `timeout_s`.
        """
        try:
            self._wait_for_space(timeout_s)
        finally:
            self.release()

    def release(self) -> None:
        """Releases the lock of the folder. Safe to call twice."""
        self._lock.release()

    def _wait_for_space(self, timeout_s: float) -> None:
        # Not a `Wait`: it waits for nobody, but tries again and again, and its error is that of the disk.
        deadline = time.monotonic() + timeout_s
        self.flush()
        while self._rows or self._unlisted:
            if time.monotonic() > deadline:
                missing = [n for file in self._unlisted for n in (file.first, file.last)]
                missing += [row["step"] for row in self._rows]
                raise OSError(
                    errno.ENOSPC,
                    f"the disk was full for RolloutTape.full_disk_timeout_s={timeout_s:g}: "
                    f"steps {missing[0]} to {missing[-1]} are not on the tape",
                    str(self.folder),
                )
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
        """Writes the appended steps; returns their file, none without steps or on a full disk."""
        if not self._rows:
            return []
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, SCHEMA, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
            writer.write_table(pa.Table.from_pylist(self._rows, schema=SCHEMA))
        data = sink.getvalue().to_pybytes()
        first = self._rows[0]["step"]
        last = self._rows[-1]["step"]
        path = self.folder / f"steps-{first:09d}-{last:09d}-{checksum(data)}.arrow"
        try:
            with replacing(path) as file:
                file.write(data)
        except OSError as error:
            if not is_disk_full(error):
                raise
            log.warning("tape %s: the disk is full; steps %d to %d wait in memory", self.folder, first, last)
            return []
        rows = len(self._rows)
        self._rows = []
        return [TapeFile(path, first, last, checksum=checksum(data), rows=rows)]
