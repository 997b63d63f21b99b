"""Docstrings of the package: present on every public name, and in plain language."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted([*(ROOT / "lit_async_rl").rglob("*.py"), *(ROOT / "callbacks").rglob("*.py")])
RIDDLES = re.compile(
    r"^What\b"
    r"|^Whether it (is|does|has)\b"
    r"|^Wh(o|ere|en|ose|ich)\b"
    r"|^See the class\.$|^(Acts|Measures|Judges|Restores it|Nothing|The same)\.$"
    r"|\bwhoever\b|\bnobody\b|\beverybody\b|\bgone on from\b|\bcomes next\b|\bput its? hands?\b",
    re.IGNORECASE,
)


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """Line, name and docstring of a module, and of its classes and functions at any depth."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text is not None:
                yield getattr(node, "lineno", 1), getattr(node, "name", "module"), text


def problems(path: Path) -> list[str]:
    """Riddles, and public classes and functions whose docstring is missing or has fewer than four words."""
    tree = ast.parse(path.read_text())
    found = [f"{line} {name}: {text[:60]!r}" for line, name, text in docstrings(tree) if RIDDLES.search(text)]
    for node in tree.body:
        is_public = isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name[0] != "_"
        if is_public and len((ast.get_docstring(node) or "").split()) < 4:
            found.append(f"{node.lineno} {node.name}: docstring missing or too short")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_docstrings_say_what_a_thing_is_or_does(path: Path) -> None:
    assert not problems(path)


@pytest.mark.parametrize("text", ["What a row of a tape is.", "See the class.", "Whoever waits comes next."])
def test_riddles_are_recognised(text: str) -> None:
    assert RIDDLES.search(text)
