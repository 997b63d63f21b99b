"""Checks of a disturbed run, from its tape and its journal (see `chaos_run.py`), and the table of faults."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from chaos_run import GROUPS, LAG, digest

from lit_async_rl.replay.tape import Tape

Trained = list[tuple[int, int, str]]  # step, index and digest of each group


@dataclass
class Record:
    """Outcomes of one kind of fault."""

    recovered: list[float] = field(default_factory=list)  # seconds
    num_ended: int = 0
    num_hung: int = 0
    num_lost: int = 0
    num_twice: int = 0

    @property
    def count(self) -> int:
        """Number of faults."""
        return len(self.recovered) + self.num_hung

    @property
    def is_bad(self) -> bool:
        """Whether a guarantee was violated."""
        return bool(self.num_hung or self.num_lost or self.num_twice)


def check_tape(folder: Path, steps: int, schedule: str, expected: str | None) -> Trained:
    """Checks that every step is recorded once, the bound holds, and the final parameters are as expected."""
    tape = list(Tape(folder / "tape").steps())
    assert [step.step for step in tape] == list(range(steps)), "a step is missing, or there twice"
    for step in tape:
        assert len(step.groups) == GROUPS
        oldest = min(v for group in step.groups for rollout in group.rollouts for v in rollout.versions)
        lag = step.version - oldest
        assert lag <= LAG, f"step {step.step}: the lag is {lag}"
        assert schedule == "free" or lag == min(step.step, LAG), f"step {step.step}: the lag is {lag}"
    assert expected is None or (folder / "digest").read_text() == expected, "the final parameters differ"
    return [(step.step, group.index, digest(group)) for step in tape for group in step.groups]


def check_journal(journal: list[str], trained: Trained, records: dict[str, Record]) -> None:
    """Counts groups that were lost, or trained on twice."""
    for fault, index in find_lost(journal, trained):
        print(f"LOST after {fault}: group {index}", flush=True)
        records[fault].num_lost += 1
    records["kill -9"].num_twice += len(trained) - len({index for _, index, _ in trained})


def find_lost(journal: list[str], trained: Trained) -> list[tuple[str, int]]:
    """Finished groups neither trained on unchanged nor left, with the last fault before.

    A process has the groups that it restored and those that it finished; a checkpoint has those of its process at that
    time.
    """
    used = {(index, digest) for _, index, digest in trained}
    lost: list[tuple[str, int]] = []
    have: dict[int, str] = {}
    saved: dict[int, str] = {}
    checkpoints: dict[str, dict[int, str]] = {"anew": {}}
    resumed, fault = "anew", "kill -9"
    for line in journal:
        what, *words = line[1:].split(" ")
        if what == "fault":
            fault = " ".join(words)
        elif what == "begun":
            resumed, have = words[0], {}
        elif what == "finished":
            index, content = int(words[0]), words[1]
            if have.get(index, content) != content:
                lost.append((fault, index))  # it was finished, and sampled again
            have[index] = content
        elif what == "started":
            done = {index for step, index, _ in trained if step < int(words[0])}
            before = {index: content for index, content in checkpoints[resumed].items() if index not in done}
            lost += [(fault, index) for index, content in before.items() if have.get(index) != content]
        elif what == "saved":
            saved = dict(have)
        elif what == "written":
            checkpoints[words[0]] = saved
        elif what == "left":
            left = set(map(int, words))
            lost += [(fault, n) for n, content in have.items() if n not in left and (n, content) not in used]
    return lost


def table(records: dict[str, Record]) -> str:
    """Markdown table, one row per kind."""
    names = ("fault", "count", "recovered", "ended with message", "hangs", "lost", "twice", "median s", "max s")
    rows = [names]
    total = Record()
    for name, record in [*records.items(), ("all", total)]:
        if record is not total:
            for key, value in vars(record).items():
                setattr(total, key, getattr(total, key) + value)
        seconds = record.recovered or [0.0]
        went_on = len(record.recovered) - record.num_ended
        numbers = (record.count, went_on, record.num_ended, record.num_hung, record.num_lost, record.num_twice)
        rows.append((name, *map(str, numbers), f"{median(seconds):.1f}", f"{max(seconds):.1f}"))
    widths = [max(len(row[n]) for row in rows) for n in range(len(names))]
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)
