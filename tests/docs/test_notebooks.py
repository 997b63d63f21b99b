"""The notebooks of the documentation run from the first cell to the last, with few steps."""

import nbformat
import pytest
from markdown_blocks import ROOT
from nbclient import NotebookClient

NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, monkeypatch):
    monkeypatch.setenv("NOTEBOOK_STEPS", "3")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=150, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}}).execute()


def test_notebooks_are_in_the_site_and_small():
    assert NOTEBOOKS
    navigation = (ROOT / "mkdocs.yml").read_text()
    for path in NOTEBOOKS:
        assert f"notebooks/{path.name}" in navigation
        assert path.stat().st_size < 200_000
