"""A sample of `tests/reliability/kill_matrix.py`: a run that is killed, and killed again after its resume."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMBOS = ["micro_batches=2,weight_sync_steps=3,source=replay buffer", "micro_batches=4,source=streamed,evaluation=True"]
MOMENTS = ["checkpoint written", "first micro-batch", "between micro-batches"]


@pytest.mark.slow
@pytest.mark.timeout(600)  # a minute and a half of processor time, and the machine may be busy
def test_runs_that_are_killed_three_times_are_those_without_kills_to_the_bit(tmp_path):
    command = [sys.executable, "tests/reliability/kill_matrix.py", "--kills", "6", "--steps", "12"]
    command += ["--combo", *COMBOS, "--moments", *MOMENTS, "--folder", str(tmp_path / "runs")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=560)
    assert done.returncode == 0, done.stdout + done.stderr
