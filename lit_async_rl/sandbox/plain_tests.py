"""Unit tests that are calls with plain values: the trainer compares what a program returns, out of its reach.

A test is plain if it is `assert f(1, [2]) == {3}`, `assert f("a") is None`, `assert f(1)` or `assert not f(1)`: a call
of the program's function whose arguments and expected value are literals. So is a pair of arguments and value. The
record alone decides. All other tests are weak: they run beside the program, which can forge them.
"""

from __future__ import annotations

import ast
import builtins
import functools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from lit_async_rl.sandbox.code_cases import Cases, problem_of_tests
from lit_async_rl.sandbox.tests import library, names_in
from lit_async_rl.sandbox.values import NotPlain, decode, encode

TOLERANCE = 1e-9  # for expected floats of JSON
MAX_GROWTH = 16  # of an encoded value over its text


@dataclass(frozen=True)
class PlainCase:
    """A call of the program's function, and what it must return.

    Attributes:
        compares: `equal`; `same`: the very object, such as None; `true`: the value's truth; `json`: as JSON states it;
            `constant`: calls nothing, and the expected value must be true.
        expected: value.
        function: name.
        args: arguments; encoded, unless it compares JSON.
        kwargs: named arguments, likewise.
    """

    compares: Literal["equal", "same", "true", "json", "constant"]
    expected: Any
    function: str = ""
    args: Any = None
    kwargs: Any = None

    def holds(self, answer: bytes) -> bool:
        """Whether a program's answer is the expected plain value."""
        try:
            (encoded,) = json.loads(answer)
            found = decode(encoded)
            if self.compares == "json":
                one = self.expected  # published sets wrap some expected values in a list of one
                is_wrapped = isinstance(one, list) and len(one) == 1
                return _agree(found, one) or (is_wrapped and _agree(found, one[0]))
            return found is self.expected if self.compares in ("same", "true") else bool(found == self.expected)
        except (NotPlain, TypeError, ValueError, ArithmeticError, RecursionError):
            return False


@dataclass(frozen=True)
class SplitTests:
    """Tests of a prompt.

    Attributes:
        plain: compared by the trainer.
        weak: the others, which run beside the program.
        function: name of the function under test, where the record has it.
        is_rest: whether plain tests were taken out of the weak `check`.
    """

    plain: tuple[PlainCase, ...] = ()
    weak: Cases = field(default_factory=Cases)
    function: str | None = None
    is_rest: bool = False

    @property
    def is_weak(self) -> bool:
        """Whether there are tests that a program can forge."""
        return bool(self.weak)


def split_tests(cases: Cases, head: str = "") -> SplitTests:
    """Separates plain tests from weak ones.

    Args:
        cases: of a prompt.
        head: code of the prompt before the function, whose helpers are not the program's.
    """
    name = cases.function or ""
    pairs = tuple(PlainCase("json", expected, name, args=list(args), kwargs={}) for args, expected in cases.calls)
    found = _split(tuple(cases.asserts), cases.check, setup=f"{head}\n{cases.setup}", function=cases.function)
    weak = replace(found.weak, setup=cases.setup) if found.weak else found.weak
    return replace(found, plain=pairs + found.plain, weak=weak, function=cases.function)


@functools.lru_cache(maxsize=1024)
def _split(asserts: tuple[str, ...], check: str, setup: str, function: str | None) -> SplitTests:
    weak = Cases(asserts=asserts, check=check, setup=setup, function=function)
    try:
        trees = [ast.parse(code) for code in (setup, *asserts, check)]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return SplitTests(weak=weak)
    reader = _Reader(trees, function)
    plain: list[PlainCase] = []
    others = []
    for text, tree in zip(asserts, trees[1:-1], strict=True):
        case = reader.case(tree.body[0]) if len(tree.body) == 1 else None
        if case is None:
            others.append(text)
        else:
            plain.append(case)
    of_check = list(reader.take_from_check(trees[-1]))
    rest = ast.unparse(trees[-1]) if of_check else check
    if of_check and problem_of_tests((), rest, function):
        rest = ""
    weak = replace(weak, asserts=tuple(others), check=rest)
    return SplitTests((*plain, *of_check), weak if weak else Cases(), is_rest=bool(of_check))


class _Reader:
    """Reads plain cases.

    Args:
        trees: all code of the tests, as they run in one namespace.
        function: name of the function under test, where the record has it.
    """

    def __init__(self, trees: Sequence[ast.Module], function: str | None) -> None:
        self._function = function
        self._used, self._bound, modules = names_in(trees)
        needed = self._used - self._bound
        self._own = {*library(), *dir(builtins), *(modules & needed)}
        self._are_all_own = needed <= self._own  # the function under test is called `sum`

    def _is_tested(self, name: str) -> bool:
        if name in self._bound:
            return False
        return name == self._function or name not in self._own or (self._function is None and self._are_all_own)

    def case(self, node: ast.stmt, candidate: str | None = None) -> PlainCase | None:
        """The case of an assertion; None if it is not plain.

        Args:
            node: statement.
            candidate: name by which a check has the function.
        """
        if not isinstance(node, ast.Assert):
            return None
        try:
            return self._case(node.test, candidate)
        except (NotPlain, ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return None

    def _case(self, test: ast.expr, candidate: str | None) -> PlainCase:
        if isinstance(test, ast.Constant):
            return PlainCase("constant", bool(test.value))
        if isinstance(test, ast.Compare) and len(test.ops) == 1:
            sides = [test.left, test.comparators[0]]
            call, other = sides if isinstance(test.left, ast.Call) else reversed(sides)
            expected = ast.literal_eval(other)
            encode(expected)  # refuses `...`
            if isinstance(test.ops[0], ast.Eq):
                return self._call(call, "equal", expected, candidate=candidate)
            if isinstance(test.ops[0], ast.Is) and (expected is None or isinstance(expected, bool)):
                return self._call(call, "same", expected, candidate=candidate)
            raise NotPlain("another comparison")
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return self._call(test.operand, "true", False, candidate=candidate)
        return self._call(test, "true", True, candidate=candidate)

    def _call(
        self, node: ast.expr, compares: Literal["equal", "same", "true"], expected: Any, candidate: str | None
    ) -> PlainCase:
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            raise NotPlain("no call of a function")
        name = node.func.id
        if candidate is not None and name == candidate and self._function is not None:
            name = self._function
        elif not self._is_tested(name):
            raise NotPlain("no function of the program")
        args = [ast.literal_eval(one) for one in node.args]
        kwargs = {str(one.arg): ast.literal_eval(one.value) for one in node.keywords if one.arg is not None}
        if len(kwargs) < len(node.keywords):
            raise NotPlain("named arguments from a dictionary")
        return PlainCase(compares, expected, name, args=encode(args), kwargs=encode(kwargs))

    def take_from_check(self, tree: ast.Module) -> Iterator[PlainCase]:
        """Removes plain assertions of the module and its `check`, but for those that may not be reached."""
        yield from self._take(tree, None)
        for node in tree.body:
            if (
                isinstance(node, ast.FunctionDef)
                and node.name == "check"
                and (candidate := self._candidate(node)) is not None
            ):
                yield from self._take(node, candidate)
                node.body = node.body or [ast.Pass()]

    def _take(self, owner: ast.Module | ast.FunctionDef, candidate: str | None) -> Iterator[PlainCase]:
        kept = []
        for node in owner.body:
            if (case := self.case(node, candidate)) is None:
                kept.append(node)
            else:
                yield case
        owner.body = kept

    def _candidate(self, check: ast.FunctionDef) -> str | None:
        """The only parameter of a check that is called by nothing else and runs to its end."""
        given = check.args
        others = [*given.posonlyargs, *given.kwonlyargs, given.vararg, given.kwarg, *check.decorator_list]
        if self._function is None or len(given.args) != 1 or any(others) or "check" in self._used:
            return None
        name = given.args[0].arg
        for node in ast.walk(check):
            if isinstance(node, (ast.Return, ast.Yield, ast.YieldFrom, ast.Global)):
                return None
            if isinstance(node, ast.Name) and node.id == name and not isinstance(node.ctx, ast.Load):
                return None
        return name


# -- Answers of programs ----------------------------------------------------------------------------------------------


def as_calls(plain: Sequence[PlainCase]) -> list[list[Any]]:
    """Calls as a program's process takes them, see `sandbox.functions`; without expected values."""
    calls = [one for one in plain if one.function]
    return [[one.function, one.args, one.kwargs, one.compares != "json", one.compares == "true"] for one in calls]


def room_for_answers(plain: Sequence[PlainCase]) -> int:
    """Bytes that right answers may have."""
    return MAX_GROWTH * sum(len(repr(one.expected)) for one in plain)


def passed_cases(plain: Sequence[PlainCase], answers: bytes) -> list[bool]:
    """Whether each case holds; none does for a program that fails by itself.

    Args:
        plain: cases.
        answers: a line for the program, and one for each call.
    """
    begun, *lines = answers.split(b"\n")[:-1] or [b""]
    remaining = iter(lines)
    return [bool(begun) and (one.holds(next(remaining, b"")) if one.function else one.expected) for one in plain]


class HasFailed:
    """Whether a call among the answers so far has not returned the expected value.

    Args:
        plain: cases.
    """

    def __init__(self, plain: Sequence[PlainCase]) -> None:
        self._calls = [one for one in plain if one.function]
        self._answers: bytearray | None = None
        self._begin = 0
        self._number = 0

    def __call__(self, answers: bytearray) -> bool:
        """Reads answers beyond the last call's; another object holds those of another try."""
        if answers is not self._answers:
            self._answers = answers
            self._begin = self._number = 0
        end = answers.rfind(b"\n") + 1
        for line in bytes(answers[self._begin : end]).split(b"\n")[:-1]:
            number = self._number - 1  # the first line is the program's
            self._number += 1
            if 0 <= number < len(self._calls) and not self._calls[number].holds(line):
                return True
        self._begin = max(self._begin, end)
        return False


def _agree(found: Any, expected: Any) -> bool:
    """Whether a value is the expected one in JSON, where tuples are lists and floats are rounded."""
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
