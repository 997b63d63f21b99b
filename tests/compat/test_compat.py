"""Configurations, checkpoints and tapes of earlier commits work.

`make.py` wrote the files, one folder for each commit that is promised. They stand for what users have, so they are
never edited or written again. A setting that is to go on purpose is named in `GONE`, and refused by its name.
"""

from __future__ import annotations

import hashlib
import json
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pyarrow as pa
import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI

from benchmarks.staleness import suite as staleness_suites
from benchmarks.time_to_accuracy import suite as time_suites

ROOT = Path(__file__).parents[2]
COMMITS = sorted(path.parent for path in Path(__file__).parent.glob("*/frozen.json"))
OF_FIT = [folder for folder in COMMITS if (folder / "run" / "fit.py").is_file()]
FROZEN = {
    path.parent: yaml.load(path.read_bytes(), yaml.CSafeLoader)
    for path in sorted(Path(__file__).parent.glob("*/configurations.yaml"))
}
RENAMED = {"SharedPromptPacking": "PrefixTreePacking"}  # the former name works: tests/models/test_packing.py
GONE = ("keep_engines", "engine_lease_s")  # settings of these configurations that went on purpose
MAIN: Callable[[list[str]], None] = runpy.run_path(str(ROOT / "scripts" / "train.py"), run_name="train")["main"]
TIMES = ("generation_s", "queue_s", "written_at")
DEFAULT_SINCE = {"RewardHackingMonitor"}  # callbacks, since the oldest of the commits
QUICKSTART = ("--config", "configs/quickstart.yaml", "--config", "run.yaml")


def train(words: list[str]) -> None:
    """What `python scripts/train.py WORDS` does."""
    MAIN(["train", *words])


class Done(BaseException):
    """Ends a command that has done what the test wants of it; no `except Exception` catches it."""


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory) -> dict[Path, Path]:
    """For each commit a folder in which the paths of its configurations lead somewhere, as in a clone."""
    folders = {}
    for commit, frozen in FROZEN.items():
        folders[commit] = tmp_path_factory.mktemp(commit.name)
        for name, text in frozen["files"].items():
            path = folders[commit] / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        (folders[commit] / "lit_async_rl").symlink_to(ROOT / "lit_async_rl")
    return folders


@pytest.fixture(autouse=True)
def _offline_with_its_own_path(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(sys, "path", list(sys.path))  # commands add their folder to it


@pytest.fixture(scope="module")
def parser() -> list:
    """The command line's parser once it was made: it takes a third of the time of parsing a configuration."""
    return []


@pytest.fixture
def check(unpacked, parser, monkeypatch, capfd) -> Callable[..., str]:
    """`check(commit, words)` is the complaint about a command line of that commit, empty if it is still good."""
    setup_parser, instantiate_classes = LightningCLI.setup_parser, LightningCLI.instantiate_classes
    builds = []

    def setup(cli: LightningCLI, *arguments) -> None:
        if not parser:
            setup_parser(cli, *arguments)
            parser.append(cli.parser)
        cli.parser = parser[0]

    def instantiate(cli: LightningCLI) -> None:
        if builds:
            instantiate_classes(cli)
        raise Done

    def checked(commit: Path, words: str | Iterable[str], build: bool = False) -> str:
        words = words.split() if isinstance(words, str) else list(words)
        builds[:] = [True] * build
        monkeypatch.chdir(unpacked[commit])
        monkeypatch.setattr(LightningCLI, "setup_parser", setup)
        monkeypatch.setattr(LightningCLI, "instantiate_classes", instantiate)
        pages = [Path(word).absolute().parent for word in words if word.startswith("pages/")]
        for page in pages:
            monkeypatch.syspath_prepend(page)
        try:
            train(words)
        except Done:
            return ""
        except SystemExit as end:
            said = end.code if isinstance(end.code, str) else capfd.readouterr().err
            line = said.strip().splitlines()[-1]
            is_meant = line.startswith("error: there is no setting ") and any(name in line for name in GONE)
            return "" if is_meant else said[-2000:]
        finally:
            for module in (file for page in pages for file in page.glob("*.py")):
                sys.modules.pop(module.stem, None)
        return "the command went on"

    return checked


@pytest.mark.parametrize("commit", COMMITS, ids=lambda path: path.name)
def test_nothing_frozen_was_changed(commit):
    """By a renaming throughout the repository, say."""
    sums = json.loads((commit / "frozen.json").read_text())["sha256"]
    found = {path.relative_to(commit).as_posix(): path for path in commit.rglob("*") if path.is_file()}
    del found["frozen.json"]
    assert {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in found.items()} == sums


def _settings(text: str) -> object:
    for former, name in RENAMED.items():
        text = text.replace(former, name)
    return yaml.safe_load(text)


def is_built_elsewhere(commit: Path, words: list[str]) -> bool:
    """Whether these files have today's settings: then `tests/integration/test_configs.py` builds them."""
    texts = {word: FROZEN[commit]["files"][word] for word in words if word.startswith("configs/")}
    pairs = [(ROOT / name, text) for name, text in texts.items()]
    return all(path.is_file() and _settings(path.read_text()) == _settings(text) for path, text in pairs)


def commands(kind: str) -> list:
    """Parameters of a test: commit and command line."""
    return [
        pytest.param(commit, words, id=f"{commit.name}-{name}")
        for commit, frozen in FROZEN.items()
        for name, words in frozen[kind].items()
    ]


@pytest.mark.slow
def test_shipped_configurations_that_have_changed_since_are_accepted(check):
    complaints = {}
    for parameters in commands("commands"):
        commit, words = parameters.values
        if is_built_elsewhere(commit, words.split()):
            continue
        said = check(commit, words)
        needs_downloads = not set(words.split()).isdisjoint(FROZEN[commit]["need_downloads"])
        if said and not (needs_downloads and "not found, here or on the hub" in said):
            complaints[parameters.id] = said
    assert not complaints


@pytest.mark.slow
@pytest.mark.parametrize(("commit", "words"), commands("commands_of_the_documentation"))
def test_a_configuration_of_the_documentation_is_accepted(commit, words, check):
    assert check(commit, words) == ""


@pytest.mark.slow
@pytest.mark.parametrize("commit", FROZEN, ids=lambda path: path.name)
def test_shipped_configurations_that_have_changed_since_can_be_built(commit, check):
    frozen = FROZEN[commit]
    complaints = {}
    for name, line in frozen["commands"].items():
        words = line.split()
        needs_downloads = not set(words).isdisjoint(frozen["need_downloads"])
        if name == "configs/quickstart.yaml" or not (needs_downloads or is_built_elsewhere(commit, words)):
            complaints[name] = check(commit, words, build=True)
    assert not {name: said for name, said in complaints.items() if said}


@pytest.mark.sweep
@pytest.mark.parametrize("suites", [staleness_suites, time_suites], ids=["staleness", "time_to_accuracy"])
@pytest.mark.parametrize("commit", FROZEN, ids=lambda path: path.name)
def test_suites_of_the_benchmarks_can_be_read_and_their_runs_are_accepted(commit, suites, check, unpacked, monkeypatch):
    monkeypatch.chdir(unpacked[commit])
    folder = {staleness_suites: "configs/bench/suites", time_suites: "configs/time_to_accuracy/suites"}[suites]
    names = sorted(path.stem for path in Path(folder).glob("*.yaml"))
    assert names
    cells = {}  # a cell of each method or system
    for name in names:
        suite = suites.load_suite(name)
        found = (
            suite.cells
            if suites is time_suites
            else [
                staleness_suites.Cell(block.regime, method, 4, 1.0, 0)
                for block in suite.blocks
                for method in block.methods
            ]
        )
        cells |= {cell.system if suites is time_suites else cell.method: cell for cell in found}
    complaints = {name: check(commit, cell.arguments()) for name, cell in cells.items()}
    assert not {name: said for name, said in complaints.items() if said}


@pytest.fixture
def run(request, tmp_path, monkeypatch) -> Path:
    """A copy of the run of a commit, with its configuration; the working folder."""
    shutil.copytree(request.param / "run", tmp_path / "run")
    monkeypatch.chdir(tmp_path / "run")
    return tmp_path / "run"


def runs_of_all_commits(test):
    return pytest.mark.parametrize("run", COMMITS, ids=lambda path: path.name, indirect=True)(test)


def saved(run: Path, name: str) -> dict:
    """A checkpoint of the only run that was made in this folder."""
    (path,) = run.glob(f"logs/quickstart/*/checkpoints/{name}")
    return torch.load(path, weights_only=True)


@pytest.mark.slow
@runs_of_all_commits
def test_a_checkpoint_resumes(run):
    """With the configuration that the run had saved: it trains on the groups of the checkpoint, and counts on."""
    recorded, before = rollouts("tape"), torch.load("step=3.ckpt", weights_only=True)
    train(["--config", "config.yaml", "--ckpt_path", "step=3.ckpt"])
    after = saved(run, "epoch=*-step=5.ckpt")
    assert (before["global_step"], after["global_step"]) == (3, 5)
    assert (before["version"], after["version"]) == (3, 5)
    assert {int(one["step"]) for one in after["optimizer_states"][0]["state"].values()} == {5}
    assert after["callbacks"].keys() == before["callbacks"].keys() | DEFAULT_SINCE
    tokens = [checkpoint["callbacks"]["ThroughputMonitor"]["total_tokens"] for checkpoint in (before, after)]
    assert tokens[1] > tokens[0]
    assert len(list(Path("tape").glob("*.undone"))) == 2, "the resumed run has recorded two steps of its own"
    resumed = rollouts("tape")
    assert {row["step"] for row in resumed} == {0, 1, 2, 3, 4}
    assert resumed == recorded, "groups that were finished are not sampled again, and have their rewards"


@pytest.mark.slow
@pytest.mark.parametrize("run", OF_FIT, ids=lambda path: path.name, indirect=True)
def test_a_checkpoint_of_fit_resumes(run):
    """By the script of the run, whose rewards are those of the checkpoint."""
    shutil.copytree("fit_tape", "tape", dirs_exist_ok=True)
    recorded = rollouts("tape")
    words = [sys.executable, "fit.py", "5", "fit_step=3.ckpt"]
    subprocess.run(words, check=True, timeout=300, env=os.environ | {"PYTHONPATH": str(ROOT)})
    (path,) = run.glob("runs/**/checkpoints/epoch=*-step=5.ckpt")
    assert torch.load(path, weights_only=True)["version"] == 5
    resumed = rollouts("tape")
    assert {row["step"] for row in resumed} == {0, 1, 2, 3, 4}
    check_kept(resumed, recorded)


@pytest.mark.slow
@runs_of_all_commits
def test_a_tape_replays(run):
    """With the recorded configuration it leads to the recorded run's checkpoint, up to rounding of another machine."""
    flags = ["--data.admission", "FromTape", "--data.admission.folder", "tape", "--trainer.callbacks", "null"]
    train([*QUICKSTART, *flags])
    assert saved(run, "epoch=*-step=5.ckpt")["global_step"] == 5
    recorded, replayed = torch.load("step=3.ckpt", weights_only=True), saved(run, "epoch=*-step=3.ckpt")
    assert replayed["state_dict"].keys() == recorded["state_dict"].keys()
    gradients, same = (
        torch.cat([one["exp_avg"].flatten() for one in checkpoint["optimizer_states"][0]["state"].values()])
        for checkpoint in (recorded, replayed)
    )
    assert gradients.norm() > 0
    assert (same - gradients).norm() < 0.01 * gradients.norm()


def check_kept(resumed: list[dict], recorded: list[dict]) -> None:
    """Groups that were finished are kept with their rewards; which of them trains first is a matter of time."""
    assert [row for row in resumed if row["step"] < 3] == [row for row in recorded if row["step"] < 3]
    after = [
        {(row["group"], row["sample"]): (row["completion_ids"], row["reward"]) for row in rows if row["step"] >= 3}
        for rows in (resumed, recorded)
    ]
    assert sum(after[1].get(sample) == found for sample, found in after[0].items()) >= 8, "of two groups, at least"


def rollouts(folder: str) -> list[dict]:
    """The rows of a tape, without times and without columns that a later commit has added and left empty."""
    tables = [pa.ipc.open_file(path.read_bytes()).read_all() for path in sorted(Path(folder).glob("*.arrow"))]
    rows = pa.concat_tables(tables, promote_options="default").to_pylist()
    return [{name: value for name, value in row.items() if name not in TIMES and value is not None} for row in rows]
