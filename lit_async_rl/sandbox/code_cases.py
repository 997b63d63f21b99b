"""Input of `CodeReward`: code of completions, and test cases in the formats of public data sets."""

from __future__ import annotations

import ast
import base64
import builtins
import contextlib
import functools
import json
import math
import pickletools
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lit_async_rl.problem import Prompt
from lit_async_rl.utils.plain import as_lists, is_missing

_OPENING = re.compile(r" {0,3}(`{3,}|~{3,})[ \t]*([\w+#.-]*)[^`]*")
_CLOSING = re.compile(r" {0,3}(`{3,}|~{3,})[ \t]*")
MAX_UNPACKED_BYTES = 2**29  # of packed cases; more of them are refused
_LISTED = ("public_test_cases", "private_test_cases", "test_cases", "tests")  # fields of input and output
_AROUND_TEXT = {"PROTO", "FRAME", "MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT", "STOP"}  # of a pickle that is one text
ALIASES = {
    "py": "python",
    "python3": "python",
    "js": "javascript",
    "node": "javascript",
    "sh": "bash",
    "shell": "bash",
    "c++": "cpp",
    "rb": "ruby",
    "pl": "perl",
}


@dataclass(frozen=True)
class Block:
    """A fenced code block.

    Attributes:
        language: of its fence, in lower case and without synonyms; empty if it names none.
        code: its text.
    """

    language: str
    code: str


def last_block(completion: str) -> Block | None:
    """The last fenced code block that is closed; None without one."""
    lines = completion.splitlines(keepends=True)
    found: Block | None = None
    opening: re.Match[str] | None = None
    first = 0
    for number, line in enumerate(lines):  # line by line: a pattern for all would take the square of the length
        text = line.rstrip("\r\n")
        if opening is None:
            opening = _OPENING.fullmatch(text)
            first = number + 1
        elif (end := _CLOSING.fullmatch(text)) and end[1].startswith(opening[1]):
            language = opening[2].lower()
            found = Block(ALIASES.get(language, language), "".join(lines[first:number]))
            opening = None
    return found


@dataclass(frozen=True)
class Cases:
    """Test cases of a prompt.

    Attributes:
        streams: pairs of standard input and expected standard output.
        asserts: statements that hold for a right program, each a case.
        check: code with `check(function)`, with asserts of its own, or with tests of pytest or unittest.
        calls: pairs of the arguments of `function` and its expected value.
        setup: code before the tests.
        function: name of the tested function, for `check` and `calls`.
    """

    streams: Sequence[tuple[str, str]] = ()
    asserts: Sequence[str] = ()
    check: str = ""
    calls: Sequence[tuple[Sequence[Any], Any]] = ()
    setup: str = ""
    function: str | None = None

    def __bool__(self) -> bool:
        return bool(self.streams or self.asserts or self.check or self.calls)


def _field(record: Mapping[str, Any], *names: str) -> Any:
    """The first of these fields that is not missing or empty, parsed if it is JSON; None without one."""
    for name in names:
        value = as_lists(record.get(name))
        if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
            with contextlib.suppress(ValueError, RecursionError):
                value = json.loads(value)
        if (
            is_missing(value)
            or (isinstance(value, list | dict) and not value)
            or (isinstance(value, str) and not value.strip())
        ):
            continue
        return value
    return None


def read_cases(prompt: Prompt) -> Cases:
    """Cases of a prompt, from the fields of its record and from its answer.

    | fields | as in |
    |---|---|
    | `test`, `entry_point` | HumanEval, BigCodeBench (with unittest's classes) |
    | `test_list`, `test_setup_code`, `test_imports` | MBPP; `challenge_test_list` is not used |
    | `input_output` or `inputs`, `outputs`, and `fn_name` | APPS, TACO |
    | `public_test_cases`, `private_test_cases` or `test_cases`, of `input` and `output` | LiveCodeBench, Codeforces |

    An answer that is a JSON object counts as such fields, a JSON list as cases or assert statements, and a text with
    `assert` or `def check(` as code of tests. LiveCodeBench's `private_test_cases` may be packed as published.

    Raises:
        ValueError: the fields contradict each other, are no cases, or their tests test nothing.
    """
    cases = _cases_of(prompt)
    if problem := problem_of_tests(tuple(cases.asserts), cases.check, cases.function):
        raise ValueError(problem)
    return cases


def _cases_of(prompt: Prompt) -> Cases:
    record = prompt.metadata
    try:
        return _from_record(record) or _from_answer(prompt.answer, record)
    except ValueError:
        # where the answer has the cases, a field with the name of cases may be something else, such as their number
        others = {name: record[name] for name in record if name not in _LISTED or _is_listed(_field(record, name))}
        if len(others) == len(record) or _from_record(others) or not (cases := _from_answer(prompt.answer, others)):
            raise
        return cases


def _is_listed(value: Any) -> bool:
    """Whether a field may hold cases: as a list, or packed in a text."""
    return isinstance(value, (str, list, tuple))


def _from_answer(given: str | None, record: Mapping[str, Any]) -> Cases:
    """Cases in an answer, with the other fields of its record."""
    answer = _field({"answer": given}, "answer")
    if isinstance(answer, Mapping):
        return _from_record({**record, **answer})
    if isinstance(answer, list):
        key = "test_list" if all(isinstance(one, str) for one in answer) else "test_cases"
        return _from_record({**record, key: answer})
    if isinstance(answer, str) and re.search(r"^\s*(assert\b|def check\()", answer, re.MULTILINE):
        return Cases(check=answer, function=_field(record, "entry_point"))
    return Cases()


def _from_record(record: Mapping[str, Any]) -> Cases:
    function = _field(record, "entry_point", "fn_name")
    if isinstance(nested := _field(record, "input_output"), Mapping):
        record = {**record, **nested}
        function = _field(record, "fn_name", "entry_point")
    setup = "\n".join(_lines(_field(record, "test_imports")) + _lines(_field(record, "test_setup_code")))
    if asserts := _field(record, "test_list"):
        return Cases(asserts=tuple(map(str, asserts)), setup=setup, function=function)
    test = _field(record, "test", "tests")
    if isinstance(test, str):
        return Cases(check=test, setup=setup, function=function)
    if isinstance(test, list) and test and all(isinstance(one, str) for one in test):
        return Cases(asserts=tuple(test), setup=setup, function=function)
    inputs = _field(record, "inputs")
    outputs = _field(record, "outputs")
    if inputs is not None or outputs is not None:
        return _paired(inputs, outputs, function=_field(record, "fn_name"))
    listed = _listed(record)
    if not listed:
        return Cases()
    if any(one.get("testtype") == "functional" for one in listed):
        name = function or _field(_field(record, "metadata") or {}, "func_name")
        calls = [(_arguments(one["input"]), _parsed(one["output"])) for one in listed]
        return Cases(calls=calls, function=_named(name))
    return Cases(streams=[(_text(one["input"]), _text(one["output"])) for one in listed])


def _listed(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Cases of input and output, of all fields together."""
    listed: list[Any] = []
    for name in _LISTED:
        found = _field(record, name)
        if isinstance(found, str):
            found = _unpacked(found)
        if found is not None and not isinstance(found, (list, tuple)):
            raise ValueError(f"{name} must be a list of cases with input and output, got {str(found)[:100]!r}")
        listed += found or ()
    for one in listed:
        if not isinstance(one, Mapping) or "input" not in one or "output" not in one:
            raise ValueError(f"a test case needs input and output, got {str(one)[:100]!r}")
    return listed


def _unpacked(text: str) -> Any:
    """The JSON that LiveCodeBench packs: base64 of a compressed pickle of its text; other text as it is.

    The pickle is taken apart, not loaded: loading would call what it names.
    """
    try:
        pickled = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), MAX_UNPACKED_BYTES)
        parts = [(part.name, value) for part, value, _ in pickletools.genops(pickled)]
        (packed,) = (value for name, value in parts if name not in _AROUND_TEXT)
        return json.loads(packed) if isinstance(packed, str) else text
    except (ValueError, TypeError, RecursionError, zlib.error):
        return text


def _paired(inputs: Any, outputs: Any, function: Any) -> Cases:
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise ValueError(f"inputs and outputs must be lists of the same length, got {str(inputs)[:60]!r}")
    if function is None:
        return Cases(streams=[(_text(one), _text(two)) for one, two in zip(inputs, outputs, strict=True)])
    calls = [
        (one if isinstance(one, list) else _arguments(one), _parsed(two))
        for one, two in zip(inputs, outputs, strict=True)
    ]
    return Cases(calls=calls, function=_named(function))


def _named(function: Any) -> str:
    if not isinstance(function, str) or not function.isidentifier():
        raise ValueError(f"test cases that call a function need its name in fn_name, got {function!r}")
    return function


def _lines(value: Any) -> list[str]:
    if value is None:
        return []
    return [value] if isinstance(value, str) else [str(one) for one in value]


def _text(value: Any) -> str:
    """Standard input or output: a text, or its lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _arguments(text: Any) -> list[Any]:
    """Arguments of a call, one JSON value a line."""
    return [_parsed(line) for line in str(text).splitlines() if line.strip()]


def _parsed(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def solution_of(prompt: Prompt) -> str | None:
    """The solution that the record of a prompt has; None without one."""
    found = _field(prompt.metadata, "canonical_solution", "code", "solution", "solutions")
    if isinstance(found, list):
        found = found[0]
    if not isinstance(found, str):
        return None
    block = last_block(found)
    code = found if block is None else block.code
    start = _field(prompt.metadata, "code_prompt")  # BigCodeBench's
    return f"{start}{code}" if isinstance(start, str) and block is None else code


def agrees(found: str, expected: str, compare: str, tolerance: float) -> bool:
    """Whether standard output is the expected one.

    Args:
        found: output of the program.
        expected: correct output.
        compare: `exact`; `lines`: without space at the ends of lines and of the text; `tokens`: word for word.
        tolerance: greatest difference of numbers, absolute or relative to the expected; 0 compares texts.
    """
    if compare == "exact":
        return found == expected
    if compare == "tokens":
        return _agree(found.split(), expected.split(), tolerance)
    found_lines = [line.rstrip() for line in found.strip().splitlines()]
    lines = [line.rstrip() for line in expected.strip().splitlines()]
    if not tolerance or len(found_lines) != len(lines):
        return found_lines == lines
    return all(_agree(one.split(), two.split(), tolerance) for one, two in zip(found_lines, lines, strict=True))


def _agree(found: Sequence[str], expected: Sequence[str], tolerance: float) -> bool:
    return len(found) == len(expected) and all(map(lambda one, two: _equal(one, two, tolerance), found, expected))


def _equal(found: str, expected: str, tolerance: float) -> bool:
    if found == expected or not tolerance:
        return found == expected
    try:
        number = float(expected)
        difference = abs(float(found) - number)
    except ValueError:
        return False
    return math.isfinite(number) and difference <= tolerance * max(1.0, abs(number))


# -- Tests that test nothing ------------------------------------------------------------------------------------------

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@functools.lru_cache(maxsize=256)
def problem_of_tests(asserts: tuple[str, ...], check: str, function: str | None) -> str | None:
    """Reason why every program would pass some of these tests of `Cases`, or none could; None without one."""
    if not asserts and not check:
        return None
    body: list[ast.stmt] = []
    try:
        for code in (*asserts, check):
            body += ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"its tests are not Python ({error})"
    return _Tests(body, function, is_list=not check).problem()


class _Tests:
    """Unit tests: `sandbox.tests` runs their statements and, except in a list, `check`, `test...` and TestCases."""

    def __init__(self, body: Sequence[ast.stmt], function: str | None, is_list: bool) -> None:
        self._function = function
        self._is_list = is_list
        self._defined = {one.name: one for one in body if isinstance(one, (*_FUNCTIONS, ast.ClassDef))}
        self._statements = [
            one for one in body if not isinstance(one, (*_FUNCTIONS, ast.ClassDef)) and not _is_for_scripts(one)
        ]
        self._used: set[str] = set()
        self._known = set(dir(builtins))
        for node in (node for one in body for node in ast.walk(one)):
            if isinstance(node, ast.Name):
                (self._used if isinstance(node.ctx, ast.Load) else self._known).add(node.id)
            elif isinstance(node, ast.alias):
                self._known.add((node.asname or node.name).split(".")[0])

    def problem(self) -> str | None:
        """See `problem_of_tests`."""
        if problem := next(self._never_run(), None):
            return problem
        if any(map(self._can_fail, self._statements)) or any(map(self._is_run, self._defined.values())):
            return None
        if "check" in self._defined and self._function is None:
            return "check(...) needs the name of the program's function in entry_point"
        return "nothing in its tests is run that can fail"

    def _never_run(self) -> Iterator[str]:
        """Tests that another tool would run."""
        for name, one in self._defined.items():
            if name in self._used or "globals" in self._used:
                continue
            if self._is_list:
                if name.lower().startswith("test") or name == "check":
                    yield f"a list of tests defines {name} without a call of it"
            elif isinstance(one, ast.ClassDef):
                bases = self._bases(one)
                if name.startswith("Test") and not bases and _tests_of(one):
                    yield f"the class {name} is not a unittest.TestCase, and pytest is not used"
                if bases == ["TestCase"] and any(isinstance(part, ast.AsyncFunctionDef) for part in _tests_of(one)):
                    yield f"the class {name} has async tests, and is not a unittest.IsolatedAsyncioTestCase"
            elif name.startswith("test") and (missing := _required(one)):
                yield f"{name} needs {', '.join(missing)}, and pytest, which gives arguments to tests, is not used"
            elif (name.startswith("test") or name == "check") and _is_generator(one):
                yield f"{name} is a generator, which nothing runs"

    def _is_run(self, one: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> bool:
        """Whether a definition is run as a test, and can fail."""
        if self._is_list or _is_skipped(one):
            return False
        if isinstance(one, ast.ClassDef):
            own = _tests_of(one)
            is_case = any("TestCase" in base for base in self._bases(one))
            return is_case and (not own or any(not _is_skipped(part) and self._can_fail(part) for part in own))
        is_check = one.name == "check" and self._function is not None
        return (is_check or one.name.startswith("test")) and self._can_fail(one)

    def _bases(self, one: ast.ClassDef) -> list[str]:
        """Names of the classes outside of the tests that a class extends."""
        found: list[str] = []
        for base in one.bases:
            name = ast.unparse(base).rpartition(".")[2]
            inner = self._defined.get(name)
            found += self._bases(inner) if isinstance(inner, ast.ClassDef) and inner is not one else [name]
        return [name for name in found if name != "object"]

    def _can_fail(self, node: ast.AST, seen: frozenset[str] = frozenset()) -> bool:
        """Whether code asserts, raises, or mentions names not its own, such as the program's function."""
        for one in ast.walk(node):
            if isinstance(one, (ast.Assert, ast.Raise)):
                return True
            if not isinstance(one, ast.Name) or one.id in self._known or one.id in seen or one.id.startswith("__"):
                continue
            inner = self._defined.get(one.id)
            if inner is None or self._can_fail(inner, seen | {one.id}):
                return True
        return False


def _tests_of(one: ast.ClassDef) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [part for part in one.body if isinstance(part, _FUNCTIONS) and part.name.startswith("test")]


def _is_for_scripts(node: ast.AST) -> bool:
    """Whether it is `if __name__ == "__main__"`, false in tests."""
    return isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)


def _is_skipped(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> bool:
    return any(re.match(r"(unittest\.)?skip\b", ast.unparse(one)) for one in node.decorator_list)


def _is_generator(node: ast.AST) -> bool:
    inner = [one for one in ast.iter_child_nodes(node) if not isinstance(one, (*_FUNCTIONS, ast.Lambda))]
    return isinstance(node, (ast.Yield, ast.YieldFrom)) or any(map(_is_generator, inner))


def _required(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Parameters that a call must give; decorators such as `unittest.mock.patch` give some."""
    if not all(ast.unparse(one).startswith("pytest.") for one in node.decorator_list):
        return []
    given = [*node.args.posonlyargs, *node.args.args]
    found = given[: len(given) - len(node.args.defaults)]
    found += [one for one, value in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True) if value is None]
    return [one.arg for one in found]
