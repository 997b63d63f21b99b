"""Two processes see and do what one does, under DDP, FSDP1, FSDP2 and tensor parallelism."""

import json
from pathlib import Path

import pytest
from launch import launch

SCRIPT = Path(__file__).parents[1] / "helpers" / "distributed_stabilizers.py"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_cosine_norm_ess_projection_and_weights_equal_a_single_process(tmp_path):
    launch(SCRIPT, [str(tmp_path / "one.json")], 1, timeout_s=150)
    launch(SCRIPT, [str(tmp_path / "two.json")], 2, timeout_s=200)
    one, two = (json.loads((tmp_path / name).read_text()) for name in ("one.json", "two.json"))
    for name in [name for name in two if name.endswith("rollback")]:
        assert two.pop(name) == pytest.approx(one["rollback"], rel=1e-4, abs=1e-5), name
    assert len(two) == 10  # five strategies, with and without accumulation
    for name, result in two.items():
        expected = one[f"single-{name[-1]}"]
        assert result["weights"] == pytest.approx(expected["weights"], rel=1e-5, abs=1e-6), name
        for step, single in zip(result["steps"], expected["steps"], strict=True):
            assert step == pytest.approx(single, rel=1e-5, abs=1e-6), name
    regimes = {step["gac/regime"] for result in two.values() for step in result["steps"]}
    assert regimes >= {0.0, 1.0, 2.0}, "the comparison should have seen every regime"
