"""Answers in JSON: the share of equal values, whatever stands around them."""

import pytest

import lit_async_rl as rl
from lit_async_rl.problem import Prompt

REFERENCE = '{"name": "Ann", "ages": [3, 4.5], "ok": true, "none": null}'
CASES = {
    REFERENCE: 1.0,
    '```json\n{"ok": true, "none": null, "ages": [3.0, 4.5], "name": "Ann"}\n```': 1.0,
    'First {"name": "Bob"}, no: {"name": "Ann", "ages": [3, 4.5], "ok": true, "none": null}.': 1.0,
    '{"name": "Ann", "ages": [4.5, 3], "ok": true, "none": null}': 3 / 5,
    '{"name": "Ann", "ages": [3], "ok": true, "none": null}': 4 / 5,
    '{"name": "Ann", "ages": [3, 4.5], "ok": true}': 4 / 5,
    '{"name": "Ann", "ages": [3, 4.5], "ok": 1, "none": null}': 4 / 5,
    '{"name": "Ann", "ages": [3, "4.5"], "ok": true, "none": null}': 4 / 5,
    '{"name": "Ann", "ages": [3, 4.5], "ok": true, "none": null, "more": {"a": 1, "b": 2}}': 5 / 7,
    '{"name": "Ann", "ages": [3, NaN], "ok": true, "none": null}': 0.0,
    "{": 0.0,
    "": 0.0,
    "[" * 100_000: 0.0,
    "1" * 5000: 0.0,
    "[]": 0.0,
}


@pytest.mark.parametrize(("completion", "share"), CASES.items(), ids=range(len(CASES)))
def test_the_share_of_equal_values_counts(completion, share):
    assert rl.json_match(Prompt(text="", answer=REFERENCE), completion) == pytest.approx(share)


@pytest.mark.parametrize("answer", ["3", '"a"', "[]", "{}", "[1, [2, {}]]", "null"])
def test_a_reference_has_full_marks_for_itself(answer):
    assert rl.json_match(Prompt(text="", answer=answer), answer) == 1.0
    assert rl.json_match(Prompt(text="", answer=answer), "[7]") < 1.0


def test_a_reference_that_is_no_json_is_named():
    with pytest.raises(ValueError, match=r"json_match needs JSON as the reference answer, got 'Paris'"):
        rl.json_match(Prompt(text="", answer="Paris"), "{}")


def test_accepted_answers_each_count():
    prompt = Prompt(text="", answer="[1]", other_answers=("[2]",))
    assert rl.json_match(prompt, "[2]") == 1.0
