"""Range checks: accepted and refused values, and the message."""

from __future__ import annotations

import math

import pytest

from lit_async_rl.utils.checks import check_range, meant

CASES = [
    (">= 0", [0, 3, math.inf], [-1, -0.1, math.nan]),
    ("> 1", [1.5], [1, 0, math.nan]),
    ("<= 1", [1, -math.inf], [1.01, math.nan]),
    ("< 1", [0.9], [1, math.nan]),
    ("positive", [1e-9], [0, -1, math.nan, math.inf]),
    ("finite", [-1e9], [math.inf, math.nan]),
    ("in [0, 1]", [0, 1], [-0.1, 1.1, math.nan]),
    ("in (0, 1]", [0.1, 1], [0, 1.1]),
    ("in (0, 1)", [0.5], [0, 1]),
    (">= 0 and finite", [0, 2], [-1, math.inf]),
]


@pytest.mark.parametrize(("rule", "good", "bad"), CASES)
def test_rules_accept_and_refuse(rule: str, good: list[int | float], bad: list[int | float]) -> None:
    check_range("part", rule, unset=None, **{f"setting{n}": value for n, value in enumerate(good)})
    for value in bad:
        with pytest.raises(ValueError, match=r"^part\.setting must be "):
            check_range("part", rule, setting=value)


def test_message_names_setting_rule_and_value() -> None:
    with pytest.raises(ValueError, match=r"^data\.max_staleness must be >= 0, got -1$"):
        check_range("data", ">= 0", queue=1, max_staleness=-1)


def test_unknown_rule_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown rule 'small'"):
        check_range("data", "small", setting=1)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("temp", "; did you mean temperature?"),  # not stop, which has more letters in common with it
        ("top", "; did you mean top_p or top_k?"),
        ("temprature", "; did you mean temperature?"),
        ("t", ""),  # too short for an abbreviation
        ("xyz", ""),
    ],
)
def test_names_that_may_have_been_meant(name, says):
    assert meant(name, ["stop", "temperature", "top_p", "top_k", "tokens"]) == says


def test_four_names_are_too_many_to_be_suggested():
    assert meant("max", ["max_a", "max_b", "max_c"]) == "; did you mean max_a, max_b or max_c?"
    assert meant("max", ["max_long_a", "max_long_b", "max_long_c", "max_long_d"]) == ""
