"""Kills training runs of many settings at bad moments, resumes them, and compares them with runs without kills.

python tests/reliability/kill_matrix.py --kills 200 [--seed 0] [--steps 20] [--per_run 6] [--combo trigger=steps ...]
                                       [--moments "first micro-batch" ...] [--folder runs/kill_matrix]
                                       [--out docs/measurements/kill_matrix.json]

The settings (`matrix_run.FACTORS`) are what decides where a step begins and when a checkpoint is written. Runs take
turns in a covering design: under `fixed_lag` every two values of two other factors meet. Each goes through the command
line of `scripts/train.py`, gets SIGKILL several times (`matrix_run.MOMENTS`; of two ranks both or one), and is
resumed from its newest checkpoint each time. When it is through (`violations`):

* every step was made once, of as many micro-batches as it has, on whole groups that no other step was trained on;
* no token was older than the bound, and the tape has what was trained on;
* under `fixed_lag`, rollouts and parameters of every step are those of a run without kills, bit for bit;
* nothing is left in the folder that is not documented; and nothing took longer than its timeout and 10 s.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from matrix_run import (
    FACTORS,
    GROUP_SIZE,
    GROUPS,
    LAG,
    MOMENTS,
    REPLAY_STALENESS,
    Combo,
    Hung,
    MatrixRun,
    covering,
    is_moment,
    read,
)

import lit_async_rl.cli.app  # noqa: F401  children are forked with all of it
from benchmarks.common.measurement import measurement, write_measurement
from lit_async_rl.replay.tape import Tape

# -- Checks of a run of `kill_matrix.py` that has ended, from its journals, its tape and its folder -------------------


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
    wrong = []
    is_replay = run.combo.source == "replay buffer"
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


@dataclass
class Report:
    """Outcomes of all runs."""

    kills: Counter[str] = field(default_factory=Counter)  # by moment
    by_setting: Counter[str] = field(default_factory=Counter)  # kills by value of each factor
    num_raised: int = 0
    num_stopped: int = 0  # by SIGTERM or Ctrl-C
    num_runs: int = 0
    num_hangs: int = 0
    waits: list[float] = field(default_factory=list)  # seconds from the start of a process to its first micro-batch
    wrong: list[str] = field(default_factory=list)

    def add_kill(self, moment: str, combo: Combo) -> None:
        """Counts a kill."""
        self.kills[moment] += 1
        self.by_setting.update(f"{name}={getattr(combo, name)}" for name in FACTORS)


def complete(run: MatrixRun, strikes: Sequence[Callable[[], bool]], report: Report) -> None:
    """Runs to the end; each strike ends the run once, or returns False if the run ended before."""
    run.start()
    for strike in strikes:
        if not strike():
            break
        run.end()
        run.start()
    run.wait_for(lambda: False)
    run.end()
    report.waits += run.waits
    if any(run.codes):
        raise RuntimeError(f"{run.folder}/log.{run.segment}.0: ended with {run.codes}")


def strike(run: MatrixRun, chance: random.Random, report: Report) -> bool:
    """Ends the run at a random moment, usually by SIGKILL."""
    if run.combo.trigger == "exception" and run.newest() and chance.random() < 0.4:
        has_raised = run.raise_in_a_step()
        report.num_raised += has_raised
        return has_raised
    if chance.random() < 0.1:
        return stop(run, chance, report)
    return kill(run, chance, report, chance.choice(MOMENTS))


def kill(run: MatrixRun, chance: random.Random, report: Report, moment: str) -> bool:
    """Kills at a moment; False if the run ended before it."""
    if not run.wait_for(is_moment(moment, run, chance)) or not run.is_running:
        return False
    both_train = run.combo.ranks > 1 and run.lines()  # before, a rank waits for the other as long as torch does
    run.kill(chance.choice([None, 0, 1]) if both_train else None)
    report.add_kill(moment, run.combo)
    return True


def stop(run: MatrixRun, chance: random.Random, report: Report) -> bool:
    """Sends SIGTERM or Ctrl-C, which must end the run with a checkpoint; False if it ended before."""
    at = chance.randrange(1, run.steps - 5)
    if not run.wait_for(lambda: run.step >= at) or run.step > run.steps - 4:
        return False
    sent, code = chance.choice([(signal.SIGTERM, 0), (signal.SIGINT, 130)])
    before = run.checkpoints().get("last.ckpt")
    run.kill(by=sent)
    run.end()
    if set(run.codes) != {code} or run.checkpoints().get("last.ckpt") == before:
        raise RuntimeError(f"{run.folder}/log.{run.segment}.0: {sent.name} ended the run with {run.codes}")
    report.num_stopped += 1
    return True


def reference(combo: Combo, folder: Path, steps: int) -> list[Step]:
    """The run without kills."""
    run = MatrixRun(combo, folder, steps)
    complete(run, [], Report())
    steps_made, wrong = history(run)
    if wrong:
        raise RuntimeError(f"{folder}, without kills: {wrong}")
    return steps_made


def attack(combo: Combo, number: int, arguments: argparse.Namespace, report: Report) -> None:
    """One run with kills."""
    folder = Path(arguments.folder)
    chance = random.Random(f"{arguments.seed} {number}")
    expected_at = folder / f"unbroken{number}"
    wrong: list[str] = []
    run = MatrixRun(combo, folder / f"run{number}", arguments.steps)
    try:
        expected = reference(combo, expected_at, arguments.steps) if combo.is_exact else None
        by_lot = [partial(strike, run, chance, report)] * arguments.per_run
        complete(run, [partial(kill, run, chance, report, m) for m in arguments.moments or ()] or by_lot, report)
        wrong = violations(run, expected)
    except Hung as hang:
        report.num_hangs += 1
        wrong = [f"HUNG: {hang}"]
    except RuntimeError as error:
        wrong = [str(error)]
    finally:
        run.kill()
        run.end()
    report.num_runs += 1
    report.wrong += [f"run {number} ({combo}): {line}" for line in wrong]
    kills = sum(report.kills.values())
    print(f"run {number}, {kills} kills: {combo}: {run.segment - 1} times resumed, {wrong or 'as without'}", flush=True)
    shutil.rmtree(expected_at, ignore_errors=True)
    if not wrong:
        shutil.rmtree(run.folder)


def summary(report: Report, arguments: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """Summary for docs/measurements."""
    kills = sum(report.kills.values())
    waits = report.waits or [0.0]
    row = [kills, report.num_runs, report.num_stopped, report.num_raised, len(report.wrong), report.num_hangs]
    columns = ["kills", "runs", "ended by signals", "exceptions", "violations", "hangs"]
    return measurement(
        "kill_matrix",
        round(len(report.wrong) / max(kills, 1), 4),
        "violations per kill",
        columns,
        [row],
        interval=[0.0, round(3.0 / kills, 4)] if kills and not report.wrong else None,  # rule of three
        command=f"python tests/reliability/kill_matrix.py {' '.join(sys.argv[1:])}",
        machine=f"{os.cpu_count()} cores, {seconds / 60:.1f} minutes",
        kills_by_moment=dict(report.kills),
        kills_by_setting=dict(sorted(report.by_setting.items())),
        first_micro_batch_s={"median": round(median(waits), 2), "max": round(max(waits), 2)},
    )


def parse_combo(settings: str) -> Combo:
    """Parses `name=value,name=value`."""
    given = dict(setting.split("=") for setting in settings.split(","))
    return Combo(**{name: next(v for v in FACTORS[name] if str(v) == value) for name, value in given.items()})


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--per_run", type=int, default=6, help="kills of one run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--combo", type=parse_combo, nargs="*", help="name=value,... instead of the covering design")
    parser.add_argument("--moments", nargs="*", choices=MOMENTS, help="of the kills of each run; by lot if not given")
    parser.add_argument("--folder", default="runs/kill_matrix", help="must not exist")
    parser.add_argument("--out", help="JSON file")
    arguments = parser.parse_args()
    Path(arguments.folder).mkdir(parents=True)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    combos = arguments.combo or covering(arguments.seed)
    report = Report()
    number = 0
    began = time.monotonic()
    for ends in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ends, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):  # which ends it with what was found so far
        while sum(report.kills.values()) < arguments.kills:
            attack(combos[number % len(combos)], number, arguments, report)
            number += 1
            if number == len(combos) and not report.kills:  # no run began: the settings are wrong
                break
    found = summary(report, arguments, time.monotonic() - began)
    print(json.dumps(found, indent=2), *report.wrong, sep="\n")
    if arguments.out:
        write_measurement(Path(arguments.out), found)
    sys.exit(bool(report.wrong))


if __name__ == "__main__":
    main()
