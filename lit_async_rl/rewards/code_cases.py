"""What `CodeReward` reads: the code of a completion, and the test cases of a prompt in the fields of public sets."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lit_async_rl.types import Prompt

_OPENING = re.compile(r" {0,3}(`{3,}|~{3,})[ \t]*([\w+#.-]*)[^`]*")
_CLOSING = re.compile(r" {0,3}(`{3,}|~{3,})[ \t]*")
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
        language: of its fence, in lower case and without synonyms; empty where it names none.
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
        check: code with `check(function)`, or that asserts by itself, or that has tests of pytest or unittest.
        calls: pairs of the arguments of `function` and its expected value.
        setup: code before the tests.
        function: name of the function that is tested, for `check` and `calls`.
    """

    streams: Sequence[tuple[str, str]] = ()
    asserts: Sequence[str] = ()
    check: str = ""
    calls: Sequence[tuple[Sequence[Any], Any]] = ()
    setup: str = ""
    function: str | None = None

    def __bool__(self) -> bool:
        return bool(self.streams or self.asserts or self.check or self.calls)


@dataclass
class _Fields:
    """Fields of a record, with those that are JSON parsed."""

    record: Mapping[str, Any] = field(default_factory=dict)

    def get(self, *names: str) -> Any:
        """The first of these fields that is not empty; None without one."""
        for name in names:
            value = self.record.get(name)
            if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
                with contextlib.suppress(ValueError, RecursionError):
                    value = json.loads(value)
            if value is not None and value != "" and value != []:
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

    The answer counts as such fields if it is JSON of an object, as a list of cases or of assert statements if it is
    JSON of a list, and else as code of tests, if it has `assert` or `def check(`.

    Raises:
        ValueError: the fields contradict each other, or are no cases.
    """
    fields = _Fields(prompt.metadata)
    cases = _from_fields(fields)
    if cases or prompt.answer is None:
        return cases
    answer = _Fields({"answer": prompt.answer}).get("answer")
    if isinstance(answer, Mapping):
        merged = _Fields({**prompt.metadata, **answer})
        return _from_fields(merged)
    if isinstance(answer, list):
        key = "test_list" if all(isinstance(one, str) for one in answer) else "test_cases"
        return _from_fields(_Fields({**prompt.metadata, key: answer}))
    if isinstance(answer, str) and re.search(r"^\s*(assert\b|def check\()", answer, re.MULTILINE):
        return Cases(check=answer, function=fields.get("entry_point"))
    return Cases()


def _from_fields(fields: _Fields) -> Cases:
    function = fields.get("entry_point", "fn_name")
    if isinstance(nested := fields.get("input_output"), Mapping):
        fields = _Fields({**fields.record, **nested})
        function = fields.get("fn_name", "entry_point")
    setup = "\n".join(_lines(fields.get("test_imports")) + _lines(fields.get("test_setup_code")))
    if asserts := fields.get("test_list"):
        return Cases(asserts=tuple(map(str, asserts)), setup=setup, function=function)
    test = fields.get("test", "tests")
    if isinstance(test, str):
        return Cases(check=test, setup=setup, function=function)
    if isinstance(test, list) and test and all(isinstance(one, str) for one in test):
        return Cases(asserts=tuple(test), setup=setup, function=function)
    inputs = fields.get("inputs")
    outputs = fields.get("outputs")
    if inputs is not None or outputs is not None:
        return _paired(inputs, outputs, function=fields.get("fn_name"))
    listed: list[Any] = []
    for name in ("public_test_cases", "private_test_cases", "test_cases", "tests"):
        found = fields.get(name)
        listed += found if isinstance(found, list) else []
    if not listed:
        return Cases()
    for one in listed:
        if not isinstance(one, Mapping) or "input" not in one or "output" not in one:
            raise ValueError(f"a test case needs input and output, got {str(one)[:100]!r}")
    if any(one.get("testtype") == "functional" for one in listed):
        name = function or _Fields(fields.get("metadata") or {}).get("func_name")
        calls = [(_arguments(one["input"]), _parsed(one["output"])) for one in listed]
        return Cases(calls=calls, function=_named(name))
    return Cases(streams=[(_text(one["input"]), _text(one["output"])) for one in listed])


def _paired(inputs: Any, outputs: Any, function: Any) -> Cases:
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise ValueError(f"inputs and outputs must be lists of one length, got {str(inputs)[:60]!r}")
    if function is None:
        return Cases(streams=[(_text(one), _text(two)) for one, two in zip(inputs, outputs, strict=True)])
    calls = [
        (one if isinstance(one, list) else _arguments(one), _parsed(two))
        for one, two in zip(inputs, outputs, strict=True)
    ]
    return Cases(calls=calls, function=_named(function))


def _named(function: Any) -> str:
    if not isinstance(function, str) or not function.isidentifier():
        raise ValueError(f"calls need the name of a function in fn_name, got {function!r}")
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


def agrees(found: str, expected: str, compare: str, tolerance: float) -> bool:
    """Whether standard output is the expected one.

    Args:
        found: what a program wrote.
        expected: what it should have written.
        compare: `exact`; `lines`: without space at the ends of lines and of the text; `tokens`: word for word.
        tolerance: greatest difference of numbers, absolute or relative to the expected one; 0 compares texts.
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
    return difference <= tolerance * max(1.0, abs(number))
