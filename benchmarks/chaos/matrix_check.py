"""Checks of a run of `kill_matrix.py` that has ended, from its journals, its tape and its folder."""

from __future__ import annotations

import re
import zlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matrix_combos import GROUP_SIZE, GROUPS, LAG, REPLAY_STALENESS
from matrix_run import MatrixRun, read

from lit_async_rl.replay.tape import Tape

DOCUMENTED = re.compile(
    r"combo\.yaml|log\.\d+\.\d|journal/\d+\.\d\.jsonl|checkpoints/[^.].*\.ckpt"
    r"|tape/(steps-.*\.(arrow|undone)|manifest\.jsonl)|\.?[^/]*\.run\.(lock|json)|tape/\.run\.(lock|json)|log/version_\d+/.*|(.*/)?[^/]*\.lock"
)


@dataclass(frozen=True)
class Step:
    """One optimizer step that is part of the result.

    Attributes:
        digest: of the parameters after it.
        micros: micro-batches of all ranks, as the journal has them.
    """

    digest: str
    micros: list[dict[str, Any]]

    @property
    def rows(self) -> list[tuple[int, int]]:
        """Group and content of each rollout."""
        return sorted((group, row) for micro in self.micros for group, row in micro["rows"])


def history(run: MatrixRun) -> tuple[list[Step], list[str]]:
    """Steps in the final parameters, each from the last process that made it, and inconsistencies."""
    steps: list[Step] = []
    wrong: list[str] = []
    for segment in range(1, run.segment + 1):
        ranks = [list(read(run.folder / "journal" / f"{segment}.{rank}.jsonl")) for rank in range(run.combo.ranks)]
        if not ranks[0]:
            continue
        start = ranks[0][0]["step"]
        if start > len(steps):
            wrong.append(f"segment {segment} begins with step {start}, after {len(steps)} steps")
        del steps[start:]
        for record in (line for line in ranks[0] if line["at"] == "step"):
            number = record["step"]
            if number != len(steps):
                wrong.append(f"segment {segment}: step {number} comes after {len(steps)} steps")
            micros = [[r for r in rank if r["at"] == "micro" and r["step"] == number] for rank in ranks]
            wrong += [
                f"segment {segment}: step {number} has {len(of_rank)} micro-batches on rank {rank}"
                for rank, of_rank in enumerate(micros)
                if len(of_rank) != run.combo.micro_batches
            ]
            steps.append(Step(record["digest"], [micro for of_rank in micros for micro in of_rank]))
        wrong += [f"segment {segment}: ranks differ" for lines in ranks[1:] if not _agree(ranks[0], lines)]
    return steps, wrong


def _agree(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> bool:
    ours, theirs = ({r["step"]: r["digest"] for r in lines if r["at"] == "step"} for lines in (one, other))
    return all(ours[step] == theirs[step] for step in ours.keys() & theirs.keys())


def violations(run: MatrixRun, expected: list[Step] | None) -> list[str]:
    """Violated guarantees of a run that has ended; `expected` is the same run without kills."""
    steps, wrong = history(run)
    if len(steps) != run.steps:
        wrong.append(f"{len(steps)} steps were made, not {run.steps}")
    pairs = list(enumerate(zip(steps, expected or steps, strict=False)))
    others = [f"step {n}: other rollouts than without kills" for n, (ours, theirs) in pairs if ours.rows != theirs.rows]
    differ = [f"step {n}: other parameters than without kills" for n, (a, b) in pairs if a.digest != b.digest]
    checks = [wrong, _check_content(run, steps), _check_tape(run, steps), others, differ]
    of_first = [f"{check[0]} (and {len(check) - 1} more)" if len(check) > 1 else check[0] for check in checks if check]
    return of_first + _leftovers(run.folder)


def _check_content(run: MatrixRun, steps: list[Step]) -> list[str]:
    """Checks bound, whole groups, and that each is used once."""
    wrong, is_replay = [], run.combo.source == "replay buffer"
    seen: set[int] = set()
    for number, step in enumerate(steps):
        ages = [micro["version"] - micro["oldest"] for micro in step.micros]
        if max(ages) > (REPLAY_STALENESS if is_replay else LAG) or min(ages) < 0:
            wrong.append(f"step {number}: tokens are {min(ages)} to {max(ages)} versions old")
        sizes = Counter(group for group, _ in step.rows)
        if not is_replay and (len(sizes) != GROUPS or set(sizes.values()) != {GROUP_SIZE}):
            wrong.append(f"step {number} is made of {dict(sizes)}")
        if not is_replay and seen & sizes.keys():
            wrong.append(f"step {number}: groups {sorted(seen & sizes.keys())} were trained on before")
        seen |= sizes.keys()
    return wrong


def _check_tape(run: MatrixRun, steps: list[Step]) -> list[str]:
    """Checks that the tape holds the trained rollouts."""
    tape = list(Tape(run.folder / "tape").steps())
    wrong = [] if [s.step for s in tape] == list(range(len(steps))) else [f"the tape has {[s.step for s in tape]}"]
    for on_tape, step in zip(tape, steps, strict=False):
        of_groups = [(group, rollout) for group in on_tape.groups for rollout in group.rollouts]
        rows = sorted((group.index, _row(group.prompt_ids + rollout.token_ids)) for group, rollout in of_groups)
        if rows != step.rows:
            wrong.append(f"step {on_tape.step}: the tape has other rollouts than were trained on")
    return wrong


def _row(ids: tuple[int, ...]) -> int:
    return zlib.crc32(np.array(ids, dtype=np.int64).tobytes())


def _leftovers(folder: Path) -> list[str]:
    files = (str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    unknown = [name for name in files if not DOCUMENTED.fullmatch(name)]
    return [f"left over: {', '.join(sorted(unknown)[:5])}"] if unknown else []
