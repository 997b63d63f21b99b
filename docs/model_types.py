"""Table of model types in `docs/models.md`, from `docs/model_types.json`, which `tests/helpers/every_family.py` writes."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

FILE = Path(__file__).with_name("model_types.json")
MARK = "<!-- model types -->"
PARTS = ("trainer", "packing", "engine")


def table() -> str:
    """Model types that are right everywhere, and the refusals of all others."""
    found = json.loads(FILE.read_text())
    rows = defaultdict(list)
    for name, parts in sorted(found["types"].items()):
        rows[tuple(parts[part] or "right" for part in PARTS)].append(f"`{name}`")
    lines = ["| model types | trainer | prefix trees, or why rows | embedded engine |", "|---|---|---|---|"]
    for reasons, names in sorted(rows.items(), key=lambda row: -len(row[1])):
        lines.append(f"| {', '.join(names)} | " + " | ".join(reasons) + " |")
    head = f"{len(found['types'])} model types of transformers {found['transformers']}, tiny and with random weights:"
    return "\n".join([head, "", *lines])


def fill(markdown: str) -> str:
    """A page with the table in its place."""
    return markdown.replace(MARK, table()) if MARK in markdown else markdown
