"""A process group that exists before the run: used, or refused by name, and never waited for without an end."""

from pathlib import Path

import pytest
from launch import finish, start

SCRIPT = Path(__file__).parents[1] / "helpers" / "distributed_meeting.py"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


def run(kind, folder, limit_s=100.0):
    ranks = start(SCRIPT, [kind, str(folder), str(limit_s)], 2)
    said = finish(ranks, 150)
    return [rank.returncode for rank in ranks], said


@pytest.mark.parametrize(("kind", "fits"), [("exists", 1), ("second fit", 2)])
def test_it_is_used(kind, fits, tmp_path):
    status, said = run(kind, tmp_path)
    assert status == [0, 0], said
    for text in said:
        assert text.count("trained 2 steps on gloo") == fits
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {f"version_{n}" for n in range(fits)}


REFUSED = {
    "no cpu": r"ValueError: accelerator: the existing process group (cuda:gloo) handles",
    "one device": "ValueError: torchrun has started 2 processes, but devices=1",
    "disagree": "ValueError: all ranks must have the same settings: learning_rate is 0.0001 on rank 0 and 0.0002 "
    "on rank 1; max_steps is 2 on rank 0 and 3 on rank 1",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_one_that_cannot_be_used_is_refused_on_both_ranks(kind, tmp_path):
    status, said = run(kind, tmp_path)
    assert status == [1, 1], said
    for text in said:
        assert REFUSED[kind] in text
    assert not list(tmp_path.rglob("*.ckpt"))


def test_a_last_checkpoint_that_is_lost_leaves_no_rank_waiting(tmp_path):
    status, said = run("full disk", tmp_path)
    assert status == [1, 0], said
    assert "LastCheckpointError: " in said[0]
    assert "held-out accuracy before, after" in said[0]
    assert "trained 2 steps" in said[1]


def test_a_rank_that_does_not_come_is_named(tmp_path):
    ranks = start(SCRIPT, ["none comes", str(tmp_path), "3"], 2)
    try:
        said, _ = ranks[0].communicate(timeout=100)
        assert ranks[0].returncode == 1
        assert "RankError: rank 1 did not join the other ranks within data.limits.start_timeout_s=3" in said
    finally:
        for rank in ranks:
            rank.kill()
