"""The table of docs/lightning.md, from tests/product/lightning_features.yaml, whose rows a test runs.

`python docs/lightning_table.py` writes it.
"""

from __future__ import annotations

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "tests/product/lightning_features.yaml"
PAGE = ROOT / "docs/lightning.md"
BLOCK = re.compile(r"(?<=<!-- lightning -->\n).*?(?=<!-- end -->)", re.S)
CODE = re.compile(r"^[\w.]+\(?.*=.*\)?$|^[a-z]\w*_\w+$|^\w+\.\w+$|^[A-Z]\w+$|^\w+\(\w+\)$")


def table() -> str:
    """Markdown: feature, whether it works, and a line about it."""
    rows = ["| feature | | |", "|---|---|---|"]
    for row in yaml.safe_load(SOURCE.read_text()):
        feature = f"`{row['feature']}`" if CODE.match(row["feature"]) else row["feature"]
        rows.append(f"| {feature} | {row['is']} | {row['line']} |")
    return "\n" + "\n".join(rows) + "\n\n"


def filled(text: str) -> str:
    """The page with the present table."""
    return BLOCK.sub(lambda _: table(), text)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
