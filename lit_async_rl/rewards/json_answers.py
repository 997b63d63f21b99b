"""A grader of answers in JSON."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from lit_async_rl.problem import Prompt
from lit_async_rl.rewards.functions import reference_answer
from lit_async_rl.rewards.references import any_accepted, explained, grades

TOLERANCE = 1e-9  # relative, of numbers
MAX_STARTS = 10_000  # brackets of a completion that are tried as the beginning of JSON
_END_OF_LINE = re.compile(r"[ \t.`*]*(?:\n|$|<)")
_MISSING = object()


def last_json(completion: str, like: Any = _MISSING) -> Any:
    """The last JSON object or array of a completion, else all of it as JSON.

    JSON of the type of the reference `like` counts before other JSON, such as the `[1]` of a footnote, and JSON at the
    end of a line before that within a sentence.

    Raises:
        ValueError: there is none.
    """
    decoder = json.JSONDecoder(parse_constant=_refuse)
    found = _MISSING
    best = (False, False)
    end = 0
    for number, match in enumerate(re.finditer(r"[\[{]", completion)):
        if match.start() < end:
            continue  # within the last one
        if number >= MAX_STARTS:
            break
        try:
            one, end = decoder.raw_decode(completion, match.start())
        except (ValueError, RecursionError):
            continue
        rank = (like is not _MISSING and type(one) is type(like), _END_OF_LINE.match(completion, end) is not None)
        if found is _MISSING or rank >= best:
            found = one
            best = rank
    if found is _MISSING:
        try:
            found = json.loads(completion, parse_constant=_refuse)
        except RecursionError:
            raise ValueError("nested too deeply") from None
    return found


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def shares(reference: Any, given: Any) -> tuple[int, int]:
    """Number of equal values, and of all values of either side. A value is a text, a number, a bool, null or empty."""
    if isinstance(reference, dict) and isinstance(given, dict) and (reference or given):
        pairs = [(reference.get(key, _MISSING), given.get(key, _MISSING)) for key in {**reference, **given}]
    elif isinstance(reference, list) and isinstance(given, list) and (reference or given):
        pairs = list(itertools.zip_longest(reference, given, fillvalue=_MISSING))
    else:
        return int(_is_equal(reference, given)), max(len(list(_values(reference))), len(list(_values(given))))
    counts = [shares(one, other) for one, other in pairs]
    return sum(right for right, _ in counts), sum(number for _, number in counts)


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, int | float) and isinstance(other, int | float):
        if isinstance(one, int) or isinstance(other, int):
            one = _exact(one)
            other = _exact(other)
            if isinstance(one, int) and isinstance(other, int):  # as floats, those above 2^53 equal their neighbours
                return one == other
        try:
            return math.isclose(one, other, rel_tol=TOLERANCE)
        except OverflowError:
            return False
    return type(one) is type(other) and one == other


def _exact(value: float | int) -> float | int:
    """A float without a fraction as an integer: 1.2e23 as 12 * 10^22, unlike the integer that Python stores."""
    return int(Decimal(repr(value))) if isinstance(value, float) and value.is_integer() else value


def _values(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list) and value:
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _values(inner)
    else:
        yield value


def _explain(prompt: Prompt, completion: str) -> tuple[str, str]:
    reference = last_json(reference_answer(prompt))
    try:
        given = last_json(completion, like=reference)
    except ValueError as error:
        return "", f"no JSON was found: {error}"
    right, number = shares(reference, given)
    return json.dumps(given, ensure_ascii=False), f"{right} of {number} values are equal"


@explained(_explain)
@grades(lambda prompt: prompt.answer, partial_credit=True)
@any_accepted
def json_match(prompt: Prompt, completion: str) -> float:
    """Share of the values of a JSON answer that are equal, at the same keys and positions; 1 only if all are.

    The last object of the completion counts, or the last array if the reference is one, also in a block of code; the
    order of keys does not. Values that only one side has are wrong. `1` and `1.0` are equal, `"1"` and `1` are not;
    integers are compared exactly, other numbers to nine digits.

    Raises:
        ValueError: the prompt has no answer, or one that is not JSON.
    """
    try:
        reference = last_json(reference_answer(prompt))
    except ValueError as error:
        raise ValueError(
            f"json_match needs JSON as the reference answer, got {prompt.answer!r:.100}: {error}"
        ) from None
    try:
        right, number = shares(reference, last_json(completion, like=reference))
    except ValueError:
        return 0.0
    return right / number
