"""The runs of the tables in `docs/results`, and how the page shows them."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import pandas as pd

from benchmarks.staleness.statistics import per_cell
from benchmarks.staleness.table import read_table

FOLDER = Path(__file__).parents[2] / "docs/results"


@cache
def runs_of(name: str) -> pd.DataFrame | None:
    """The runs of a table, None where there is no such table yet."""
    path = FOLDER / f"{name}.parquet"
    return per_cell(read_table(path)) if path.is_file() else None


def pm(value: float, half: float, digits: int = 2) -> str:
    """A value with half of its interval, where there is one."""
    return f"{value:.{digits}f}" + ("" if math.isnan(half) else f" ± {half:.{digits}f}")


def markdown(head: list[str], rows: list[list[str]]) -> str:
    """A table."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows))
