"""Commands that measure timeline, report and an engine's own process write what the pages show: `make test-sweep`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KEYS = {"name", "value", "unit", "interval", "command", "commit", "date", "machine"}


def measured(out: Path, *call: str) -> dict:
    """What a benchmark writes, and prints."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *call, "--output", str(out)]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=1200)
    found = json.loads(out.read_text())
    assert set(found) >= KEYS
    return found


def test_what_is_measured_inside_is_there():
    """Methods are named in text there; the measurements themselves run before a release only."""
    from benchmarks.performance import decode_parts, stale_data_monitors, timeline

    parts = (*decode_parts.PARTS.values(), *stale_data_monitors.PARTS.values(), timeline.OWN)
    named = [pair for part in parts for pair in part]
    assert len(named) > 15
    assert [f"{owner.__name__}.{name}" for owner, name in named if not hasattr(owner, name)] == []


@pytest.mark.sweep
@pytest.mark.timeout(1300)
def test_the_cost_of_the_timeline(tmp_path):
    """Three times what the page says is allowed: a busy machine has cold caches."""
    flags = ("--pairs", "1", "--stretch", "1", "--steps", "3", "--runs", "1")
    found = measured(tmp_path / "x.json", "benchmarks/performance/timeline.py", *flags)
    assert found["name"] == "timeline"
    assert 0 < found["value"] < 1.5
    print(json.dumps(found, indent=2))


@pytest.mark.sweep
@pytest.mark.timeout(1300)
def test_the_cost_of_watching_stale_data(tmp_path):
    command = ("benchmarks/performance/stale_data_monitors.py", "--steps", "3", "--seeds", "0")
    found = measured(tmp_path / "x.json", *command)
    assert found["name"] == "x"
    assert [row[0] for row in found["table"]["rows"]][-1] == "together"
    assert all(row[1] != "0.00 ms" for row in found["table"]["rows"]), "each part was called"
    assert 0 < found["value"] < 5


@pytest.mark.sweep
@pytest.mark.timeout(1300)
def test_the_cost_of_the_report(tmp_path):
    browser = pytest.importorskip("browser", reason="selenium is not installed")
    if not browser.is_there and not browser.IS_NEEDED:
        pytest.skip(browser.MISSING)
    found = measured(tmp_path / "x.json", "benchmarks/performance/report.py", "--steps", "200", "--rollouts", "16")
    assert found["name"] == "report"
    assert found["value"] < 60
    rows = dict(found["table"]["rows"])
    assert {"processor time", "time", "peak memory", "size"} <= set(rows)
    assert len([name for name in rows if "interactions" in name]) == 4
    print(json.dumps(found, indent=2))


@pytest.mark.sweep
@pytest.mark.timeout(1300)
def test_what_a_process_of_its_own_saves(tmp_path):
    flags = ("--rounds", "1", "--num_steps", "7")
    found = measured(tmp_path / "x.json", "benchmarks/performance/own_process.py", *flags)
    assert found["name"] == "own_process"
    assert found["value"] > 0.3, "a busy machine may give it less than it costs"
    assert found["table"]["rows"][0][3] == 1.0
