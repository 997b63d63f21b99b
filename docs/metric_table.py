"""The table of docs/metrics.md, from the list in the code. `python docs/metric_table.py` writes it; a test compares."""

from __future__ import annotations

import re
from pathlib import Path

from lit_async_rl.callbacks.metric_names import table

PAGE = Path(__file__).parent / "metrics.md"
BLOCK = re.compile(r"(?<=<!-- metrics -->\n).*?(?=<!-- end -->)", re.S)


def filled(text: str) -> str:
    """The page with the present table."""
    return BLOCK.sub(lambda _: table(), text)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
