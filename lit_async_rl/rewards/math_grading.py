"""Comparison of a final answer with a reference, in the process of a grader: see `MathVerify`.

`rewards.answers` parses numbers, quantities and words of both sides, `math-verify` everything else. Does not import
torch.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lit_async_rl.rewards import answers, units
from lit_async_rl.rewards.answers import Answer

MAX_SHOWN = 200  # characters of an extracted answer


def math_grader() -> Callable[[str, str], tuple[bool | None, str, str]]:
    """Makes `grade(reference, completion)`: whether the answers are equal, the extracted one, and why.

    The first is None for a reference that cannot be parsed.
    """
    import math_verify

    for module in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(module).setLevel(logging.CRITICAL)

    # without the library's timeouts: they use signals, which cannot interrupt native code
    parse = functools.partial(math_verify.parse, parsing_timeout=None)
    config = math_verify.LatexExtractionConfig()
    # the library drops letters as if they were units: it parses `7ab` as 7, and `5m` as 5
    keeps_letters = replace(config, normalization_config=replace(config.normalization_config, units=False))
    parse_algebra = functools.partial(parse, extraction_config=[keeps_letters, math_verify.ExprExtractionConfig()])

    def is_equal(gold: Any, given: Any) -> bool:
        return bool(math_verify.verify(gold, given, timeout_seconds=None)) or _have_equal_solutions(gold, given)

    def grade(reference: str, completion: str) -> tuple[bool | None, str, str]:
        reference = answers.normal_form(reference)
        completion = answers.normal_form(answers.tags_as_announcements(completion))
        has_boxes = reference.count("\\boxed") > 1  # they are items of a list
        right = Answer(math=reference) if has_boxes else answers.read_answer(reference)
        if right.words is not None:
            if not right.words:
                return None, "", "the reference has no words"
            is_right = answers.is_right_in_words(right.words, completion)
            words = answers.final_words(completion)
            return is_right, words[:MAX_SHOWN], "the same words" if is_right else "other words"
        formula = right.math or ""
        is_algebra = answers.has_variables(formula)
        is_text = has_boxes or "$" in formula or "\\[" in formula or "\\(" in formula
        gold = (parse_algebra if is_algebra else parse)(formula if is_text else f"${formula}$")
        if not gold:
            return None, "", "the reference cannot be read"
        boxed = answers.final_answer(completion)
        if right.number is None and completion.count("\\boxed") > 1:
            boxed = None  # as above
        given = None
        if boxed is None and right.number is not None:
            given = answers.last_quantity(completion, right.unit)
        if boxed is None and given is None and (boxed := answers.announced_formula(completion)) is not None:
            completion = f"\\boxed{{{boxed}}}"
        if boxed is not None:
            given = answers.read_as_quantity(boxed, right.unit)
        if given is not None and given.number is not None:
            return _graded_quantity(right, given, lambda: is_equal(gold, parse(f"${given.math}$")))
        factors = None if given is None else units.ratios(given.unit, right.unit)
        if given is not None and factors is not None and 1 not in factors:
            scaled = [rf"${answers.as_fraction(factor)} \cdot ({given.math})$" for factor in factors if given.math]
            is_right = any(is_equal(gold, parse(one)) for one in scaled)
            why = f"{'equal' if is_right else 'not equal'}: {given.unit} and {right.unit}"
            return is_right, (boxed or "")[:MAX_SHOWN], why
        if boxed is not None and (latex := answers.as_latex(boxed)) != boxed:
            completion = f"\\boxed{{{latex}}}"
        completion = answers.mixed_numbers_as_fractions(completion)
        # the answer to a reference with variables may have a unit, which the first parser would keep as letters
        found = [read(completion) for read in ((parse_algebra, parse) if is_algebra else (parse,))]
        is_right = any(is_equal(gold, one) for one in found)
        shown = next((str(part) for one in found for part in reversed(one)), "")
        if not shown:
            return is_right, "", "no answer was found"
        return is_right, shown[:MAX_SHOWN], "equal as formulas" if is_right else "not equal as formulas"

    grade("1", "$1$")  # the library imports lazily; this happens outside of the time limit of calls
    return grade


def _have_equal_solutions(gold: Any, given: Any) -> bool:
    """Whether inequalities, or one and an interval, have the same solutions: `x < 3`, `3 > x` and (-oo, 3)."""
    one = _solutions(gold)
    other = _solutions(given)
    if one is None or other is None or (one[1] and other[1] and one[1] != other[1]):
        return False
    return bool(one[0] == other[0])


def _solutions(parsed: Any) -> tuple[Any, frozenset[Any]] | None:
    """Solutions and variable of an inequality, or of several of which one must hold; None for anything else."""
    import sympy

    value = next(iter(parsed), None)
    if isinstance(value, sympy.Interval | sympy.Union):
        return value, frozenset()
    parts: list[Any] = list(value) if isinstance(value, sympy.FiniteSet) else [value]
    if not all(isinstance(part, sympy.Gt | sympy.Ge | sympy.Lt | sympy.Le | sympy.And | sympy.Or) for part in parts):
        return None
    variables = frozenset().union(*(part.free_symbols for part in parts))
    if len(variables) != 1:
        return None
    try:
        return sympy.Union(*(part.as_set() for part in parts)), variables
    except (NotImplementedError, ValueError, TypeError):
        return None


def _graded_quantity(right: Answer, given: Answer, are_equal: Callable[[], bool]) -> tuple[bool, str, str]:
    """Compares a number with the reference; `are_equal` asks `math-verify`."""
    shown = answers.shown_quantity(given)[:MAX_SHOWN]
    if right.number is None or given.number is None or right.is_percentage or given.is_percentage:
        is_right = are_equal()
    else:
        by_unit = units.compare(right.number, right.unit, other=given.number, other_unit=given.unit)
        if by_unit is not None:
            return by_unit, shown, f"{'equal' if by_unit else 'not equal'}: {given.unit} and {right.unit}"
        larger = max(abs(right.number), abs(given.number))
        if right.number == given.number or larger < answers.SMALL_NUMBER:
            is_right = abs(right.number - given.number) <= larger / 10**6
        else:
            is_right = are_equal()
    return is_right, shown, "equal numbers" if is_right else "not equal"
