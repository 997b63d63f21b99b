"""`rl.fit` keeps others out of its folder, and ends cleanly at Ctrl-C; in a notebook, too, with its default bar."""

from __future__ import annotations

import re
import signal
import time

import nbformat
import pytest
from launch import start
from nbclient import NotebookClient
from preloaded import ROOT

PRELUDE = """
import lit_async_rl as rl
ROWS = [{"prompt": f"{n}=", "answer": str(n)} for n in range(10, 30)]
SMALL = dict(groups_per_step=2, group_size=2, sampling=rl.SamplingParams(max_tokens=4), accelerator="cpu", devices=1)
def reward(prompt, completion):
    return float(len(completion) % 2)
"""
FOR_LONG = """
rl.fit(rl.asset("small_sort_policy"), ROWS, reward, max_steps=10**6, enable_progress_bar=False, **SMALL)
"""
IN_THE_SAME_FOLDER = """
log = rl.CSVLog("runs", name="", version=0)
rl.fit(rl.asset("small_sort_policy"), ROWS, reward, max_steps=1, enable_progress_bar=False, logger=log, **SMALL)
"""
AGAIN = """
import sys
rl.fit(rl.asset("small_sort_policy"), ROWS, reward, max_steps=int(sys.argv[1]), ckpt_path=sys.argv[2], **SMALL)
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ctrl_c_saves_says_how_to_resume_and_prints_the_summary(process, tmp_path, monkeypatch):
    (tmp_path / "long.py").write_text(PRELUDE + FOR_LONG)
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (running,) = start(tmp_path / "long.py", [], 1)
    try:
        metrics = folder / "runs/version_0/metrics.csv"
        while not (metrics.exists() and metrics.stat().st_size):
            assert running.returncode is None, running.communicate(1.0)
            time.sleep(0.05)
        other = process.run([], folder, code=PRELUDE + IN_THE_SAME_FOLDER)
        assert other.status == 1
        assert re.search(rf"OSError: .*runs/version_0' is in use by process {running.pid}", other.said), other.said
        running.send_signal(signal.SIGINT)
        said, _ = running.communicate(timeout=100)
    finally:
        running.kill()
    assert running.returncode == 130, said
    assert "Traceback" not in said
    assert "run summary" in said
    step = int(re.search(r"Ctrl-C: saved \S+/last\.ckpt after step (\d+)", said)[1])
    checkpoint = re.search(r"resume with: fit\(\.\.\., ckpt_path='(\S+/last\.ckpt)'\)", said)[1]
    resumed = process.run([str(step + 2), checkpoint], folder, code=PRELUDE + AGAIN)
    assert resumed.status == 0, resumed.said
    assert re.search(r"optimizer steps\s*│ 2 ", resumed.said)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_notebook_trains_with_the_default_bar(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    train = 'trainer = rl.fit(rl.asset("small_sort_policy"), ROWS, reward, max_steps=2, **SMALL)\ntrainer.global_step'
    cells = [nbformat.v4.new_code_cell(cell) for cell in (PRELUDE, train, train)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=180, kernel_name="python3", resources=resources).execute()
    for cell in notebook.cells:
        shown = [output for output in cell.outputs if output.output_type in ("stream", "display_data")]
        text = "".join(one.get("text") or one.data.get("text/plain", "") for one in shown)  # rich displays its tables
        assert not re.search(r"RecursionError|Warning|weights_only|Total length", text), text
        if cell.source == PRELUDE:
            continue
        assert "run summary" in text
        assert [one.data["text/plain"] for one in cell.outputs if one.output_type == "execute_result"] == ["2"]
