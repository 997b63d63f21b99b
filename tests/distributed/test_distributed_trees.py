"""Rollouts with branches, in trees and in rows: the step of two processes is that of one."""

import json
from pathlib import Path

import pytest
from launch import launch

SCRIPT = Path(__file__).parents[1] / "helpers" / "distributed_trees.py"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_step_of_two_processes_is_that_of_one(tmp_path):
    launch(SCRIPT, [str(tmp_path / "one.json")], 1, timeout_s=100)
    launch(SCRIPT, [str(tmp_path / "two.json")], 2, timeout_s=180)
    one, two = (json.loads((tmp_path / name).read_text()) for name in ("one.json", "two.json"))
    for objective in ("opob", "gspo"):
        expected = one[f"{objective}-rows"]
        for found in (one[f"{objective}-trees"], two[f"{objective}-rows"], two[f"{objective}-trees"]):
            assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert one["opob-rows"] != pytest.approx(one["gspo-rows"], rel=1e-5, abs=1e-6)
