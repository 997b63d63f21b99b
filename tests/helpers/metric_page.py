"""The metrics that docs/metrics.md lists: name, unit, meaning, and the class that logs them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).parents[2] / "docs/metrics.md"
BLOCK = re.compile(r"<!-- metrics -->\n\|.+\n\|[-|]+\n(.+?)<!-- end -->", re.S)


class Metric(NamedTuple):
    """A row of the page; `<...>` in a name is a variable part."""

    name: str
    unit: str
    meaning: str

    @property
    def pattern(self) -> re.Pattern[str]:
        """Matches the logged names; `grad/*` and `gac/*` end in the optimizer's position if there are several."""
        pieces = re.split(r"<[^>]+>", self.name)
        return re.compile(".+".join(map(re.escape, pieces)) + (r"(/\w+)?" if self.name[:4] in ("grad", "gac/") else ""))


def _listed() -> dict[str, list[Metric]]:
    block = BLOCK.search(PAGE.read_text(encoding="utf-8"))
    assert block is not None, "docs/metrics.md has no table between <!-- metrics --> and <!-- end -->"
    metrics: dict[str, list[Metric]] = {}
    for row in block.group(1).splitlines():
        name, unit, meaning, source = (cell.strip() for cell in row.strip("|").split("|"))
        metrics.setdefault(source.strip("`"), []).append(Metric(name.strip("`"), unit, meaning))
    return metrics


METRICS = _listed()


def find(name: str) -> list[Metric]:
    """Rows that match a logged name; several callbacks may log the same one."""
    return [metric for metrics in METRICS.values() for metric in metrics if metric.pattern.fullmatch(name)]
