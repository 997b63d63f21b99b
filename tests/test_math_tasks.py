"""Answers that a library judges: word problems by math-verify, procedural tasks by reasoning-gym."""

import re
import threading

import pytest

from lit_async_rl.assets import asset
from lit_async_rl.prompts import JsonlPrompts
from lit_async_rl.rewards import MathVerify
from lit_async_rl.tasks import ReasoningGym, ReasoningGymReward
from lit_async_rl.types import Prompt

PROBLEMS = JsonlPrompts(asset("word_problems.jsonl"), prompt_field="question")


@pytest.mark.parametrize("index", range(len(PROBLEMS)))
def test_each_word_problem_knows_its_answer_from_a_wrong_one(index):
    prompt, reward = PROBLEMS[index], MathVerify()
    answer = prompt.answer.rpartition("####")[2].strip()
    assert reward(prompt, f"Some steps. The answer is \\boxed{{{answer}}}.") == 1.0
    assert reward(prompt, prompt.answer) == 1.0
    assert reward(prompt, "The answer is \\boxed{1234567}.") == 0.0
    assert reward(prompt, "") == 0.0


@pytest.mark.parametrize("form", ["0.4", "2/5", r"\\boxed{\\frac{2}{5}}", "It is $\\frac{4}{10}$"])
def test_equal_numbers_in_other_forms_are_right(form):
    assert MathVerify()(Prompt(text="", answer="2/5"), form.replace("\\\\", "\\")) == 1.0


def test_math_verify_works_off_the_main_thread():
    found = []
    worker = threading.Thread(target=lambda: found.append(MathVerify()(Prompt(text="", answer="7"), "so 7")))
    worker.start()
    worker.join()
    assert found == [1.0]


def test_reasoning_gym_scores_its_own_answers():
    source, reward = ReasoningGym("chain_sum", size=5, seed=3), ReasoningGymReward()
    for n in range(5):
        prompt = source[n]
        assert re.search(r"\d", prompt.text)
        assert reward(prompt, f" {prompt.answer}\n") == 1.0
        assert reward(prompt, "no idea") < 1.0
    assert source[2].text == ReasoningGym("chain_sum", size=5, seed=3)[2].text


def test_an_unknown_task_is_named():
    with pytest.raises(ValueError, match="no_such_task"):
        ReasoningGym("no_such_task")
