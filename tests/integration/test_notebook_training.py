"""Training in a notebook, with Lightning's default progress bar, and a second Trainer for the same data module."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

CELLS = [
    """
import lightning.pytorch as pl
from lit_async_rl import PolicyModule, RolloutDataModule, SortDigits, WeightSync
from lit_async_rl.assets import asset
from lit_async_rl.rewards.functions import exact_match
model = asset("small_sort_policy")
data = RolloutDataModule(model, SortDigits(8, size=100), exact_match, groups_per_step=2, group_size=2)
settings = dict(max_steps=2, accelerator="cpu", logger=False, enable_checkpointing=False)
""",
    """
first = pl.Trainer(callbacks=[WeightSync()], **settings)
first.fit(PolicyModule(model), data)
print(type(first.progress_bar_callback).__name__, first.global_step)
""",
    """
second = pl.Trainer(callbacks=[WeightSync()], **settings)
second.fit(PolicyModule(model), data)
print("second", second.global_step)
""",
]


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_it_trains_twice(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    NotebookClient(notebook, timeout=120).execute()
    outputs = [output for cell in notebook.cells for output in cell.outputs]
    printed = "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")
    assert "RichProgressBar 2" in printed
    assert "second 2" in printed
    assert "Total length of" not in str(outputs)
