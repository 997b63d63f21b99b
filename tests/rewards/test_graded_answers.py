"""Graders on answers that were labelled before any grader saw them: few wrong ones pass, and most right ones do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lit_async_rl.problem import Prompt
from lit_async_rl.rewards.json_answers import json_match
from lit_async_rl.rewards.math_grading import math_grader

FILES = [Path(__file__).with_name(f"graded_answers{name}.jsonl") for name in ("", "_held_out", "_third")]
MISSED = {  # what was asked is not known, and radians are no rational factor of degrees
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


@pytest.mark.slow
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


ANNOUNCED = {  # an answer behind `answer is` without a box, right and wrong
    "x+1": (
        ["x+1.", "$x+1$.", "`x + 1`.", "**x+1**", "y = x+1.", "x+1. I hope it is correct."],
        ["x+2.", "2(x+1).", "x+1, not x+2.", "x+1 or x+2.", "not x+1.", "x+1?", "x+1 if x > 0, else x-1."],
    ),
    "(1,2)": (["(1,2).", "(1, 2)", "$(1,2)$."], ["(2,1).", "(1,2) or (2,1).", "(1,2,3).", "(1,3).", "(1,2]."]),
    "[0,1)": (["[0,1).", r"\([0,1)\).", r"0 \le x < 1."], ["[0,1].", "(0,1).", "[0,1) and [2,3).", "[0,10)."]),
    "1,2": (["1, 2.", "2, 1.", "1 and 2."], ["1.", "1, 2, 3.", "1.2.", "12.", "1, 3.", "1, 2, ...", "not 1, 2."]),
    "x<3": (["x < 3.", "3 > x"], ["x <= 3.", "x > 3.", "3.", "x < 3 and x > 1.", "x < 30.", "y < 4."]),
    "10:30": (["10:30", "10:30."], ["10:45.", "10", "30", "10:30 or 11:30.", "10:30:15"]),
    "3:2": (["3:2."], ["2:3.", "3:2:1.", "3.", "2.", "3:20."]),
    "2x": (["2x.", "2 x"], ["2.", "2x+1.", "-2x.", "2x/3.", "2x^2."]),
    "n": (["n."], ["n! / 2.", "n!", "2n."]),
    r"\sqrt{2}": ([r"\sqrt{2}.", "sqrt(2)."], [r"\sqrt{3}.", "2.", r"2\sqrt{2}."]),
    r"3\sqrt{2} \text{ feet}": ([r"3\sqrt{2} feet."], [r"3\sqrt{2} cm.", r"\sqrt{2} feet."]),
    "8": (["2^3.", "4 * 2."], ["8x.", "8 * 2.", "8 / 2"]),
}


@pytest.mark.parametrize("answer", ANNOUNCED)
@pytest.mark.parametrize("form", ["The answer is {}", "So it is 5.\n#### {}", "Answer: {}\nThe end."])
def test_an_announced_formula_is_read_like_one_in_a_box(answer: str, form: str) -> None:
    grade = math_grader()
    right, wrong = ANNOUNCED[answer]
    found = {text: grade(answer, form.format(text))[0] for text in (*right, *wrong)}
    assert found == dict.fromkeys(right, True) | dict.fromkeys(wrong, False)


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        ("5", "<answer>5</answer>", "<answer>6</answer>"),
        ("5", "<think>3 + 2 = 5</think><answer>\n5\n</answer>", "<think>3 + 2 = 5</think><answer>\n6\n</answer>"),
        ("5", "<think>The answer is 6.</think><answer>5", "<think>The answer is 5.</think><answer>6"),
        ("5", "<answer>6</answer> No: <answer>5</answer>", "<answer>5</answer> No: <answer>6</answer>"),
        ("5", r"<answer>\boxed{5}</answer>", "<answer>-5</answer>"),
        ("5", "<ANSWER>5</ANSWER>", "<answer>5x</answer>"),
        ("18", "<think>9*2</think><answer>$18</answer>", "<think>9*2 = 18</think><answer>$9</answer>"),
        ("18 dollars", "<answer>18 dollars</answer>", "<answer>18 cents</answer>"),
        ("3/4", "<answer>3/4</answer>", "<answer>4/3</answer>"),
        ("x+1", "<answer>x+1</answer>", "<answer>x+2</answer>"),
        ("Paris", "<answer>Paris</answer>", "<answer>Rome</answer> Paris"),
        ("Paris", "I write it into <answer> tags.\nIt is Paris.", "Paris is in <answer> tags.\nIt is Rome."),
        ("B", "It is not A. <answer>(B)</answer>", "It is not A, but B. <answer>A</answer>"),
        ("-5", "It is minus 5.", "It is 5."),
        ("-5", "Negative 5 degrees", "It is non-negative 5"),
        ("-5", "The answer is minus $5.", "10 minus 5"),
        ("minus 5", "-5", "5"),
        ("5", "10 minus 5 is 5.", "minus 5"),
        ("5", "5 and not minus", r"\boxed{negative 5}"),
        ("-5", "minus 5", "plus or minus 5"),
        ("-5", "negative 5", "It is x minus 5"),
    ],
)
def test_answers_in_tags_and_signs_in_words(answer: str, right: str, wrong: str) -> None:
    grade = math_grader()
    assert (grade(answer, right)[0], grade(answer, wrong)[0]) == (True, False)
