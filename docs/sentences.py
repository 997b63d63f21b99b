"""Sentences of README, docs/ and the package's messages, drawn by a seed, to be read by somebody who is new to them.

    python docs/sentences.py --seed 0 --num 50

Each stands alone under its page and heading, or its file. A sentence that has to be read twice is to be rewritten.
"""

from __future__ import annotations

import argparse
import ast
import random
import re
from collections.abc import Iterator
from pathlib import Path

from word_counts import NO_WORDS, ROOT, num_words, text

MIN_WORDS = 6
SENTENCE = re.compile(r"(?<=[.!?:])\s+(?=[A-Z`*])")
SAID_BY = {"warn", "warning", "info", "error", "print", "rank_zero_warn"}


def of_page(path: Path) -> Iterator[tuple[str, str]]:
    """(heading, sentence) of a page, without code, tables and link targets."""
    content = text(path)
    for pattern in NO_WORDS:
        content = pattern.sub(" ", content)
    heading = path.name
    for block in re.split(r"\n\s*\n|\n(?=[*#|-] )", content):
        block = block.strip()
        if block.startswith("#"):
            heading, _, block = block.partition("\n")
        if block.startswith("|") or not block:
            continue
        for sentence in SENTENCE.split(" ".join(block.lstrip("*- ").split())):
            yield f"{path.name}: {heading.lstrip('# ')}", sentence.replace("[", "").replace("]", "")


def of_messages(path: Path) -> Iterator[tuple[str, str]]:
    """(file, message) for each error that is raised and each line that is logged or printed."""
    for node in ast.walk(ast.parse(path.read_text())):
        said = node.exc if isinstance(node, ast.Raise) else node
        if not isinstance(said, ast.Call) or not said.args:
            continue
        name = getattr(said.func, "attr", getattr(said.func, "id", ""))
        if isinstance(node, ast.Raise) or name in SAID_BY:
            yield str(path.relative_to(ROOT)), _shown(said.args[0])


def _shown(value: ast.expr) -> str:
    """The text of a literal; each inserted value is `…`."""
    if isinstance(value, ast.Constant):
        return re.sub(r"%[.\d]*[a-z]", "…", value.value) if isinstance(value.value, str) else ""
    if isinstance(value, ast.JoinedStr):
        return "".join(_shown(part) for part in value.values)
    return "…" if isinstance(value, ast.FormattedValue) else ""


def sentences() -> list[tuple[str, str]]:
    """All of them, with where they stand."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    files = [path for folder in ("lit_async_rl", "callbacks") for path in sorted((ROOT / folder).rglob("*.py"))]
    found = [item for path in pages for item in of_page(path)]
    found += [item for path in files if not path.is_symlink() for item in of_messages(path)]
    return [(where, sentence) for where, sentence in found if num_words(sentence) >= MIN_WORDS]


def main() -> None:
    """Prints a sample."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num", type=int, default=50)
    given = parser.parse_args()
    for number, (where, sentence) in enumerate(random.Random(given.seed).sample(sentences(), given.num), 1):
        print(f"{number}. ({where}) {sentence}")


if __name__ == "__main__":
    main()
