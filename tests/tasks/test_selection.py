"""Choosing the largest or smallest number: right answers, disjoint splits."""

import re

import pytest

from lit_async_rl.rewards import last_number
from lit_async_rl.tasks import PickNumber


def test_answers_are_right_and_no_set_of_numbers_is_in_both_splits():
    numbers = {}
    for split in ("train", "held_out"):
        source = PickNumber(size=500, split=split)
        numbers[split] = set()
        for n in range(len(source)):
            prompt = source[n]
            kind, *_ = re.findall(r"largest|smallest", prompt.messages[0]["content"])
            found = [int(text) for text in re.findall(r"\d+", prompt.messages[0]["content"])]
            assert len(set(found)) == 4
            assert int(prompt.answer) == (max(found) if kind == "largest" else min(found))
            assert last_number(prompt, f"It is {prompt.answer}.") == 1.0
            numbers[split].add(tuple(sorted(found)))
    assert not numbers["train"] & numbers["held_out"]


def test_the_same_settings_give_the_same_problems_and_another_seed_others():
    first = [PickNumber(size=20)[n] for n in range(20)]
    assert first == [PickNumber(size=20)[n] for n in range(20)]
    assert first != [PickNumber(size=20, seed=1)[n] for n in range(20)]


@pytest.mark.parametrize("settings", [dict(num_numbers=1), dict(largest=3), dict(kinds=["middle"]), dict(kinds=[])])
def test_settings_out_of_range_are_refused(settings):
    with pytest.raises(ValueError, match="PickNumber"):
        PickNumber(**settings)
