"""The acceptance of a GPU, rehearsed: what a kill interrupts goes on where it was."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "benchmarks/gpu_acceptance", "--device", "cpu", "--only", "shapes", "--output"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_check_goes_on_with_the_parts_that_are_missing(tmp_path):
    output = tmp_path / "gpu.json"
    parts = tmp_path / "gpu.parts.jsonl"
    with subprocess.Popen([*COMMAND, str(output)], cwd=ROOT, stdout=subprocess.PIPE) as running:
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline and (not parts.exists() or len(parts.read_text().splitlines()) < 2):
            time.sleep(0.05)
        running.send_signal(signal.SIGKILL)
    before = parts.read_text().splitlines()
    assert len(before) >= 2
    time.sleep(1)  # the check has ended with its parent: it would go on writing
    assert len(parts.read_text().splitlines()) <= len(before) + 1
    done = subprocess.run([*COMMAND, str(output)], cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    after = parts.read_text().splitlines()
    assert after[: len(before)] == before
    names = [json.loads(line)["part"] for line in after]
    assert len(names) == len(set(names)) == 19  # five shapes; of the largest, adapters alone are trained
    (result,) = json.loads(output.read_text())["results"]
    assert result["ok"]
    assert result["numbers"]["Qwen2.5-7B, LoRA: tokens_per_s"] > 0
