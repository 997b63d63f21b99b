"""Graders on answers that were labelled before any grader saw them: few wrong ones pass, and most right ones do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lit_async_rl.problem import Prompt
from lit_async_rl.rewards.json_answers import json_match
from lit_async_rl.rewards.math_grading import math_grader

FILES = [Path(__file__).with_name(f"graded_answers{name}.jsonl") for name in ("", "_held_out", "_third")]
MISSED = {  # what was asked is not known, radians are no rational factor of degrees, and the library drops the x
    ("8", "The answer is 8x."),
    ("$3.50", "The change is $3.50 from a $10 bill."),
    (r"\frac{\pi}{4}", r"\boxed{45^\circ}"),
    (r"60^\circ", r"\boxed{\frac{\pi}{3} \text{ radians}}"),
    ("3:4", "The ratio is 3:4."),
    ("A, C", r"\boxed{AC}"),
    ("[1, 2, 3]", "The answer is [1, 2, 3] (see section [4])."),
}


def rows_of(reward: str) -> list[tuple[str, str, bool]]:
    rows = [json.loads(line) for file in FILES for line in file.read_text(encoding="utf-8").splitlines()]
    return [(row["answer"], row["completion"], row["right"]) for row in rows if row["reward"] == reward]


def test_the_grades_of_math_verify_are_the_labels() -> None:
    grade = math_grader()
    rows = rows_of("MathVerify")
    assert len(rows) > 700
    wrong = {(answer, text) for answer, text, is_right in rows if bool(grade(answer, text)[0]) != is_right}
    assert wrong <= MISSED


def test_the_grades_of_json_match_are_the_labels() -> None:
    rows = rows_of("json_match")
    assert len(rows) > 60
    wrong = {
        (answer, text)
        for answer, text, is_right in rows
        if (json_match(Prompt(text="", answer=answer), text) == 1.0) != is_right
    }
    assert wrong <= MISSED


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        ("$18", "He pays $18.00 in total.", r"\boxed{\pounds 18}"),
        ("18 dollars", "She earns $18 a day.", "She earns $81 a day."),
        ("18 in", "It is 18 in long.", "It is 18 cm long."),
        ("$15 per hour", r"\boxed{\$15/\text{hour}}", r"\boxed{\$15/\text{min}}"),
        ("2.5 million", r"\boxed{2500000}", r"\boxed{2.5}"),
        ("12 thousand", "12,000 people", "12 people"),
        ("5k", r"\boxed{5000}", r"\boxed{5}"),
        ("5k", r"\boxed{k \cdot 5}", r"\boxed{4k}"),
        ("5 K", r"\boxed{5 \text{ kelvin}}", r"\boxed{5000}"),
        ("A", "A careful look shows A", "A careful look shows D"),
        ("A", "A", r"\boxed{A, B, C, D}"),
        ("I", "The answer is I.", "I think it is V."),
        ("B", "answer: b", "answer: a bird"),
        ("B", "(A) is too small. The answer is (B).", "Either A or B"),
        ("(2, 3]", r"\boxed{2 < x \le 3}", r"\boxed{2 \le x < 3}"),
        (r"(-\infty, 0) \cup (2, \infty)", r"\boxed{x < 0 \text{ or } x > 2}", r"\boxed{x < 0}"),
        ("2 hours 30 minutes", "It takes 150 minutes.", "It takes 2 hours 3 minutes."),
        ("-2 hours 30 minutes", r"\boxed{-2.5 \text{ h}}", r"\boxed{-1.5 \text{ h}}"),
        ("63 in", "5'3\"", "5'2\""),
        ("1000 cm^3", r"\boxed{1 \text{ L}}", r"\boxed{1 \text{ mL}}"),
        ("½", r"\boxed{0.5}", r"\boxed{2}"),
        ("-3", "–3", "1–3"),
        ("-3", "The sum is - 3.", "It is 5 - 3"),
        ("1/3", r"\boxed{0.\overline{3}}", r"\boxed{0.3}"),
        ("2e23", r"\boxed{2 \times 10^{23}}", r"\boxed{2 \times 10^{22}}"),
        ("-7", r"\boxed{-7}", r"\boxed{--7}"),
        (r"3\sqrt{2} \text{ m}", r"\boxed{300\sqrt{2} \text{ cm}}", r"\boxed{3\sqrt{2} \text{ cm}}"),
        ("-10/9", r"-\frac{10}{9}", r"\frac{10}{9}"),
        ("2.74", "It costs 2,74 $ here.", "It costs 27,4 $ here."),
        ("16", "**Answer: 16** (for all 4 people)", "**Answer: 4** (of 16 people)"),
    ],
)
def test_a_right_answer_passes_and_its_neighbour_does_not(answer: str, right: str, wrong: str) -> None:
    grade = math_grader()
    assert (grade(answer, right)[0], grade(answer, wrong)[0]) == (True, False)
