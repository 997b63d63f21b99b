"""The acceptance of a GPU, rehearsed: what a kill interrupts goes on where it was."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "benchmarks/gpu_acceptance", "--device", "cpu", "--only", "generate", "--output"]


@pytest.mark.slow
@pytest.mark.timeout(600)
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
    done = subprocess.run([*COMMAND, str(output)], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    after = parts.read_text().splitlines()
    assert after[: len(before)] == before
    names = [json.loads(line)["part"] for line in after]
    assert len(names) == len(set(names)) == 4  # with and without graphs; both caches of transformers
    (result,) = json.loads(output.read_text())["results"]
    assert result["ok"]
    assert result["numbers"]["generate, static cache: tokens_per_s"] > 0
