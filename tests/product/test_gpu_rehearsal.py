"""The acceptance of a GPU, rehearsed: what a kill interrupts goes on where it was."""

import json
import time
from pathlib import Path

import pytest
from launch import launch, start

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks/gpu_acceptance/__main__.py"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_check_goes_on_with_the_parts_that_are_missing(tmp_path):
    output = tmp_path / "gpu.json"
    parts = tmp_path / "gpu.parts.jsonl"
    flags = ["--device", "cpu", "--only", "generate", "--output", str(output)]
    (running,) = start(SCRIPT, flags, 1)
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and (not parts.exists() or len(parts.read_text().splitlines()) < 2):
        time.sleep(0.05)
    running.kill()
    running.communicate(30.0)
    before = parts.read_text().splitlines()
    assert len(before) >= 2
    time.sleep(1)  # the check has ended with its parent: it would go on writing
    assert len(parts.read_text().splitlines()) <= len(before) + 1
    launch(SCRIPT, flags, 1, timeout_s=200)
    after = parts.read_text().splitlines()
    assert after[: len(before)] == before
    names = [json.loads(line)["part"] for line in after]
    assert len(names) == len(set(names)) == 4  # with and without graphs; both caches of transformers
    (result,) = json.loads(output.read_text())["results"]
    assert result["ok"]
    assert result["numbers"]["generate, static cache: tokens_per_s"] > 0
