"""`schedule: replay` as a user runs it: through the command line, with all default callbacks."""

import csv
import logging
import math
import sys
from pathlib import Path

import pytest
import torch
from launch import finish, start

from lit_async_rl.cli.app import main
from lit_async_rl.lab.tape import main as filter_tape
from lit_async_rl.replay.tape import Tape

ROOT = Path(__file__).parents[2]
STEPS = 5
pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def _from_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def train(folder: Path, micro_batches: int, *flags: str, steps: int = STEPS, size: int = 8) -> torch.Tensor:
    """Trains by the quick start's configuration, made small; returns all weights of the last checkpoint."""
    main(
        [
            *("--config", "configs/quickstart.yaml", "--trainer.enable_progress_bar", "false", "--model.lora", "null"),
            *("--data.groups_per_step", "2", "--data.group_size", "2", "--model.scheduler", "null"),
            *("--data.micro_batches_per_step", str(micro_batches), "--trainer.max_steps", str(steps)),
            *("--data.validation.prompts.init_args.size", str(size), "--trainer.val_check_interval", "1000000"),
            *("--trainer.logger.init_args.save_dir", str(folder), "--model.learning_rate", "1e-3", *flags),
        ]
    )
    (last,) = folder.glob("quickstart/version_0/checkpoints/last.ckpt")
    weights = torch.load(last, weights_only=True)["state_dict"]
    return torch.cat([weights[name].flatten() for name in sorted(weights)])


def replay(tape: Path) -> tuple[str, ...]:
    return ("--data.admission", "FromTape", "--data.admission.folder", str(tape))


def summary(capsys) -> str:
    return " ".join(capsys.readouterr().out.split())


def metrics(folder: Path) -> list[dict[str, float]]:
    with (folder / "quickstart/version_0/metrics.csv").open() as file:
        return [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]


@pytest.fixture(scope="module", params=[1, 2])
def recorded(request, tmp_path_factory):
    """Number of micro-batches, a tape, and the weights at the end."""
    folder = tmp_path_factory.mktemp("recorded")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        tape = ("--trainer.callbacks+", "RolloutTape", "--trainer.callbacks.folder", str(folder / "tape"))
        return request.param, folder / "tape", train(folder, request.param, *tape)


@pytest.mark.slow
def test_a_replay_ends_with_the_same_weights_and_says_what_a_replay_can_say(recorded, tmp_path, capsys):
    micro_batches, tape, expected = recorded
    assert torch.equal(train(tmp_path, micro_batches, *replay(tape)), expected)
    said = summary(capsys)
    for row in ("optimizer steps │ 5 ", "% of the time, for the tape", "tokens replayed", "held-out accuracy"):
        assert row in said
    for row in ("engine idle", "bottleneck", "whole run", "nan"):
        assert row not in said, "there is no engine"
    rows = metrics(tmp_path)
    assert [row["step"] for row in rows if "perf/trainer_wait_share" in row] == list(range(STEPS))
    assert all(math.isfinite(value) for row in rows for value in row.values())
    assert all(0 <= row.get("perf/trainer_wait_share", 0) <= 1 for row in rows)
    assert not any("idle" in name or "queue" in name for row in rows for name in row)


@pytest.mark.slow
def test_a_replay_that_was_interrupted_goes_on_and_ends_with_its_tape(recorded, tmp_path, capsys, caplog):
    micro_batches, tape, expected = recorded
    train(tmp_path / "first", micro_batches, *replay(tape), steps=2)
    resume = ("--ckpt_path", str(tmp_path / "first/quickstart/version_0/checkpoints/last.ckpt"))
    with caplog.at_level(logging.WARNING):
        assert torch.equal(train(tmp_path / "rest", micro_batches, *replay(tape), *resume, steps=STEPS + 4), expected)
    assert "the tape has ended after 6 groups" in caplog.text
    assert "optimizer steps │ 3 " in summary(capsys)
    assert len(list(Tape(tape).steps())) == STEPS


@pytest.mark.slow
def test_an_interrupted_replay_of_a_part_of_a_tape_goes_on_where_it_was(recorded, tmp_path, monkeypatch):
    """The tape's first step is not the run's, and its steps are not as long."""
    micro_batches, tape, _ = recorded
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", ["tape", "filter", str(tape), "--out", str(tmp_path / "part"), "--first_step", "1"])
        filter_tape()
    settings = (*replay(tmp_path / "part"), "--data.groups_per_step", "4")
    expected = train(tmp_path / "whole", micro_batches, *settings, steps=2)
    train(tmp_path / "first", micro_batches, *settings, steps=1)
    resume = ("--ckpt_path", str(tmp_path / "first/quickstart/version_0/checkpoints/last.ckpt"))
    assert torch.equal(train(tmp_path / "rest", micro_batches, *settings, *resume, steps=2), expected)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "recorded", [pytest.param(1, marks=pytest.mark.sweep), pytest.param(2, marks=pytest.mark.slow)], indirect=True
)
def test_two_ranks_end_with_their_tape_as_one_does(recorded, tmp_path):
    micro_batches, tape, _ = recorded
    flags = ["--config", "configs/quickstart.yaml", "--config", "configs/strategies/ddp.yaml", *replay(tape)]
    flags += ["--trainer.devices", "2", "--trainer.accelerator", "cpu", "--trainer.max_steps", "9"]
    flags += ["--data.groups_per_step", "2", "--data.group_size", "2", "--data.validation.prompts.init_args.size", "8"]
    flags += ["--data.micro_batches_per_step", str(micro_batches), "--trainer.logger.init_args.save_dir", str(tmp_path)]
    ranks = start(ROOT / "scripts/train.py", flags, 2)
    said = " ".join(" ".join(finish(ranks, 250)).split())
    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert f"the tape has ended after {2 * STEPS} groups" in said
    assert f"optimizer steps │ {STEPS} " in said
    assert "SIGTERM" not in said
