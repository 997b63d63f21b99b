"""The notebooks of the documentation run from the first cell to the last, with few steps.

That `rl.fit` works where a kernel runs them: tests/product/test_fit.py.
"""

import nbformat
import pytest
from markdown_blocks import ROOT

NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, process, tmp_path):
    cells = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert len(cells) > 3
    done = process.run([], tmp_path, {"NOTEBOOK_STEPS": "3"}, code="\n".join(cells), limit_s=150.0)
    assert done.status == 0, done.said


def test_notebooks_are_in_the_site_and_small():
    assert NOTEBOOKS
    navigation = (ROOT / "mkdocs.yml").read_text()
    for path in NOTEBOOKS:
        assert f"notebooks/{path.name}" in navigation
        assert path.stat().st_size < 200_000
