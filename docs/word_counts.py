"""Words that a reader can read: of README, each page of docs/, CHANGELOG, CONTRIBUTING, configs/README and notebooks.

    python docs/word_counts.py

Code blocks, bars of tables, comments, addresses and targets of links do not count, and neither do the generated API
pages. Inline code counts: it is read.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
FIRST = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "configs/README.md")
FENCE = re.compile(r"^( *)```.*?^\1```", re.M | re.S)
NO_WORDS = (
    FENCE,  # code
    re.compile(r"<!--.*?-->|</?\w[^>]*>", re.S),  # comments and tags
    re.compile(r"^\[[^\]]+\]: \S+$", re.M),  # addresses of links
    re.compile(r"(?<=\])(?:\([^)\s]*\)|\[[^\]]*\])"),  # targets of links
    re.compile(r"https?://\S+"),
)
WORD = re.compile(r"\S*\w\S*")


def num_words(markdown: str) -> int:
    """Words of a page, as defined above."""
    for pattern in NO_WORDS:
        markdown = pattern.sub(" ", markdown)
    return len(WORD.findall(markdown.replace("|", " ")))


def text(path: Path) -> str:
    """A page's Markdown; of a notebook, that of its text cells."""
    content = path.read_text()
    if path.suffix != ".ipynb":
        return content
    cells = json.loads(content)["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def counts() -> dict[str, int]:
    """Words by file: what a reader opens first, then the pages."""
    pages = sorted(path for path in (ROOT / "docs").rglob("*") if path.suffix in (".md", ".ipynb"))
    paths = [*(ROOT / name for name in FIRST), *pages]
    return {str(path.relative_to(ROOT)): num_words(text(path)) for path in paths}


def main() -> None:
    """Prints the counts."""
    found = counts()
    for name, number in found.items():
        print(f"{number:7,}  {name}")
    pages = {name: number for name, number in found.items() if name.startswith("docs/")}
    print(f"{sum(pages.values()):7,}  {len(pages)} pages of docs/")
    print(f"{sum(found.values()):7,}  all")


if __name__ == "__main__":
    main()
