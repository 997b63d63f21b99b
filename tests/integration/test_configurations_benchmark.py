"""The table of all overlays: it leaves out none, and names those that end below the plain run or do not end at all."""

import json
import os
import subprocess
import sys
import time

import psutil
import pytest
from markdown_blocks import ROOT

from benchmarks.configurations import CONFIGS, ELSEWHERE, PLAIN, Cell, overlays, table


def test_every_overlay_is_in_the_table_or_has_a_reason(monkeypatch):
    monkeypatch.chdir(ROOT)
    files = [path for part in ("stabilizers", "systems", "strategies") for path in (CONFIGS / part).glob("*.yaml")]
    named = {str(path.relative_to(CONFIGS).with_suffix("")) for path in files}
    assert named - set(overlays()) <= set(ELSEWHERE)
    assert all((CONFIGS / f"{name}.yaml").is_file() for name in [*overlays(), *ELSEWHERE])


@pytest.mark.parametrize(("accuracy", "is_below"), [(0.80, True), (0.89, False), (0.95, False)])
def test_an_overlay_below_the_plain_run_is_named(accuracy, is_below, tmp_path):
    cells = [Cell(name, seed, 200) for seed in range(3) for name in (PLAIN, "lora")]
    for cell in cells:
        found = {"error": None, "wall_s": 50.0, "held_out": [0.37, 0.90 if cell.overlay == PLAIN else accuracy]}
        (tmp_path / cell.folder).mkdir(parents=True)
        (tmp_path / cell.folder / "result.json").write_text(json.dumps(found))
    rows, broken = table(cells, tmp_path)
    assert [row[:4] for row in rows] == [
        [PLAIN, "3", "0.900", "+0.000"],
        ["lora", "3", f"{accuracy:.3f}", f"{accuracy - 0.9:+.3f}"],
    ]
    assert bool(broken) == is_below


def test_a_run_that_failed_is_named(tmp_path):
    cells = [Cell(PLAIN, 0, 200), Cell("lora", 0, 200)]
    for cell, error in zip(cells, (None, "RuntimeError: exit status 1"), strict=True):
        (tmp_path / cell.folder).mkdir(parents=True)
        found = {"error": error, "wall_s": 50.0, "held_out": [0.9]}
        (tmp_path / cell.folder / "result.json").write_text(json.dumps(found))
    assert table(cells, tmp_path)[1] == ["lora seed 0: RuntimeError: exit status 1"]


@pytest.mark.slow
def test_training_ends_with_its_grid(tmp_path):
    code = "import sys; from pathlib import Path; from benchmarks.common.grid import Grid; "
    code += "from benchmarks.configurations import Cell, run_cell; "
    code += "Grid(run_cell, Path(sys.argv[1]), 1, 99.0).run([Cell('quickstart', 0, 200)])"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    grid = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, env=environment)
    until = time.monotonic() + 60
    while not (training := [one for one in psutil.Process(grid.pid).children(recursive=True) if _trains(one)]):
        assert time.monotonic() < until
        time.sleep(0.1)
    grid.kill()
    grid.wait()
    _, alive = psutil.wait_procs(training, timeout=10)
    for one in alive:
        one.kill()
    assert not alive


def _trains(process: psutil.Process) -> bool:
    try:
        return "scripts/train.py" in process.cmdline()
    except psutil.Error:
        return False
