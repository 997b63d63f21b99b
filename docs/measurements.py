"""Measurements in the documentation: `docs/measurements/NAME.json`, and the tables that pages make of them.

A file has `name`, `value`, `unit`, `interval` (null, or the two limits), `command`, `commit`, `date`, `machine` and, where
there is more than one number, `table` with `columns` and `rows`. A page shows it between `<!-- measurement: NAME -->` and
`<!-- end -->`. `python docs/measurements.py` writes the text in between; the site is built with it and a test compares it.
`<!-- measurement: NAME | a column | another one -->` shows these columns only, and links to the file for the rest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs/measurements"
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
KEYS = {"name", "value", "unit", "interval", "command", "commit", "date", "machine"}
BLOCK = re.compile(
    r"(?<=<!-- measurement: )(?P<name>\w+)(?P<columns>(?: \| [^|\n]+?)*) -->\n.*?(?=<!-- end -->)",
    re.S,
)


def load(name: str) -> dict[str, Any]:
    """One measurement.

    Raises:
        ValueError: a key is missing, or the name is not that of the file.
    """
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    if missing := KEYS - set(found):
        raise ValueError(f"{name}.json lacks {sorted(missing)}")
    if found["name"] != name:
        raise ValueError(f"{name}.json has the name {found['name']!r}")
    return found


def show(value: Any) -> str:
    """A cell: numbers with separators."""
    return f"{value:,}" if isinstance(value, (int, float)) else str(value)


def render(found: dict[str, Any], shown: Sequence[str] = ()) -> str:
    """Table and source of one measurement, as Markdown.

    Args:
        found: the measurement.
        shown: names of the columns to show; all if empty.

    Raises:
        ValueError: the measurement has no such column.
    """
    columns, rows = [found["unit"]], [[found["value"]]]
    if "table" in found:
        columns, rows = found["table"]["columns"], found["table"]["rows"]
    if unknown := set(shown) - set(columns):
        raise ValueError(f"{found['name']}.json has no column {sorted(unknown)}")
    if shown:
        indices = [columns.index(name) for name in shown]
        columns, rows = list(shown), [[row[index] for index in indices] for row in rows]
    head, *body = ["| " + " | ".join(show(cell) for cell in line) + " |" for line in (columns, *rows)]
    table = "\n".join([head, "|---" * len(columns) + "|", *body])
    if shown:
        return f"\n{table}\n\n<small>[All columns, command, commit and machine](measurements/{found['name']}.json)</small>\n\n"
    source = f"`{found['command']}`, commit {found['commit']}, {found['date']}, {found['machine']}."
    if found["interval"]:
        low, high = found["interval"]
        source += f" {found['unit'].capitalize()}: {found['value']}, 95 % interval {low} to {high}."
    return f"\n{table}\n\n<small>{source}</small>\n\n"


def fill(markdown: str) -> str:
    """A page with its tables made anew."""

    def block(match: re.Match[str]) -> str:
        shown = match["columns"].split(" | ")[1:]
        return f"{match['name']}{match['columns']} -->\n{render(load(match['name']), shown)}"

    return BLOCK.sub(block, markdown)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(fill(page.read_text()))
