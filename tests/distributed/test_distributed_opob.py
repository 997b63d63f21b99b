"""The optimal baseline of two processes is that of one, whatever shards the policy."""

import json
from pathlib import Path

import pytest
from launch import launch

SCRIPT = Path(__file__).parents[1] / "helpers" / "distributed_opob.py"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_weights_after_two_steps_equal_a_single_process(tmp_path):
    launch(SCRIPT, [str(tmp_path / "one.json")], 1, timeout_s=100)
    launch(SCRIPT, [str(tmp_path / "two.json")], 2, timeout_s=180)
    one, two = (json.loads((tmp_path / name).read_text()) for name in ("one.json", "two.json"))
    assert len(two) == 14  # three strategies, norms of single trajectories under DDP, with and without accumulation
    for name, weights in two.items():
        _, norms, num_parts = name.split("-")
        assert weights == pytest.approx(one[f"single-{norms}-{num_parts}"], rel=1e-5, abs=1e-6), name
    for num_parts in (2, 4):
        ghost, slow = one[f"single-ghost-{num_parts}"], one[f"single-per_trajectory-{num_parts}"]
        assert ghost == pytest.approx(slow, rel=1e-5, abs=1e-6)
