"""Words that a reader can read: of README, each page of docs/, CHANGELOG, CONTRIBUTING, configs/README and notebooks.

    python docs/word_counts.py

Code blocks, bars of tables, comments, addresses and targets of links do not count, and neither do the generated API
pages. Inline code counts: it is read.

After them the size of the package: files and lines of code, its longest file and function.
"""

from __future__ import annotations

import ast
import json
import re
import tokenize
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
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
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


def lines_of_code(source: str) -> int:
    """Number of lines that are not blank, a comment or a docstring."""
    empty = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    tokens = tokenize.generate_tokens((f"{line}\n" for line in source.split("\n")).__next__)
    found = {line for one in tokens if one.type not in empty for line in range(one.start[0], one.end[0] + 1)}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | FUNCTION) and ast.get_docstring(node) is not None:
            found -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return sum(bool(line.strip()) for number, line in enumerate(source.split("\n"), 1) if number in found)


def size_of_package() -> dict[str, int]:
    """Numbers of files and lines, and the lengths of its longest file and function, in lines."""
    paths = {path.resolve() for folder in ("lit_async_rl", "callbacks") for path in (ROOT / folder).rglob("*.py")}
    sources = {str(path.relative_to(ROOT.resolve())): path.read_text() for path in paths}
    num_lines, file = max((source.count("\n"), name) for name, source in sources.items())
    nodes = [(x, name) for name in sources for x in ast.walk(ast.parse(sources[name])) if isinstance(x, FUNCTION)]
    length, function, place = max((x.end_lineno - x.lineno + 1, x.name, name) for x, name in nodes)
    return {
        "files of the package": len(sources),
        "lines of code, without blank ones, comments and docstrings": sum(map(lines_of_code, sources.values())),
        f"lines in the longest file, {file}": num_lines,
        f"lines in the longest function, {function} of {place}": length,
    }


def main() -> None:
    """Prints the counts."""
    found = counts()
    for name, number in found.items():
        print(f"{number:7,}  {name}")
    pages = {name: number for name, number in found.items() if name.startswith("docs/")}
    print(f"{sum(pages.values()):7,}  {len(pages)} pages of docs/")
    print(f"{sum(found.values()):7,}  all")
    for name, number in size_of_package().items():
        print(f"{number:7,}  {name}")


if __name__ == "__main__":
    main()
