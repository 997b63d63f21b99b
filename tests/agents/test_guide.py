"""The guide's script learns its task, word for word."""

import os
import re
import subprocess
import sys

import pytest
from markdown_blocks import ROOT, blocks_of


@pytest.mark.sweep
@pytest.mark.timeout(900)  # two minutes of processor time, and the machine may be busy
def test_the_agent_of_the_guide_learns(tmp_path):
    (block,) = [one for one in blocks_of(ROOT / "docs/agents.md") if one.module == "my_agent"]
    (tmp_path / "my_agent.py").write_text(block.code)
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "my_agent.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=840,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    accuracy = re.search(r"held-out accuracy before, after\D*([\d.]+)\D+([\d.]+)", done.stdout)
    assert accuracy is not None, done.stdout[-3000:]
    before, after = map(float, accuracy.groups())
    assert before < 0.5
    assert after > before + 0.2
