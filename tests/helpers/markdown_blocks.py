"""Code blocks and commands of the Markdown pages, for the tests that check them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "configs/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^(?P=indent)```", re.M | re.S)
MARKER = re.compile(r"<!-- unchecked: (?P<reason>[^\n]+) -->\n+\Z")
MODULE = re.compile(r"# (?P<name>\w+)\.py\n")
ADDRESS = re.compile(r"^\[(?P<name>[^\]]+)\]: (?P<target>\S+)$\n?", re.M)


@dataclass(frozen=True)
class Block:
    """One fenced block; `reason` says why it is not checked (`<!-- unchecked: reason -->` stands before it)."""

    page: Path
    line: int
    language: str
    code: str
    reason: str | None

    @property
    def module(self) -> str | None:
        """Module that the block is the source of, where it begins with `# name.py`."""
        match = MODULE.match(self.code)
        return match["name"] if match else None

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(*languages: str) -> list[Block]:
    """All blocks of all pages in one of these languages."""
    return [block for page in PAGES for block in blocks_of(page) if block.language in languages]


def blocks_of(page: Path) -> Iterator[Block]:
    """Fenced blocks of one page."""
    text = page.read_text()
    for match in FENCE.finditer(text):
        marker = MARKER.search(text, 0, match.start())
        code = "".join(line.removeprefix(match["indent"]) for line in match["code"].splitlines(keepends=True))
        line = text.count("\n", 0, match.start()) + 1
        yield Block(page, line, match["language"], code=code, reason=marker["reason"] if marker else None)


def commands(page: Path) -> list[list[str]]:
    """Commands of one page, as words: in `bash` blocks, in indented blocks, and in running text."""
    text = FENCE.sub("", page.read_text())
    scripts = [block.code for block in blocks_of(page) if block.language == "bash" and block.reason is None]
    scripts += ["\n".join(line[4:] for line in text.splitlines() if line.startswith("    "))]
    scripts += [code for code in re.findall(r"`([^`\n]+)`", text) if code.startswith(("python ", "make "))]
    found = []
    for line in "\n".join(scripts).replace("\\\n", " ").splitlines():
        if re.search(r"(^|\s)(make |scripts/|benchmarks/|examples/|pip install)", line):
            found += [shlex.split(part, comments=True) for part in line.split("&&")]
    return [words for words in found if words]


def with_inline_links(text: str) -> str:
    """A page whose links by name, `[text][name]` with `[name]: address` below, have their addresses in place."""
    targets = {match["name"]: match["target"] for match in ADDRESS.finditer(text)}

    def link(match: re.Match[str]) -> str:
        return f"]({targets[' '.join(match['name'].split())]})"

    parts = FENCE.split(text)  # with its three groups between the parts: indent, language, code
    kept = [match[0] for match in FENCE.finditer(text)]
    prose = parts[:: FENCE.groups + 1]
    linked = [re.sub(r"\]\[(?P<name>[^\]]+)\]", link, ADDRESS.sub("", part)) for part in prose]
    return "".join(one for pair in zip(linked, [*kept, ""], strict=True) for one in pair)
