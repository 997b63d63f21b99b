"""Every kind of reference answer as data sets write it: the right completion has full marks, and wrong ones 0."""

import pytest

from lit_async_rl.problem import Prompt
from lit_async_rl.rewards.functions import MathVerify, last_number

KINDS = {
    "numbers": [
        ("18", [r"\boxed{18}", "so 18", r"\boxed{18.0}"], [r"\boxed{19}", "so 17", ""]),
        ("1e-05", [r"\boxed{0.00001}", r"\boxed{10^{-5}}"], [r"\boxed{0.00002}", r"\boxed{0}", r"\boxed{5}"]),
        ("1e+22", [r"\boxed{10^{22}}", r"\boxed{10000000000000000000000}"], [r"\boxed{10^{21}}", r"\boxed{22}"]),
        ("0.0000001", [r"\boxed{0.0000001}", r"\boxed{10^{-7}}"], [r"\boxed{0.0000002}"]),
        ("1,234", [r"\boxed{1234}", r"\boxed{1{,}234}", "1,234"], [r"\boxed{1}", r"\boxed{234}"]),
        ("1 234 567", [r"\boxed{1234567}"], [r"\boxed{1234568}", r"\boxed{802}"]),
        ("−3", [r"\boxed{-3}"], [r"\boxed{3}"]),
        (r"\[\dfrac{9}{7}\]", [r"\boxed{9/7}", r"\boxed{\frac{9}{7}}"], [r"\boxed{7/9}"]),
    ],
    "units": [
        ("18 dollars", [r"\boxed{18}", r"\boxed{\$18}", r"\boxed{18 \text{ dollars}}", "18 dollars"], [r"\boxed{17}"]),
        ("$18", [r"\boxed{18}", r"\boxed{18 dollars}"], [r"\boxed{81}"]),
        (
            "18 dollars",
            [r"\boxed{1800 \text{ cents}}", "so 1800 cents.", "it costs $18", "18 dollars in total", "18 coins"],
            [r"\boxed{18 \text{ cents}}", r"\boxed{18¢}", "so 18 cents.", "it costs 18 euros", r"\boxed{€18}"],
        ),
        ("1.8 m", [r"\boxed{180 cm}", "180 centimeters", r"\boxed{1.8}"], [r"\boxed{1.8 cm}", r"\boxed{180 mm}"]),
        ("20°C", [r"\boxed{20 \text{ degrees Celsius}}", r"\boxed{20^\circ}"], [r"\boxed{20 °F}"]),
        ("90 minutes", [r"\boxed{1.5 \text{ hours}}", "1 1/2 hours", r"\boxed{90}"], [r"\boxed{90 \text{ hours}}"]),
        ("12 apples", [r"\boxed{12 \text{ pieces}}", r"\boxed{12}"], [r"\boxed{13 \text{ apples}}"]),
        ("5 m/s", [r"\boxed{5}", r"\boxed{5\text{ m/s}}", r"\boxed{5 m/s}"], [r"\boxed{6}", r"\boxed{6 m/s}"]),
        ("50 miles per hour", [r"\boxed{50}", r"\boxed{50 mph}", "50 miles per hour"], [r"\boxed{5}"]),
        ("12 cm^2", [r"\boxed{12}", r"\boxed{12\text{ cm}^2}"], [r"\boxed{144}", r"\boxed{13\text{ cm}^2}"]),
        ("5 (five)", [r"\boxed{5}"], [r"\boxed{25}"]),
        ("5 m", [r"\boxed{5m}", r"\boxed{5\,m}", r"\boxed{5}", r"\boxed{5\text{ m}}"], [r"\boxed{6m}", r"\boxed{50}"]),
        ("6 in.", [r"\boxed{6}", r"\boxed{6 \text{ in}}"], [r"\boxed{12}"]),
        ("20 square feet", [r"\boxed{20}", r"\boxed{20 \text{ ft}^2}"], [r"\boxed{400}"]),
        ("3-1/2 cups", [r"\boxed{3.5}"], [r"\boxed{2.5}"]),
        ("9:00 p.m.", [r"\boxed{9 \text{ pm}}", r"\boxed{9:00 PM}"], [r"\boxed{9:00 a.m.}", r"\boxed{8 pm}"]),
        ("90°", [r"\boxed{90}", r"\boxed{90^\circ}"], [r"\boxed{45}"]),
        ("2 hours 30 minutes", [r"\boxed{2 \text{ hours } 30 \text{ minutes}}"], [r"\boxed{2}", r"\boxed{3 hours}"]),
    ],
    "fractions": [
        ("1/2", [r"\boxed{0.5}", r"\boxed{\frac12}", r"\boxed{2/4}"], [r"\boxed{2}", r"\boxed{1}"]),
        (
            "1/2 cup",
            [r"\boxed{1/2}", r"\boxed{\frac{1}{2}}", r"\boxed{0.5 \text{ cups}}"],
            [r"\boxed{1}", r"\boxed{2}"],
        ),
        ("-3/4", [r"\boxed{-0.75}", r"\boxed{-\frac{3}{4}}"], [r"\boxed{0.75}"]),
        (r"\frac{1}{2} \text{ cup}", [r"\boxed{0.5}"], [r"\boxed{2}"]),
    ],
    "mixed numbers": [
        (
            "2 1/2",
            [r"\boxed{2.5}", r"\boxed{2 1/2}", r"\boxed{2\frac{1}{2}}", "so 2 1/2"],
            [r"\boxed{1.5}", r"\boxed{1}"],
        ),
        ("1", [r"\boxed{1}"], [r"\boxed{2 1/2}", "so 2 1/2"]),
        ("-1 3/4 cups", [r"\boxed{-1.75}"], [r"\boxed{-0.25}", r"\boxed{1.75}"]),
        (r"2\frac{1}{2}", [r"\boxed{5/2}", r"\boxed{2 1/2}"], [r"\boxed{1}"]),
    ],
    "percentages": [
        (
            "50%",
            [r"\boxed{50\%}", r"\boxed{50}", r"\boxed{0.5}", r"\boxed{50 percent}"],
            [r"\boxed{5}", r"\boxed{5\%}"],
        ),
        ("12.5 percent", [r"\boxed{12.5\%}", r"\boxed{\frac{1}{8}}"], [r"\boxed{125}"]),
    ],
    "intervals": [
        ("[1, 2)", [r"\boxed{[1, 2)}"], [r"\boxed{[1, 2]}", r"\boxed{(1, 2)}", r"\boxed{1}"]),
        (r"(0, \infty)", [r"\boxed{(0, \infty)}"], [r"\boxed{[0, \infty)}", r"\boxed{0}"]),
        (r"(-\infty, 3) \cup (5, \infty)", [r"\boxed{(-\infty,3)\cup(5,\infty)}"], [r"\boxed{(-\infty,3)}"]),
    ],
    "sets": [
        ("{1, 2, 3}", [r"\boxed{\{3, 2, 1\}}"], [r"\boxed{\{1, 2\}}", r"\boxed{6}"]),
        ("1, 2", [r"\boxed{1, 2}", r"\boxed{2, 1}"], [r"\boxed{1}", r"\boxed{1, 3}"]),
        (r"$\{x, 2\}$", [r"\boxed{\{2, x\}}"], [r"\boxed{\{2, y\}}"]),
    ],
    "choices": [
        (
            "B",
            [r"\boxed{B}", r"\boxed{\text{(B)}}", "The answer is B.", r"\boxed{(B) 17}"],
            [r"\boxed{A}", "C", r"\boxed{2}"],
        ),
        ("(C)", [r"\boxed{C}", "Answer: (C)"], [r"\boxed{B}", r"\boxed{}"]),
    ],
    "text": [
        ("Paris", [r"\boxed{Paris}", r"\boxed{\text{paris}}", "The answer is Paris."], [r"\boxed{Pairs}", "Rome", ""]),
        ("New York", [r"\boxed{\text{New York}}"], [r"\boxed{York}", r"\boxed{New Jersey}"]),
        ("True", [r"\boxed{True}", r"\boxed{\text{true}}"], [r"\boxed{False}", r"\boxed{1}"]),
    ],
    "lists": [
        ("5 or -3", [r"\boxed{-3, 5}", r"\boxed{5 \text{ or } -3}"], [r"\boxed{5}", r"\boxed{3, 5}"]),
        ("x=2 or x=3", [r"\boxed{x=3 \text{ or } x=2}"], [r"\boxed{x=2}"]),
        ("(A) and (C)", [r"\boxed{A, C}"], [r"\boxed{A}", r"\boxed{A, B}"]),
    ],
    "algebra": [
        ("3 pi", [r"\boxed{3\pi}", r"\boxed{3 \pi}", r"\boxed{3 pi}"], [r"\boxed{3}", r"\boxed{\pi}"]),
        ("3 x^2", [r"\boxed{3x^2}", r"\boxed{3 x^{2}}"], [r"\boxed{3}", r"\boxed{3 x}", r"\boxed{9}"]),
        ("2 xy", [r"\boxed{2xy}", r"\boxed{2yx}"], [r"\boxed{2}", r"\boxed{2x}"]),
        ("7 ab", [r"\boxed{7ab}", r"\boxed{7ba}"], [r"\boxed{7}"]),
        ("5m", [r"\boxed{5m}"], [r"\boxed{5}", r"\boxed{6m}"]),
        (
            r"3\sqrt{2} \text{ feet}",
            [r"\boxed{3\sqrt{2}}", r"\boxed{3 sqrt(2)}", r"\boxed{3\sqrt{2} \text{ ft}}"],
            [r"\boxed{3}", r"\boxed{3\sqrt{2} \text{ cm}}"],
        ),
        ("2 pi cm", [r"\boxed{2\pi}", r"\boxed{2\pi \text{ cm}}"], [r"\boxed{2}", r"\boxed{\pi}"]),
        ("3 sqrt(2) feet", [r"\boxed{3\sqrt{2}}"], [r"\boxed{3}", r"\boxed{2}"]),
        ("5a/b", [r"\boxed{\frac{5a}{b}}"], [r"\boxed{5}"]),
        ("2(x+y)", [r"\boxed{2x+2y}"], [r"\boxed{2}"]),
        ("5 sqrt(x)", [r"\boxed{5\sqrt{x}}"], [r"\boxed{5}"]),
        ("3-1/2", [r"\boxed{2.5}", r"\boxed{3-1/2}"], [r"\boxed{3.5}"]),
        ("7/2", [r"\boxed{3 1/2}"], [r"\boxed{3-1/2}"]),
        ("5 x", [r"\boxed{5x}"], [r"\boxed{5}", r"\boxed{6x}"]),
        ("x = 3", [r"\boxed{x=3}", r"\boxed{3}"], [r"\boxed{x=4}"]),
        ("xy", [r"\boxed{yx}"], [r"\boxed{x}"]),
        (r"2\pi", [r"\boxed{2\pi}"], [r"\boxed{2}"]),
        ("sqrt(8)", [r"\boxed{2\sqrt{2}}"], [r"\boxed{8}"]),
    ],
}
CASES = [pytest.param(*case, id=f"{kind}: {case[0]}") for kind, cases in KINDS.items() for case in cases]


@pytest.fixture(scope="module")
def math_verify():
    return MathVerify(timeout_s=30.0)


@pytest.mark.parametrize(("answer", "right", "wrong"), CASES)
def test_right_answers_have_full_marks_and_wrong_ones_none(answer, right, wrong, math_verify):
    prompt = Prompt(text="", answer=answer)
    found = {completion: math_verify(prompt, completion) for completion in (*right, *wrong)}
    assert found == dict.fromkeys(right, 1.0) | dict.fromkeys(wrong, 0.0)


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        ("1,234", "It is 1,234.", "It is 1,235."),
        ("18 dollars", "so $18", "so $17"),
        ("50%", "50%", "5%"),
        ("2 1/2", "so 2 1/2 cups", "so 1/2 cups"),
        ("1/2", "it is 1/2", "it is 2"),
        ("1e-05", "0.00001", "0.00002"),
        ("-3", "x = -3", "5-3"),
        ("−3", "x = −3", "3"),
        ("2.5 million", "so 2.5 million", "so 2.5"),
        ("2500000", "so 2.5 million people", "so 2.5 thousand people"),
        ("5000", "so 5k", "so 5"),
    ],
)
def test_the_last_number_is_compared_with_numbers_in_any_notation(answer, right, wrong):
    prompt = Prompt(text="", answer=answer)
    assert (last_number(prompt, right), last_number(prompt, wrong)) == (1.0, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("answer", ["Paris", "2 hours 30 minutes"])
def test_the_last_number_names_a_reference_without_one(answer):
    with pytest.raises(ValueError, match=rf"last_number needs a number as the reference answer, got '{answer}'"):
        last_number(Prompt(text="", answer=answer), "30")
