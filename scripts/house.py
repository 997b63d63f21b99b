"""Prints how a Python code base is cut: files, functions, imports and comments, in one table.

    python scripts/house.py                         # the package
    python scripts/house.py ../optax/optax --json   # any other, to compare

Every number is a description, and none is a goal by itself: a limit on one of them is met by splitting what belongs
together, or by writing several statements in one line. A file that is reachable by several paths
(`lit_async_rl/callbacks` is a link) counts once. Lines of files and functions include docstrings; lines of code are
without docstrings, comments and blank lines.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import statistics
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Function = ast.FunctionDef | ast.AsyncFunctionDef
Documented = ast.Module | ast.ClassDef | Function
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
LABELS = {
    "files": "files",
    "lines": "lines",
    "lines_of_code": "lines of code, without docstrings, comments and blank lines",
    "files_of_238_to_250_lines": "files of 238 to 250 lines",
    "files_above_250_lines": "files above 250 lines",
    "files_above_700_lines": "files above 700 lines",
    "largest_file": "largest file",
    "single_importer_beside": "modules with exactly one importer, in the same folder",
    "single_importer_beside_share_of_lines": "  their share of the lines",
    "import_circles": "circles of imports at the top level",
    "import_circles_with_functions": "circles with imports in functions and for type checkers",
    "functions": "functions and methods",
    "function_lines_median": "  median of their lines",
    "functions_of_at_most_5_lines_share": "  share of at most 5 lines",
    "functions_above_50_lines_share": "  share above 50 lines",
    "classes": "classes",
    "statements": "statements without docstrings",
    "tuple_assignments_per_1000_lines_of_code": "several assignments in one, per 1,000 lines of code",
    "comments_per_1000_lines_of_code": "comments per 1,000 lines of code",
    "full_line_comments_per_1000_lines_of_code": "  of these on a line of their own",
}


def module_names(folders: list[Path]) -> dict[Path, str]:
    """Python files below the folders, links followed, with the names of their modules; the longest of several."""
    names: dict[Path, tuple[str, ...]] = {}
    for folder in folders:
        start = folder.resolve().parent if (folder / "__init__.py").exists() else folder.resolve()
        for root, subfolders, files in os.walk(folder.resolve(), followlinks=True):
            subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
            for path in (Path(root, name) for name in files if name.endswith(".py")):
                parts = path.relative_to(start).with_suffix("").parts
                parts = parts[:-1] if parts[-1] == "__init__" else parts
                names[path.resolve()] = max(names.get(path.resolve(), ()), parts, key=len)
    return {path: ".".join(parts) for path, parts in names.items()}


def module_of(imported: str, modules: dict[str, Path]) -> str | None:
    """The module among `modules` that `imported`, a module or a name in one, is read from; None for others' code."""
    below = imported.partition(".")[2]  # of a folder that is no package and is imported by its name
    # `from a.b import c` reads the module a.b.c, or a name of a.b
    candidates = [imported, imported.rpartition(".")[0], below, below.rpartition(".")[0]]
    return next((name for name in candidates if name in modules), None)


def source_of(node: ast.ImportFrom, path: Path, module: str) -> str:
    """Full name of the module from which `node`, in the file of `module`, imports."""
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    above = len(parts) - node.level + (path.stem == "__init__")
    return ".".join([*parts[:above], *([node.module] if node.module else [])])


def imported_names(tree: ast.AST, path: Path, module: str, is_top_level: bool) -> Iterator[str]:
    """Full names that a module imports: at its top level only, or also in functions and for type checkers."""
    for node in ast.iter_child_nodes(tree):
        if is_top_level and isinstance(node, Function):
            continue
        if is_top_level and isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{source_of(node, path, module)}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (x.value for x in node.args[:1] if isinstance(x, ast.Constant))
        yield from imported_names(node, path, module, is_top_level=is_top_level)


def import_graph(trees: dict[Path, ast.Module], names: dict[Path, str], is_top_level: bool) -> dict[Path, set[Path]]:
    """The files of the code base that each of its files imports."""
    modules = {name: path for path, name in names.items()}
    graph: dict[Path, set[Path]] = {}
    for path, tree in trees.items():
        found = {module_of(x, modules) for x in imported_names(tree, path, names[path], is_top_level=is_top_level)}
        graph[path] = {modules[x] for x in found if x is not None} - {path}
    return graph


def circles(graph: dict[Path, set[Path]], names: dict[Path, str]) -> list[list[str]]:
    """Sets of modules each of which imports all others of its set, directly or through others."""
    reached: dict[Path, set[Path]] = {}
    for path in graph:
        seen: set[Path] = set()
        ahead = list(graph[path])
        while ahead:
            other = ahead.pop()
            if other not in seen:
                seen.add(other)
                ahead.extend(graph[other])
        reached[path] = seen
    found = {frozenset(x for x in reached[path] if path in reached[x]) for path in graph if path in reached[path]}
    return sorted(sorted(names[path] for path in circle) for circle in found)


def tuple_assignments(tree: ast.AST) -> list[ast.Assign]:
    """Assignments of several values written out to several targets, `a, b = 1, 2`; swaps are among them."""
    displays = ast.Tuple | ast.List
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, displays) and isinstance(node.targets[0], displays)
    ]


def docstring_lines(tree: ast.Module) -> list[set[int]]:
    """The lines of each docstring."""
    documented = [x for x in ast.walk(tree) if isinstance(x, Documented) and ast.get_docstring(x) is not None]
    return [set(range(x.body[0].lineno, (x.body[0].end_lineno or 0) + 1)) for x in documented]


def measure(folders: list[Path]) -> dict[str, Any]:
    """All numbers of the table; shares are fractions of one."""
    names = module_names(folders)
    texts = {path: path.read_text(encoding="utf-8") for path in names}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    lines = {path: len(text.splitlines()) for path, text in texts.items()}
    largest = max(lines, key=lambda path: lines[path])
    lengths = [(node.end_lineno or node.lineno) - node.lineno + 1 for node in nodes if isinstance(node, Function)]

    num_code = 0
    comments: list[tokenize.TokenInfo] = []
    docstrings = {path: docstring_lines(tree) for path, tree in trees.items()}
    for path, text in texts.items():
        code: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                comments.append(token)
            if token.type not in NO_CODE:
                code.update(range(token.start[0], token.end[0] + 1))
        num_code += len(code.difference(*docstrings[path]))

    importers: dict[Path, list[Path]] = {path: [] for path in names}
    everywhere = import_graph(trees, names, is_top_level=False)
    for path, imported in everywhere.items():
        for other in imported:
            importers[other].append(path)
    single = [path for path, by in importers.items() if [path.parent] == [x.parent for x in by]]
    single = [path for path in single if path.name != "__init__.py"]

    def share(numbers: list[bool]) -> float:
        return round(sum(numbers) / max(len(numbers), 1), 3)

    def per_1000(number: int) -> float:
        return round(1000 * number / max(num_code, 1), 1)

    return {
        "files": len(names),
        "lines": sum(lines.values()),
        "lines_of_code": num_code,
        "files_of_238_to_250_lines": sum(238 <= x <= 250 for x in lines.values()),
        "files_above_250_lines": sum(x > 250 for x in lines.values()),
        "files_above_700_lines": sum(x > 700 for x in lines.values()),
        "largest_file": f"{names[largest]}: {lines[largest]}",
        "single_importer_beside": len(single),
        "single_importer_beside_share_of_lines": round(sum(lines[path] for path in single) / sum(lines.values()), 3),
        "import_circles": circles(import_graph(trees, names, is_top_level=True), names),
        "import_circles_with_functions": circles(everywhere, names),
        "functions": len(lengths),
        "function_lines_median": statistics.median(lengths) if lengths else 0,
        "functions_of_at_most_5_lines_share": share([x <= 5 for x in lengths]),
        "functions_above_50_lines_share": share([x > 50 for x in lengths]),
        "classes": sum(isinstance(node, ast.ClassDef) for node in nodes),
        "statements": sum(isinstance(x, ast.stmt) for x in nodes) - sum(map(len, docstrings.values())),
        "tuple_assignments_per_1000_lines_of_code": per_1000(sum(len(tuple_assignments(x)) for x in trees.values())),
        "comments_per_1000_lines_of_code": per_1000(len(comments)),
        "full_line_comments_per_1000_lines_of_code": per_1000(sum(x.line.lstrip().startswith("#") for x in comments)),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    package = Path(__file__).resolve().parents[1] / "lit_async_rl"
    parser.add_argument("folders", type=Path, nargs="*", default=[package], help="default: the package")
    parser.add_argument("--json", action="store_true", help="for programs, with the modules of each circle")
    arguments = parser.parse_args()
    for folder in arguments.folders:
        if not module_names([folder]):
            parser.error(f"folders must contain Python files, got {folder}")
    numbers = measure(arguments.folders)
    if arguments.json:
        print(json.dumps(numbers, indent=2))
        return
    for name, value in numbers.items():
        print(f"{LABELS[name]:<62}{len(value) if isinstance(value, list) else value}")


if __name__ == "__main__":
    main()
