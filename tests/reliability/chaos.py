"""Injects faults into a tiny training run at random points, resumes it, and checks what must hold.

python tests/reliability/chaos.py --minutes 10 [--faults 200] [--seed 0] [--steps 120] [--folder runs/chaos]

Runs take turns: one of `schedule: fixed_lag`, with the faults that may not change a bit of its result, and one of
`schedule: free`, with all. Faults come one at a time, after a step and a random pause, or (one in five) at once. Each
must be explained by one line in the log, and the run must make another step, within `LIMIT_S`. When a run is through:

* every step was trained on once, every group at most once, no token was older than the bound;
* no finished group is lost: it was trained on as it was, or is still there (after `kill -9`: as far as it was in the
  checkpoint; what was finished later is sampled again);
* the parameters of a `fixed_lag` run are those of a run without faults, bit for bit.

Which fault has which outcome: docs/faults.md. What is disturbed: tests/reliability/chaos_run.py.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import IO

import chaos_run
from chaos_run import GROUPS, LAG, digest

from lit_async_rl.replay.tape import Tape

# -- Checks of a disturbed run, from its tape and its journal (see `chaos_run.py`), and the table of faults -----------


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
    resumed = "anew"
    fault = "kill -9"
    for line in journal:
        what, *words = line[1:].split(" ")
        if what == "fault":
            fault = " ".join(words)
        elif what == "begun":
            resumed = words[0]
            have = {}
        elif what == "finished":
            index = int(words[0])
            content = words[1]
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


LIMIT_S = 180.0  # longest until a fault is explained and another step is made, starts of processes included
CONTEXT = multiprocessing.get_context("forkserver")  # processes that need not import all anew
LATE = ["torch._dynamo", "transformers.models.llama.modeling_llama"]  # what is imported in the first step otherwise
MARGIN = 15  # steps before the end without faults, so that there is a step after each


@dataclass(frozen=True)
class Kind:
    """Kind of fault: its expected log line, and whether a `fixed_lag` run must end as without it."""

    said: str
    is_exact: bool = False
    weight: int = 1
    returncode: int = 0  # of the process that it ends


KINDS = {
    "kill -9": Kind(r"resumed: \d+ finished groups are kept", True, 7, -9),
    "SIGTERM": Kind(r"SIGTERM: saved", True),
    "SIGSTOP": Kind("this process did not run", True),
    "engine hang": Kind(r"the engine was restarted .*StalledError", weight=3),
    "engine crash": Kind(r"the engine was restarted .*injected crash", weight=3),
    "engine out of memory": Kind(r"out of memory: data.engine.num_slots is now", weight=3),
    "engine slow": Kind("slow: the trainer waited", True),
    "engine gone": Kind("the engine still fails after data.limits.engine_restarts", returncode=1),
    "reward hang": Kind("failed, trying again: .* did not return within data.scoring.timeout_s", True),
    "reward crash": Kind("failed, trying again: .* injected crash of the reward", True),
    "reward slow": Kind("reward .* is slow", True),
    "reward poison": Kind(r"a prompt is left out, because calls for it failed \(data.scoring.tries"),
    "disk full": Kind("the disk is full", True),
    "NaN gradient": Kind("this update is dropped"),
    "NaN for good": Kind("NonFiniteError: .* updates in a row had a gradient with NaN", returncode=1),
}


class Run:
    """A run over all of its processes: log and journal."""

    def __init__(self, folder: Path, steps: int, schedule: str) -> None:
        self.folder = folder
        self.steps = steps
        self.schedule = schedule
        self.log: list[str] = []
        self.journal: list[str] = []
        folder.mkdir(parents=True)

    def start(self) -> None:
        """Starts a process, from the newest checkpoint."""
        theirs, ours = zip(*(CONTEXT.Pipe(duplex=False) for _ in range(3)), strict=True)
        stdin, *outputs = ours[0], theirs[1], theirs[2]
        inside = (theirs[0], ours[1], ours[2])
        arguments = (self.folder, self.steps, self.schedule, next(reversed(self.checkpoints), None), inside)
        self.process = CONTEXT.Process(target=chaos_run.train, args=arguments, daemon=True)
        self.process.start()
        for pipe in inside:
            pipe.close()
        self._stdin = os.fdopen(os.dup(stdin.fileno()), "w")
        readers = [(os.fdopen(os.dup(o.fileno())), to) for o, to in zip(outputs, (self.journal, self.log), strict=True)]
        self._readers = [threading.Thread(target=self._read, args=pair, daemon=True) for pair in readers]
        for reader in self._readers:
            reader.start()

    def _read(self, pipe: IO[str], lines: list[str]) -> None:
        for line in pipe:
            lines.append(line.rstrip())
            with (self.folder / "log").open("a") as file:
                file.write(line)

    @property
    def checkpoints(self) -> list[Path]:
        """Checkpoints, oldest first."""
        return sorted(self.folder.glob("checkpoints/*.ckpt"), key=lambda path: path.stat().st_mtime_ns)

    @property
    def is_through(self) -> bool:
        """Whether the last step was made."""
        return (self.folder / "digest").exists()

    @property
    def num_files(self) -> int:
        """Number of tape files, superseded ones included: grows with every step."""
        return len([path for path in self.folder.glob("tape/*") if path.suffix in (".arrow", ".undone")])

    @property
    def step(self) -> int:
        """The last step on the tape."""
        return max((int(path.name.split("-")[2]) for path in self.folder.glob("tape/*.arrow")), default=0)

    def end(self) -> int:
        """Waits until the process has ended and its output is read; returns its status."""
        self.process.join(LIMIT_S)
        for reader in self._readers:
            reader.join(10.0)
        assert self.process.exitcode is not None, f"{self.folder}/log: the process does not end"
        return self.process.exitcode

    def ask(self, kind: str, chance: random.Random) -> None:
        """Injects the fault."""
        self.journal.append(f"@fault {kind}")
        if kind == "kill -9":
            self.process.kill()
        elif kind == "SIGTERM":
            self.process.terminate()
        elif kind == "SIGSTOP":
            assert self.process.pid is not None
            os.kill(self.process.pid, signal.SIGSTOP)
            time.sleep(chance.uniform(4.0, 7.0))
            os.kill(self.process.pid, signal.SIGCONT)
        else:
            self._stdin.write(f"{kind}\n")
            self._stdin.flush()


def disturb(run: Run, kind: str, chance: random.Random, record: Record) -> None:
    """Injects one fault; returns when it is explained and another step is made. Restarts an ended process."""
    began = time.monotonic()
    said = len(run.log)
    files = None
    ended = False
    run.ask(kind, chance)
    while not run.is_through:
        time.sleep(0.02)
        if files is None and any(re.search(KINDS[kind].said, line) for line in run.log[said:]):
            files = run.num_files
        if not run.process.is_alive():
            code = run.end()
            if run.is_through:
                break
            assert code in (0, KINDS[kind].returncode), f"{run.folder}/log: {kind} ended the run with {code}"
            ended = code == 1
            run.start()
        if files is not None and run.num_files > files and run.process.is_alive():
            break
        if time.monotonic() - began > LIMIT_S:
            record.num_hung += 1
            print(f"HUNG: {kind}, see {run.folder}/log", flush=True)
            run.process.kill()
            return
    said_it = any(re.search(KINDS[kind].said, line) for line in run.log[said:])
    assert said_it, f"{run.folder}/log does not explain: {kind}"
    record.num_ended += ended
    record.recovered.append(time.monotonic() - began)


def complete(run: Run, chance: random.Random, records: dict[str, Record], is_over: Callable[[], bool]) -> None:
    """Runs to the end, with faults until `is_over()`."""
    kinds = [name for name, kind in KINDS.items() if kind.is_exact or run.schedule == "free"]
    run.start()
    try:
        while not run.is_through:
            files = run.num_files
            began = time.monotonic()
            at_once = chance.random() < 0.2
            while run.num_files == files and run.process.is_alive() and not at_once:
                assert time.monotonic() - began < LIMIT_S, f"{run.folder}/log: no step in {LIMIT_S:g} s"
                time.sleep(0.02)
            time.sleep(chance.uniform(0.0, 1.0))
            if not run.process.is_alive():
                assert run.end() == 0, f"{run.folder}/log says why the run ended with {run.process.exitcode}"
                assert run.is_through, f"{run.folder}/log: the run ended early"
            elif not is_over() and run.checkpoints and run.step < run.steps - MARGIN:
                kind = chance.choices(kinds, [KINDS[name].weight for name in kinds])[0]
                disturb(run, kind, chance, records[kind])
    finally:
        run.process.kill()
    run.end()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="faults are injected for so long")
    parser.add_argument("--faults", type=int, default=10**9, help="or until there were so many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--folder", default="runs/chaos", help="must not exist")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    CONTEXT.set_forkserver_preload(["chaos_run", *LATE])
    base = Path(arguments.folder)
    chance = random.Random(arguments.seed)
    records = {name: Record() for name in KINDS}
    deadline = time.monotonic() + 60 * arguments.minutes

    def is_over() -> bool:
        return time.monotonic() > deadline or sum(r.count for r in records.values()) >= arguments.faults

    unbroken = Run(base / "unbroken", arguments.steps, "fixed_lag")
    complete(unbroken, chance, records, lambda: True)
    check_tape(unbroken.folder, arguments.steps, "fixed_lag", None)
    expected = (unbroken.folder / "digest").read_text()
    num_runs = 0
    while not is_over():
        schedule = ("fixed_lag", "free")[num_runs % 2]
        run = Run(base / f"run{num_runs}", arguments.steps, schedule)
        complete(run, chance, records, is_over)
        tape = check_tape(run.folder, arguments.steps, schedule, expected if schedule == "fixed_lag" else None)
        check_journal(run.journal, tape, records)
        if not any(record.is_bad for record in records.values()):
            shutil.rmtree(run.folder)
        num_runs += 1
        print(f"{num_runs} runs\n{table(records)}", flush=True)
    if any(record.is_bad for record in records.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
