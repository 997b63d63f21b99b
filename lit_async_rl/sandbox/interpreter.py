"""Runs Python code as the interpreter runs a file."""

from __future__ import annotations

import ast
import contextlib
import sys
import traceback
from typing import Any

MAIN = "main.py"


def execute(text: str, names: dict[str, Any], shows_last: bool = False) -> int:
    """Runs code in a namespace; errors go to standard error, as the interpreter prints them.

    Args:
        text: source.
        names: global names.
        shows_last: whether to print the value of a final expression, as a notebook does.
    """
    try:
        if shows_last:
            _execute_showing(text, names)
        else:
            exec(compile(text, MAIN, "exec", dont_inherit=True), names)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:
        own = error.__traceback__
        while own is not None and own.tb_frame.f_code.co_filename != MAIN:
            own = own.tb_next
        with contextlib.suppress(BaseException):
            traceback.print_exception(type(error), error, own)
        return 1
    return 0


def _execute_showing(text: str, names: dict[str, Any]) -> None:
    tree = ast.parse(text, MAIN)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, MAIN, "exec", dont_inherit=True), names)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), MAIN, "eval", dont_inherit=True), names)
        if value is not None:
            print(repr(value))
