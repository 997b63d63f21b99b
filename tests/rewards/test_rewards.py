"""Rewards on cases done by hand; the libraries behind them judge in a process of their own."""

import re
import threading
import time
from functools import partial

import pytest

from lit_async_rl.assets import asset
from lit_async_rl.errors import RewardError
from lit_async_rl.problem import Prompt
from lit_async_rl.prompts.sources import JsonlPrompts
from lit_async_rl.rewards import functions
from lit_async_rl.rewards.calls import score
from lit_async_rl.rewards.functions import IsolatedReward, MathVerify, exact_match, share_correct
from lit_async_rl.utils.identity import reward_identity

PROBLEMS = JsonlPrompts(asset("word_problems.jsonl"), prompt_field="question")


@pytest.fixture(scope="module")
def math_verify():
    return MathVerify()


@pytest.mark.parametrize(
    ("answer", "completion", "exact", "share"),
    [
        ("1234", "1234", 1, 1),
        ("1234", "1243", 0, 0.5),
        ("1234", "12", 0, 0.5),
        ("1234", "12345678", 0, 0.5),
        ("1234", "", 0, 0),
        ("1234", "4321", 0, 0),
        ("", "", 1, 1),
    ],
)
def test_comparison_of_texts(answer, completion, exact, share):
    prompt = Prompt(text="", answer=answer)
    assert exact_match(prompt, completion) == exact
    assert share_correct(prompt, completion) == pytest.approx(share)


class Judge:
    """Keeps one of its arguments."""

    def __init__(self, rubric):
        self._rubric = rubric

    def __call__(self, prompt, completion, weight=1.0):
        return weight


def test_another_reward_has_another_identity():
    isolated = IsolatedReward("my_rewards.judge"), IsolatedReward("my_rewards.other")
    judges = Judge("short"), Judge("long"), partial(Judge("short"), weight=2.0), partial(Judge("short"), weight=3.0)
    different = [*map(reward_identity, (exact_match, share_correct, *isolated, *judges))]
    assert len(set(different)) == len(different)
    assert different[0] == "lit_async_rl.rewards.functions.exact_match"
    assert re.fullmatch(r"lit_async_rl\.rewards\.functions\.IsolatedReward\(reward: [0-9a-f]{12}\)", different[2])
    assert "short" not in different[4], "an argument may be a key, and identities are saved and shown"
    assert reward_identity(Judge("short")) == different[4]
    assert reward_identity(IsolatedReward("my_rewards.judge", timeout_s=9.0)) == different[2]


def test_a_missing_reference_answer_is_an_error(math_verify):
    for reward in (exact_match, share_correct, math_verify):
        with pytest.raises(RewardError, match="set answer_field"):
            score(reward, Prompt(text="q"), "")


# -- mathematics ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", range(len(PROBLEMS)))
def test_each_word_problem_knows_its_answer_from_a_wrong_one(index, math_verify):
    prompt = PROBLEMS[index]
    answer = prompt.answer.rpartition("####")[2].strip()
    assert math_verify(prompt, f"Some steps: 3 * 4 = 12. The answer is \\boxed{{{answer}}}.") == 1.0
    assert math_verify(prompt, prompt.answer) == 1.0
    assert math_verify(prompt, "The answer is \\boxed{1234567}.") == 0.0
    assert math_verify(prompt, "") == 0.0


@pytest.mark.parametrize(
    ("answer", "completion", "reward"),
    [
        ("2/5", "0.4", 1),
        ("2/5", r"\boxed{\frac{2}{5}}", 1),
        ("2/5", r"It is $\frac{4}{10}$", 1),
        ("2/5", r"\boxed{5/2}", 0),
        ("0.5", r"\boxed{\frac12}", 1),
        ("1,234", r"so \boxed{1234}", 1),
        ("1234", "so 1,234 dollars", 1),
        ("18", "The answer is $18$ dollars, not 17 as one might think: \\boxed{18}", 1),
        ("18", r"first I thought \boxed{18}, but it is \boxed{19}", 0),
        ("-3", r"\boxed{3}", 0),
        ("-3", r"\boxed{-3}", 1),
        (r"\sqrt{8}", r"\boxed{2\sqrt{2}}", 1),
        ("x^2+2x+1", r"\boxed{(x+1)^2}", 1),
        (r"\{1, 2\}", r"\boxed{\{2, 1\}}", 1),
        (r"\boxed{7}", r"\boxed{7.0}", 1),
        ("Six times seven is 42. #### 42", r"\boxed{42}", 1),
        ("Six times seven is 42. #### 43", r"\boxed{42}", 0),
        ("5", "I don't know.", 0),
    ],
)
def test_equal_values_in_other_forms_are_right_and_no_others(answer, completion, reward, math_verify):
    assert math_verify(Prompt(text="", answer=answer), completion) == reward


def test_math_verify_works_off_the_main_thread(math_verify):
    found = []
    worker = threading.Thread(target=lambda: found.append(math_verify(Prompt(text="", answer="7"), "so 7")))
    worker.start()
    worker.join()
    assert found == [1.0]


@pytest.mark.slow
@pytest.mark.parametrize("completion", [r"\boxed{9^{9^{9^{9}}}}", r"\boxed{100000000!}", "$(x+1)^{1000000}$"])
def test_what_would_calculate_for_ever_is_worth_nothing(completion):
    reward = MathVerify(timeout_s=0.5)
    began = time.monotonic()
    assert reward(Prompt(text="", answer="7"), completion) == 0.0
    assert reward(Prompt(text="", answer="7"), r"\boxed{7}") == 1.0
    assert time.monotonic() - began < 60.0


@pytest.mark.parametrize("completion", ["\\boxed{" * 3000, "(1+2" * 3000, "1" * 20000, "\x00\ud7ff", "$$$$"])
def test_nonsense_is_wrong_and_no_error(completion, math_verify):
    assert math_verify(Prompt(text="", answer="7"), completion) == 0.0


def test_a_reference_that_is_no_mathematics_is_named(math_verify):
    with pytest.raises(RewardError, match=r"MathVerify cannot read the reference answer ''"):
        score(math_verify, Prompt(text="q", answer="work #### "), "7")


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "lit-async-rl\[tasks\]"'):
        MathVerify()


@pytest.mark.slow
def test_what_a_number_match_compares_is_named():
    prompt = Prompt(text="1+2=", answer="3")
    assert functions._explain_last_number(prompt, "1 and then 3") == ("3", "the last number")
    assert functions._explain_last_number(prompt, "none") == ("", "no number was found")
