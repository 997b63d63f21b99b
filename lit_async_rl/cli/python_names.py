"""Suggestions for a Python file given where a setting expects the dotted path of a function or a class."""

from __future__ import annotations

import ast
import re
from pathlib import Path


def meant_in_file(value: str, is_class: bool) -> str | None:
    """How to name what is in a file, as the end of a message; None if `value` is no file.

    Args:
        value: as it was written: `my_rewards.py`, `folder/my_rewards.py:judge`, or `my_rewards` without a function.
        is_class: whether a class is expected; otherwise a function or a class.
    """
    match = re.fullmatch(r"([\w./-]+?)(\.py(?=$|[.:]))?(?:[.:](\w+))?", value)
    if match is None:
        return None
    path, name = Path(f"{match[1]}.py"), match[3]
    if not (match[2] or ":" in value or (name is None and path.is_file())):
        return None
    missing = "" if path.is_file() else f"; there is no file {path}"
    module = ".".join(path.with_suffix("").parts)
    known = name or next(iter(_defined(path, is_class)), None)
    what, name = ("class", known or "MyClass") if is_class else ("function", known or "my_function")
    if path.is_absolute() or ".." in path.parts:
        return f": write {path.stem}.{name}, and run in {path.parent} or set PYTHONPATH={path.parent}{missing}"
    if "-" in module:
        return f": rename the file, Python imports no {module}, and write {module.replace('-', '_')}.{name}{missing}"
    return f"; did you mean {module}.{name}?" if known else f": name a {what} in it, {module}.{name}{missing}"


def _defined(path: Path, is_class: bool) -> list[str]:
    """Public functions or classes of a file, in their order; none if it cannot be read."""
    try:
        body = ast.parse(path.read_text()).body
    except (OSError, SyntaxError, ValueError):
        return []
    kinds = (ast.ClassDef,) if is_class else (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return [node.name for node in body if isinstance(node, kinds) and not node.name.startswith("_")]
