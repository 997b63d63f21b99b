"""Two processes fine-tune as one does, with rows that no rank or micro-batch has as many tokens of as another."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launch import launch

SCRIPT = Path(__file__).parents[1] / "helpers" / "sharded_tuning.py"


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    path = tmp_path_factory.mktemp("single") / "single.json"
    launch(SCRIPT, ["single", str(path)], 1, timeout_s=200)
    return json.loads(path.read_text())


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_processes_reach_the_losses_of_one(strategy, single, tmp_path):
    launch(SCRIPT, [strategy, str(tmp_path / "two.json")], 2, timeout_s=200)
    two = json.loads((tmp_path / "two.json").read_text())
    for packing, one in single.items():
        assert len(one["steps"]) == 8
        for found, expected in zip(two[packing]["steps"], one["steps"], strict=True):
            assert found[:2] == pytest.approx(expected[:2], rel=1e-5)
            assert found[2] == pytest.approx(expected[2], rel=1e-4)  # its error is that of float32 over all steps
        assert two[packing]["held_out"] == pytest.approx(one["held_out"], rel=1e-5)
    assert one["steps"][0][0] > one["steps"][-1][0], "it should have learned something"
