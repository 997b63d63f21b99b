"""Unit tests beside the program, in one process: its objects are theirs, and it can forge what they find.

Tests that are calls with plain values do not come here, see `lit_async_rl.sandbox.plain_tests`.
"""

from __future__ import annotations

import ast
import asyncio
import builtins
import contextlib
import functools
import importlib
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from lit_async_rl.sandbox.functions import find_function
from lit_async_rl.sandbox.interpreter import execute

MAX_FAILURE_CHARS = 300
NAME = "tests.py"
# Available to tests without an import: published tests rely on the imports of their program
OFTEN_USED = (
    "import math, re, collections, itertools, functools, heapq, bisect, string, random, operator, copy, json\n"
    "import datetime\n"
    "from collections import *\nfrom itertools import *\nfrom functools import *\nfrom typing import *\n"
    "from math import ceil, floor, inf, isclose, nan, pi, sqrt\nfrom heapq import *\nfrom bisect import *\n"
    "from fractions import Fraction\nfrom decimal import Decimal\nfrom copy import deepcopy\n"
)
ALIASES = {"np": "numpy", "pd": "pandas"}  # of modules used by tests without an import
PLAIN = (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, type(None))


class _CountedAsserts(ast.NodeTransformer):
    """Notes which assertions are reached and hold.

    Args:
        goes_on: whether tests go on behind a failed assertion, which is noted, too.
    """

    def __init__(self, goes_on: bool) -> None:
        self.number = 0
        self._form = "try:\n    assert 0\nexcept AssertionError:\n    __held__(N, False)\nelse:\n    __held__(N, True)"
        if not goes_on:
            self._form = "if 1:\n    assert 0\n    __held__(N, True)"

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        """Leaves the tests of unittest as they are: each is a case by itself."""
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        """Leaves the tests of pytest as they are."""
        return node if node.name.startswith("test") else self.generic_visit(node)

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        """Notes its number."""
        made = ast.parse(self._form.replace("N", str(self.number))).body[0]
        self.number += 1
        if isinstance(made, (ast.Try, ast.If)):
            made.body[0] = node
        return ast.fix_missing_locations(ast.copy_location(made, node))


def run_tests(doc: dict[str, Any]) -> dict[str, Any]:
    """Runs a program and its tests; returns which hold, and the first failure.

    Args:
        doc: `program`, its source; `setup`, code before the tests; `cases`, each a piece of code; `check`, code that
            defines `check(function)` or asserts by itself; `is_rest`, whether the check's plain asserts are compared
            elsewhere; `function`, the name of what is tested; `stops`, whether a failure ends the rest.
    """
    module = types.ModuleType("program")
    sys.modules["program"] = module  # dataclasses and pickle look classes up there
    if execute(doc["program"], vars(module)):
        return {"passed": [], "failure": "the program fails by itself"}
    found = {name: value for name, value in vars(module).items() if not name.startswith("__")}
    passed, failure = _run_cases(doc, _namespace(doc, found))
    return {"passed": passed, "failure": failure}


@functools.cache
def library() -> Mapping[str, Any]:
    """Names that tests have without an import."""
    names: dict[str, Any] = {}
    exec(OFTEN_USED, names)
    return types.MappingProxyType(names)


def _namespace(doc: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Global names of the tests: the library's, and the program's names that they test.

    A program may define `abs`, `isclose`, `np` or `EPS`, too; its tests must not use those.

    Args:
        doc: see `run_tests`.
        found: global names of the program.
    """
    module = types.ModuleType("tests")
    sys.modules["tests"] = module  # dataclasses and pickle look classes up there
    names = vars(module)
    names |= library()
    trees = list(_trees([doc["setup"], *doc["cases"], doc["check"]]))
    used, bound, modules = names_in(trees)
    needed = used - bound
    for name in modules & needed - set(names):
        with contextlib.suppress(ImportError):
            names[name] = importlib.import_module(ALIASES.get(name, name))
    own = {*names, *dir(builtins), *(modules & needed)}
    tested = needed - own
    if doc["function"]:
        tested.add(doc["function"])
    if not tested:  # the function under test is called `sum`
        tested = _innermost(trees, needed & set(found))
    taken = {name: value for name, value in found.items() if name in tested or name not in own}
    if doc["function"] or any(name in taken and not isinstance(taken[name], PLAIN) for name in needed):
        taken = {name: value for name, value in taken.items() if not isinstance(value, PLAIN)}
    names |= taken
    names["__program__"] = found
    return names


def _trees(codes: Sequence[str]) -> Iterator[ast.Module]:
    for code in codes:
        with contextlib.suppress(SyntaxError, ValueError, RecursionError):
            yield ast.parse(code)


def names_in(trees: Sequence[ast.Module]) -> tuple[set[str], set[str], set[str]]:
    """Names that code reads, those that it binds, and those that it uses as modules are used."""
    used: set[str] = set()
    bound: set[str] = set()
    owners: set[str] = set()
    called: set[str] = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).split(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owners.add(node.value.id)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            called.add(node.func.id)
    return used, bound, (owners - called) & {*ALIASES, *sys.stdlib_module_names}


def _innermost(trees: Sequence[ast.Module], names: set[str]) -> set[str]:
    """Those of the names that are called without another of them among the arguments."""
    found: set[str] = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
            inner = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
            if inner & names == {node.func.id}:
                found.add(node.func.id)
    return found


def _run_cases(doc: dict[str, Any], names: dict[str, Any]) -> tuple[list[bool], str | None]:
    failure: str | None = None

    def fails(error: BaseException, what: str) -> None:
        nonlocal failure
        failure = failure or f"{what}: {type(error).__name__}: {error}"[:MAX_FAILURE_CHARS]

    if not _holds("setup", functools.partial(_execute, doc["setup"], names), fails):
        return [], failure
    passed = []
    for code in doc["cases"]:
        passed.append(_holds(code, functools.partial(_execute, code, names), fails))
        if not passed[-1] and doc["stops"]:
            return passed, failure
    if doc["check"]:
        passed += _run_check(doc, names, fails)
    return passed, failure


def _execute(code: str | ast.Module, names: dict[str, Any]) -> None:
    exec(compile(code, NAME, "exec", dont_inherit=True), names)


def _run_check(doc: dict[str, Any], names: dict[str, Any], fails: Callable[[BaseException, str], None]) -> list[bool]:
    """Runs code with `check(function)`: it passes if no exception leaves it.

    A case is each `assert` statement that is reached, or all of it if none is, unless it is a rest. After an exception
    that is no failed assertion, those not reached have failed, too.
    """
    held: dict[int, bool] = {}
    names["__held__"] = lambda number, holds: held.update({number: holds and held.get(number, True)})
    counter = _CountedAsserts(goes_on=False)
    is_right = False
    has_ended = True
    more: list[bool] = []
    try:
        try:
            defined = _run_body(doc, names, counter)
            is_right = True
        except BaseException as error:
            fails(error, "check")
            if doc["stops"]:
                return [False]
            held.clear()
            defined = _run_body(doc, names, counter := _CountedAsserts(goes_on=True))
        for name, test in _tests_among(defined):
            more.append(_holds(name, test, fails))
            if doc["stops"] and not more[-1]:
                break
    except BaseException:
        has_ended = False
    numbers = held if has_ended else range(counter.number)
    passed = [held.get(number, False) for number in numbers] + more
    if is_right and not passed and doc["is_rest"]:
        return []
    if has_ended and not passed:
        return [is_right and not any(map(_is_test_case, defined.values()))]  # all of its tests are skipped
    return passed if has_ended and (is_right or not all(passed)) else [*passed, False]


def _run_body(doc: dict[str, Any], names: dict[str, Any], counter: _CountedAsserts) -> dict[str, Any]:
    """Runs tests except those of pytest and unittest; returns their definitions."""
    tree = counter.visit(ast.parse(doc["check"], NAME))
    _execute(ast.fix_missing_locations(tree), names)
    defined = {node.name: names[node.name] for node in tree.body if hasattr(node, "name") and node.name in names}
    if doc["function"] and "check" in defined:
        function = find_function(names["__program__"], doc["function"], may_be_method=True)
        _run_test(functools.partial(defined["check"], function))
    return defined


def _run_test(test: Callable[[], Any]) -> None:
    value = test()
    if inspect.iscoroutine(value):
        asyncio.run(value)


def _tests_among(defined: dict[str, Any]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Tests as pytest and unittest name them, but those that are skipped."""
    for name, one in defined.items():
        if isinstance(one, types.FunctionType) and name.startswith("test") and not _needs_arguments(one):
            yield name, functools.partial(_run_test, one)
        if _is_test_case(one):
            for method in dir(one):
                is_skipped = any(getattr(part, "__unittest_skip__", False) for part in (one, getattr(one, method)))
                if method.startswith("test") and not is_skipped:
                    yield f"{name}.{method}", functools.partial(_run_method, one, method)


def _is_test_case(one: Any) -> bool:
    return isinstance(one, type) and any(base.__name__ == "TestCase" for base in one.__mro__)


def _needs_arguments(function: Callable[..., Any]) -> bool:
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    found = inspect.signature(function, follow_wrapped=False).parameters.values()
    return any(one.default is one.empty and one.kind not in variable for one in found)


def _run_method(case: Any, method: str) -> None:
    import unittest

    result = unittest.TestResult()
    suite = unittest.TestSuite([case(method)])
    suite.run(result)  # with the class's own preparations
    for _, problem in [*result.errors, *result.failures, *result.skipped]:
        raise AssertionError(problem.strip().rpartition("\n")[2])
    if result.unexpectedSuccesses or not result.testsRun:
        raise AssertionError(
            "the test counts as failed: either it did not run, or it passed although marked as an expected failure"
        )


def _holds(name: str, test: Callable[[], Any], fails: Callable[[BaseException, str], None]) -> bool:
    try:
        test()
    except BaseException as error:
        fails(error, name)
        return False
    return True
