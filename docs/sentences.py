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

from word_counts import FENCE, NO_WORDS, ROOT, num_words, text

MIN_WORDS = 6
SENTENCE = re.compile(
    r"(?<=[.!?])\s+(?=[A-Z`*±†\[]|lit-async)|(?<=[.!?]\*\*)\s+|(?<=[.!?]\))\s+(?=[A-Z`*±†\[]|lit-async)"
)
BLOCK = re.compile(r"\n\s*\n|\n(?=(?:[*#|-]|\d+\.) )")
ITEM = re.compile(r"(?:[*-]|\d+\.)\s+")
NO_SENTENCES = re.compile(r"<small>.*?</small>|!\[[^\]]*\]\([^)]*\)", re.S)  # sources of tables, pictures
CODE = re.compile(r"`(?:[^`\n]|\n(?!\s*\n))+`")  # may span lines; an address, a tag or brackets in it are text
HIDDEN = str.maketrans("<[]:", "\0\1\2\3")
SHOWN = str.maketrans("\0\1\2\3", "<[]:")
SAID_BY = {"warn", "warning", "info", "error", "print", "rank_zero_warn"}


def of_page(path: Path) -> Iterator[tuple[str, str]]:
    """(heading, sentence) of a page, without code, tables and link targets.

    A sentence that a list completes (its items begin in lower case) has the items; a label in bold type stays with the
    sentence behind it.
    """
    content = FENCE.sub("\n\n|\n\n", NO_SENTENCES.sub(" ", text(path)))
    content = CODE.sub(lambda code: code[0].translate(HIDDEN), content)
    for pattern in NO_WORDS:
        content = pattern.sub("", content)
    heading, begun = path.name, ""
    for block in [*BLOCK.split(content), "|"]:
        block = block.strip()
        item = ITEM.sub("", block, count=1) if ITEM.match(block) else block
        if begun and not (item != block and item[:1].islower()):
            yield from ((f"{path.name}: {heading}", sentence) for sentence in _split(begun))
            begun = ""
        if block.startswith("#"):
            heading, _, item = block.partition("\n")
            heading = heading.lstrip("# ").translate(SHOWN)
        if not block.startswith("|"):
            begun += f" {item}"


def _split(block: str) -> Iterator[str]:
    """The sentences of a paragraph or item; a short label, or a question, stays with what follows it."""
    label = ""
    for part in SENTENCE.split(" ".join(block.split())):
        sentence = f"{label} {part}".strip()
        is_label = part.endswith("?**") or (part.endswith("**") and num_words(sentence) < MIN_WORDS)
        label = sentence if is_label or sentence.count("**") % 2 else ""
        if not label:
            yield _without_brackets(sentence)
    if label:
        yield _without_brackets(label)


def _without_brackets(sentence: str) -> str:
    """A sentence with the text of its links; brackets of code stay."""
    return re.sub(r"[\[\]]", "", sentence).translate(SHOWN)


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
        return re.sub(r"%[.\d]*[a-z]", "…", value.value).replace("%%", "%") if isinstance(value.value, str) else ""
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
    known = sentences()
    for number, (where, sentence) in enumerate(random.Random(given.seed).sample(known, min(given.num, len(known))), 1):
        print(f"{number}. ({where}) {sentence}")


if __name__ == "__main__":
    main()
