"""All callbacks at once on two ranks, also where one of them has nothing to train on: nothing hangs, nothing is NaN."""

import json
from pathlib import Path

import pytest
from blended_runs import blended
from distributed_battery import BLEND
from flow import parameters
from launch import launch

SCRIPT = Path(__file__).parents[1] / "helpers" / "distributed_battery.py"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_ranks_with_all_callbacks(tmp_path):
    _, shares, module = blended()
    weights = parameters(module).tolist()
    (tmp_path / BLEND).write_text(json.dumps({"shares": shares, "weights": weights}))
    launch(SCRIPT, [str(tmp_path)], 2, timeout_s=240)
