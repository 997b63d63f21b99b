"""Measurements as `docs/measurements.py` reads them: one JSON file each in docs/measurements."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def measurement(
    name: str,
    value: float,
    unit: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[Any]],
    *,
    command: str,
    machine: str,
    interval: Sequence[float] | None = None,
    commit: str = "",
    date: str = "",
    **more: Any,
) -> dict[str, Any]:
    """Headline and table of a benchmark.

    Args:
        name: of the file and in the pages that show it.
        value: headline.
        unit: of the headline.
        columns: of the table.
        rows: of the table.
        command: that measures it again.
        machine: and what else ran on it.
        interval: limits of the headline; None if they were not measured.
        commit: that was measured; empty is the one that is checked out.
        date: empty is today.
        more: further entries, which no page shows.
    """
    commit = commit or checked_out()
    found = dict(name=name, value=value, unit=unit, interval=interval, command=command, commit=commit)
    found |= dict(date=date or time.strftime("%Y-%m-%d"), machine=machine)
    return found | {"table": {"columns": list(columns), "rows": list(rows)}} | more


def checked_out() -> str:
    """Short name of the commit that is checked out; empty outside of a git repository."""
    git = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(git, cwd=ROOT, capture_output=True, text=True, timeout=60).stdout.strip()


def write_measurement(path: Path, found: dict[str, Any]) -> None:
    """Writes a measurement; makes the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
