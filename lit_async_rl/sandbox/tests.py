"""Unit tests in two processes: one with the tests and the verdict, the other with the program only.

    tests     (T) --- calls of the program's functions, with values as JSON ---> functions (F)
    trainer <-- verdict --- (T)

A program that prints, ends its process, patches the interpreter or searches its memory finds no test, no expected value
and no way to the verdict: it can only answer calls. Values cross as plain data, so that no object of the program
compares itself with an expected value. Other objects stay with the program: the tests hold a `Remote`, which calls and
reads attributes there, and equals no plain value.
"""

from __future__ import annotations

import ast
import asyncio
import builtins
import contextlib
import functools
import importlib
import inspect
import json
import math
import socket
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lit_async_rl.sandbox.interpreter import execute
from lit_async_rl.sandbox.values import Channel, Closed, NotPlain, RemoteError, as_exception, decode, encode

MAX_FAILURE_CHARS = 300
TOLERANCE = 1e-9  # for expected floats
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


class Tests:
    """The program as its tests see it.

    Args:
        channel: to the process with the program.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._callbacks: list[Any] = []
        self._exceptions: dict[str, type[Exception]] = {}
        self.num_not_plain = 0

    def names(self) -> dict[str, Any] | None:
        """The program's global names, with proxies for its objects; None for a program that failed."""
        message = self._channel.receive()
        if message[0] != "ready":
            return None
        found: dict[str, Any] = {}
        for name, value in message[1].items():
            kind = value[0] if isinstance(value, list) else ""
            if kind == "module":
                with contextlib.suppress(ImportError):
                    if str(value[1]).split(".")[0] in sys.stdlib_module_names:
                        found[name] = importlib.import_module(value[1])
            elif kind == "exception":
                base = type(as_exception(value[1][1:], ""))
                found[name] = self._exceptions[str(value[1][0])] = type(name, (base,), {})
            else:
                with contextlib.suppress(NotPlain):
                    found[name] = decode(value, self.refer)
        return found

    def refer(self, found: list[Any]) -> Any:
        kind, number = found
        if kind != "object" or type(number) is not int:
            raise NotPlain(f"no value of the kind {kind!r}")
        return Remote(self, number)

    def export(self, value: Any) -> list[Any]:
        if isinstance(value, Remote):
            return ["object", object.__getattribute__(value, "_number")]
        if callable(value) and not isinstance(value, type):
            self._callbacks.append(value)
            return ["callback", len(self._callbacks) - 1]
        self.num_not_plain += 1
        raise NotPlain(f"a test hands over an object of the class {type(value).__name__}")

    def ask(self, what: str, number: int, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Applies an operation to an object of the program; returns its value or raises its exception."""
        given = [encode(one, self.export) for one in args]
        named = {name: encode(one, self.export) for name, one in (kwargs or {}).items()}
        self._channel.send([what, number, given, named])
        while True:
            message = self._channel.receive()
            try:
                kind, first, second = message
                if kind == "callback":
                    self._answer(first, second)
                    continue
                if kind == "returned":
                    value = decode(first, self.refer)
                    for place, changed in second:
                        _replace(args[place], decode(changed, self.refer))
                    return value
                kinds = [str(one) for one in first]
            except (TypeError, ValueError, LookupError) as error:
                raise RemoteError(f"the program has answered what is no answer: {str(error)[:100]}") from None
            if kinds and kinds[0] in self._exceptions:
                raise self._exceptions[kinds[0]](str(second))
            raise as_exception(kinds, str(second), may_stop=what == "next")

    def _answer(self, number: int, args: Sequence[Any]) -> None:
        try:
            value = self._callbacks[number](*[decode(one, self.refer) for one in args])
            answer = ["returned", encode(value, self.export)]
        except Closed:
            raise
        except Exception as error:
            answer = ["raised", [one.__name__ for one in type(error).__mro__], str(error)[:1000]]
        self._channel.send(answer)


def _replace(old: Any, new: Any) -> None:
    """Applies the program's changes to an argument of a test."""
    if isinstance(old, (list, bytearray)) and type(new) is type(old):
        old[:] = new
    elif isinstance(old, (dict, set)) and type(new) is type(old):
        old.clear()
        old.update(new)


class Remote:
    """An object of the program. Operators take other objects of the program only, and it is equal to no plain value."""

    def __init__(self, tests: Tests, number: int) -> None:
        object.__setattr__(self, "_ask", tests.ask)
        object.__setattr__(self, "_number", number)

    def _do(self, what: str, *args: Any) -> Any:
        ask: Callable[..., Any] = object.__getattribute__(self, "_ask")
        return ask(what, object.__getattribute__(self, "_number"), args)

    def _with(self, what: str, other: Any) -> Any:
        return self._do(what, other) if isinstance(other, Remote) else NotImplemented

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in ("__name__", "__doc__"):
            raise AttributeError(name)
        return self._do("getattr", name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        ask: Callable[..., Any] = object.__getattribute__(self, "_ask")
        return ask("call", object.__getattribute__(self, "_number"), args, kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        self._do("setattr", name, value)

    def __eq__(self, other: object) -> Any:
        return self._with("eq", other)

    def __ne__(self, other: object) -> Any:
        return self._with("ne", other)

    def __lt__(self, other: Any) -> Any:
        return self._with("lt", other)

    def __add__(self, other: Any) -> Any:
        return self._with("add", other)

    def __sub__(self, other: Any) -> Any:
        return self._with("sub", other)

    def __mul__(self, other: Any) -> Any:
        return self._with("mul", other)

    def __hash__(self) -> int:
        return object.__hash__(self)

    def __len__(self) -> int:
        return int(self._do("len"))

    def __bool__(self) -> bool:
        return self._do("bool") is True

    def __iter__(self) -> Iterator[Any]:
        return iter(_Items(self._do("iter")))

    def __next__(self) -> Any:
        return self._do("next")

    def __getitem__(self, key: Any) -> Any:
        return self._do("getitem", key)

    def __str__(self) -> str:
        return str(self._do("str"))

    def __repr__(self) -> str:
        return str(self._do("repr"))

    def __instancecheck__(self, other: Any) -> bool:
        # asked of the object's own class, over there: `isinstance(stack, Stack)`
        return isinstance(other, Remote) and other._do("isinstance", self) is True


class _Items:
    def __init__(self, source: Any) -> None:
        self._source = source

    def __iter__(self) -> _Items:
        return self

    def __next__(self) -> Any:
        return next(self._source)


class _CountedAsserts(ast.NodeTransformer):
    """Notes which assertions are reached and hold.

    Args:
        goes_on: whether tests go on behind a failed assertion, which is noted, too; without it they run as they are.
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


def run_tests(doc: dict[str, Any], connection: socket.socket) -> int:
    """Runs tests, and writes which of them hold to the standard output, for the trainer.

    Args:
        doc: `setup`, code before the tests; `cases`, each a piece of code; `check`, code that defines `check(function)`
            or asserts by itself; `calls`, pairs of arguments and expected value; `function`, the name of what is
            tested; `stops`, whether the first failure ends the rest.
        connection: to the process with the program.
    """
    verdict = sys.stdout
    sys.stdout = sys.stderr  # keeps output of tests out of the verdict
    result: dict[str, Any] = {"passed": [], "failure": None, "num_not_plain": 0}
    tests = Tests(Channel(connection))
    try:
        result["passed"], result["failure"] = _passed(doc, tests)
    except Closed:
        result["failure"] = "the program has ended"
    result["num_not_plain"] = tests.num_not_plain
    verdict.write(json.dumps(result))
    verdict.flush()
    return 0


def run_together(doc: dict[str, Any], program: str) -> dict[str, Any]:
    """Runs tests in the process of the program, with its objects unconverted.

    Args:
        doc: see `run_tests`.
        program: source of the program.
    """
    module = types.ModuleType("program")
    sys.modules["program"] = module  # dataclasses and pickle look classes up there
    if execute(program, vars(module)):
        return {"passed": [], "failure": "the program fails by itself", "num_not_plain": 0}
    found = {name: value for name, value in vars(module).items() if not name.startswith("__")}
    passed, failure = _run_cases(doc, _namespace(doc, found))
    return {"passed": passed, "failure": failure, "num_not_plain": 0}


def _passed(doc: dict[str, Any], tests: Tests) -> tuple[list[bool], str | None]:
    found = tests.names()
    if found is None:
        return [], "the program fails by itself"
    return _run_cases(doc, _namespace(doc, found))


def _namespace(doc: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Global names of the tests: the library's, and those names of the program that the tests are about.

    A program may define `abs`, `isclose`, `np` or `EPS`, too, and its tests must not be run with those.

    Args:
        doc: see `run_tests`.
        found: global names of the program, or proxies for them.
    """
    module = types.ModuleType("tests")
    sys.modules["tests"] = module  # dataclasses and pickle look classes up there
    names = vars(module)
    exec(OFTEN_USED, names)
    trees = list(_trees([doc["setup"], *doc["cases"], doc["check"]]))
    used, bound, modules = _names_in(trees)
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


def _names_in(trees: Sequence[ast.Module]) -> tuple[set[str], set[str], set[str]]:
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
    """Those of the names that are called with no call of another one among their arguments."""
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

    try:
        _execute(doc["setup"], names)
    except Closed:
        raise
    except BaseException as error:
        fails(error, "setup")
        return [], failure
    passed = []
    for code in doc["cases"]:
        try:
            _execute(code, names)
            passed.append(True)
        except Closed:
            fails(Exception("the program has ended"), code)
            break
        except BaseException as error:
            fails(error, code)
            passed.append(False)
        if not passed[-1] and doc["stops"]:
            return passed, failure
    if doc["calls"]:
        passed += _run_calls(doc, names, fails)
    if doc["check"]:
        passed += _run_check(doc, names, fails)
    return passed, failure


def _execute(code: str | ast.Module, names: dict[str, Any]) -> None:
    exec(compile(code, NAME, "exec", dont_inherit=True), names)


def _function(doc: dict[str, Any], names: dict[str, Any]) -> Any:
    """Function under test, or the method of that name in a class `Solution`, as on LeetCode."""
    name = doc["function"]
    program = names.get("__program__", names)
    if name not in program and "Solution" in program:
        return getattr(program["Solution"](), name)
    if name not in program:
        raise NameError(f"the program has no {name}")
    return program[name]


def _run_calls(doc: dict[str, Any], names: dict[str, Any], fails: Callable[[BaseException, str], None]) -> list[bool]:
    passed = []
    for arguments, expected in doc["calls"]:
        shown = f"{doc['function']}({', '.join(map(repr, arguments))})"
        try:
            found = _function(doc, names)(*arguments)
            # published sets wrap some expected values in a list of one
            is_right = _agree(found, expected) or (
                isinstance(expected, list) and len(expected) == 1 and _agree(found, expected[0])
            )
            passed.append(is_right)
            if not is_right:
                fails(AssertionError(f"{found!r:.100} is not {expected!r:.100}"), shown)
        except Closed:
            fails(Exception("the program has ended"), shown)
            break
        except BaseException as error:
            fails(error, shown)
            passed.append(False)
        if not passed[-1] and doc["stops"]:
            break
    return passed


def _agree(found: Any, expected: Any) -> bool:
    """Whether a value is the expected one, as JSON states it: tuples are lists there, and floats are rounded."""
    if isinstance(expected, bool) or isinstance(found, bool):
        return type(found) is type(expected) and found == expected
    if isinstance(expected, float) and isinstance(found, (int, float)):
        return math.isclose(found, expected, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    if isinstance(expected, list):
        is_list = isinstance(found, (list, tuple)) and len(found) == len(expected)
        return is_list and all(map(_agree, found, expected))
    if isinstance(expected, dict):
        if not isinstance(found, dict) or len(found) != len(expected):
            return False
        by_text = {str(key): value for key, value in found.items()}
        return all(key in by_text and _agree(by_text[key], value) for key, value in expected.items())
    return bool(found == expected) and type(found) in (type(expected), int, float)


def _run_check(doc: dict[str, Any], names: dict[str, Any], fails: Callable[[BaseException, str], None]) -> list[bool]:
    """Runs code with `check(function)`: it passes if no exception leaves it.

    A case is each of its `assert` statements that is reached, or all of it without any. Behind an exception that is no
    failed assertion, those that are not reached have failed, too.
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
        except Closed:
            raise
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
    except Closed:
        has_ended = False
        fails(Exception("the program has ended"), "check")
    except BaseException:
        has_ended = False
    numbers = held if has_ended else range(counter.number)
    passed = [held.get(number, False) for number in numbers] + more
    if has_ended and not passed:
        return [is_right and not any(map(_is_test_case, defined.values()))]  # all of its tests are skipped
    return passed if has_ended and (is_right or not all(passed)) else [*passed, False]


def _run_body(doc: dict[str, Any], names: dict[str, Any], counter: _CountedAsserts) -> dict[str, Any]:
    """Runs tests except those of pytest and unittest; returns their definitions."""
    tree = counter.visit(ast.parse(doc["check"], NAME))
    _execute(ast.fix_missing_locations(tree), names)
    defined = {node.name: names[node.name] for node in tree.body if hasattr(node, "name") and node.name in names}
    if doc["function"] and "check" in defined:
        _run_test(functools.partial(defined["check"], _function(doc, names)))
    return defined


def _run_test(test: Callable[[], Any]) -> None:
    value = test()
    if inspect.iscoroutine(value):
        asyncio.run(value)


def _tests_among(defined: dict[str, Any]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Tests as pytest and unittest name them, but those that are skipped."""
    for name, one in defined.items():
        if isinstance(one, types.FunctionType) and name.startswith("test") and not _required_parameters(one):
            yield name, functools.partial(_run_test, one)
        if _is_test_case(one):
            for method in dir(one):
                is_skipped = any(getattr(part, "__unittest_skip__", False) for part in (one, getattr(one, method)))
                if method.startswith("test") and not is_skipped:
                    yield f"{name}.{method}", functools.partial(_run_method, one, method)


def _is_test_case(one: Any) -> bool:
    return isinstance(one, type) and any(base.__name__ == "TestCase" for base in one.__mro__)


def _required_parameters(function: Callable[..., Any]) -> list[str]:
    """Parameters without which a function cannot be called."""
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    found = inspect.signature(function, follow_wrapped=False).parameters.values()
    return [one.name for one in found if one.default is one.empty and one.kind not in variable]


def _run_method(case: Any, method: str) -> None:
    import unittest

    result = unittest.TestResult()
    suite = unittest.TestSuite([case(method)])
    suite.run(result)  # with the class's own preparations
    for _, problem in [*result.errors, *result.failures, *result.skipped]:
        raise AssertionError(problem.strip().rpartition("\n")[2])
    if result.unexpectedSuccesses or not result.testsRun:
        raise AssertionError("it did not fail as expected")


def _holds(name: str, test: Callable[[], Any], fails: Callable[[BaseException, str], None]) -> bool:
    try:
        test()
    except Closed:
        raise
    except BaseException as error:
        fails(error, name)
        return False
    return True
