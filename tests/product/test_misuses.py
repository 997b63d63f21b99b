"""Misuses of the command line: each ends soon, in few lines that name the setting, and leaves nothing behind.

`misuses/*.yaml`: `command` begins all commands of a file, `files` are written into the working folder, and each misuse
has its `flags` (or a `reward`, the body of a reward function), what the output `says`, and the exit `code`.
`may_leave: true` marks those that are found when the run has begun, whose folder stays. `quick: true` puts one into
`make test`. `acceptable` says what a true message could say better; all others were judged good.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from filelock import FileLock
from made import link_sources, make
from preloaded import ROOT, Preloaded

TABLES = sorted((Path(__file__).parent / "misuses").glob("*.yaml"))
MOST_LINES = 12
LIMIT_S, PROCESSOR_S = 60.0, 12.0  # a loaded machine has its time, but not an endless loop
LEFT_BY_PYTHON = {"__pycache__"}


SAMPLED = 6  # of so many misuses one is in `make test`, one in `make test-slow`, the others in `make test-sweep`
MARKS = {0: [], SAMPLED // 2: [pytest.mark.slow]}


def misuses() -> Iterator[Any]:
    for path in TABLES:
        table = yaml.safe_load(path.read_text())
        for number, row in enumerate(table["misuses"]):
            shown = row.get("flags", row.get("reward", ""))
            known = {key: value for key, value in table.items() if key != "misuses"}
            marks = [] if row.get("quick") else MARKS.get(number % SAMPLED, [pytest.mark.sweep])
            yield pytest.param(known | row, id=f"{path.stem}-{number}: {shown}"[:90], marks=marks)


@pytest.fixture(scope="session")
def made(process: Preloaded, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("misuses") / "made"
    make(folder, process)
    return folder


@pytest.fixture
def folder(tmp_path: Path, made: Path) -> Path:
    link_sources(tmp_path / "here")
    (tmp_path / "here" / "made").symlink_to(made)
    return tmp_path / "here"


def words_of(misuse: dict[str, Any], folder: Path) -> list[str]:
    for name, text in misuse.get("files", {}).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    words = shlex.split(f"{misuse['command']} {misuse.get('flags', '')}")
    if body := misuse.get("reward"):
        (folder / "my_rewards.py").write_text(f"def judge(prompt, completion):\n    {body}\n")
        words += ["--data.reward", "my_rewards.judge", "--data.scoring.timeout_s", "1"]
    return words


def check(said: str, status: int, misuse: dict[str, Any]) -> None:
    """What holds for every misuse."""
    assert status == misuse["code"], said
    assert "Traceback" not in said
    assert len(said.splitlines()) <= MOST_LINES, said
    assert " ".join(misuse["says"].split()) in " ".join(said.split())
    settings = [word.split("=")[0].rstrip("+") for word in shlex.split(misuse.get("flags", "")) if word[:2] == "--"]
    settings = [word.split("=")[-1] if word.startswith("--config") else word for word in settings]
    named = {part for word in settings for part in word.lstrip("-").split(".")[-1:]} or {"reward"}
    if misuse.get("named", True):
        assert any(name in said for name in named), f"none of {named} is named: {said}"
    assert not re.search(r"Namespace\(|NestedArg\(|Union subtypes|<class '|object at 0x", said), said


@pytest.mark.parametrize("misuse", misuses())
@pytest.mark.timeout(180)
def test_a_misuse_ends_in_a_line_that_names_the_setting(misuse, process, folder):
    words = words_of(misuse, folder)
    before = set(os.listdir(folder)) | LEFT_BY_PYTHON
    done = process.run(words, folder, misuse.get("environment"), limit_s=LIMIT_S)
    assert not done.timed_out, done.said
    assert done.processor_s < PROCESSOR_S
    check(done.said, done.status, misuse)
    if not misuse.get("may_leave"):
        left = [str(path) for path in (folder / "runs").rglob("*")]
        assert set(os.listdir(folder)) <= before, f"refused, and left something behind: {left}"


def test_there_are_490_of_which_15_are_merely_acceptable():
    rows = [misuse.values[0] for misuse in misuses()]
    assert len(rows) >= 490
    assert sum("acceptable" in row for row in rows) <= 15


# -- what needs a neighbour, or a process of its own ------------------------------------------------------------------


@pytest.mark.slow
def test_a_folder_that_another_run_uses(process, folder, tmp_path):
    run = folder / "runs" / "fixed"
    run.mkdir(parents=True)
    with FileLock(run / ".run.lock"):
        flags = "--trainer.logger.save_dir runs --trainer.logger.name '' --trainer.logger.version fixed"
        misuse = dict(
            command=SMALL, flags=flags, code=1, named=False, says="trainer.logger's folder 'runs/fixed' is in use by"
        )
        done = process.run(words_of(misuse, folder), folder)
    check(done.said, done.status, misuse)
    done = process.run(words_of(misuse, folder), folder)
    assert done.status == 0, f"a lock whose owner is gone holds nobody up: {done.said}"


@pytest.mark.slow
def test_a_second_run_in_the_folder_of_an_earlier_one_keeps_its_files(process, folder):
    flags = "--trainer.logger.save_dir runs --trainer.logger.name '' --trainer.logger.version fixed --seed_everything"
    for seed in (5, 6):
        done = process.run(words_of(dict(command=SMALL, flags=f"{flags} {seed}"), folder), folder)
        assert done.status == 0, done.said
    assert "runs/fixed holds an earlier run; its files are kept as metrics.1.csv ..." in done.said
    assert "Warning" not in done.said
    seeds = [yaml.safe_load((folder / "runs/fixed" / name).read_text()) for name in ("config.1.yaml", "config.yaml")]
    assert [settings["seed_everything"] for settings in seeds] == [5, 6]
    assert len((folder / "runs/fixed/metrics.1.csv").read_text()) > 100


@pytest.mark.parametrize("flags", ["--model.optimizer torch.optim.SGD", "--data.seed 5", "--model.lora.rank 4"])
def test_a_refused_resume_leaves_the_run_as_it_was(flags, process, folder, made):
    run = folder / "runs/quickstart/version_0"
    shutil.copytree(made / "run", run)
    with (run / "metrics.csv").open("a") as table:
        table.write((run / "metrics.csv").read_text().splitlines()[-1] + "\n")  # a row after the checkpoint
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    resume = f"--ckpt_path {run}/checkpoints/last.ckpt --trainer.max_steps 4 {flags}"
    done = process.run(words_of(dict(command=SMALL, flags=resume), folder), folder)
    assert done.status == 1, done.said
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


SMALL = "train --config configs/quickstart.yaml --config made/small.yaml"
IN_A_PROCESS = [
    dict(command=SMALL, flags="--data.max_stalenes 2", code=2, says="did you mean data.max_staleness?"),
    dict(command=SMALL, flags="--data.max_staleness -1", code=1, says="data.max_staleness must be >= 0, got -1"),
    dict(command=SMALL, flags="--data.sampling.max_tokens 300", code=1, says="sampling.max_tokens=300"),
]


@pytest.mark.parametrize(
    "misuse",
    [
        pytest.param(one, marks=pytest.mark.sweep if number else pytest.mark.slow, id=one["flags"])
        for number, one in enumerate(IN_A_PROCESS)
    ],
)
def test_a_process_of_its_own_says_the_same_after_what_takes_the_time(misuse, process, folder):
    words = words_of(misuse, folder)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(ROOT / "scripts/train.py")]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    done = subprocess.run([*command, *words[1:]], cwd=folder, env=environment, text=True, timeout=150, **pipes)
    check(done.stdout, done.returncode, misuse)
    said = process.run(words, folder).said
    assert done.stdout == "loading torch, lightning and transformers ...\n" + said
    assert not (folder / "runs").exists()
