"""Graders run on their own references: whatever they grade wrong is named, and other rewards are never called."""

import asyncio
from functools import partial

import math_verify
import pytest
from flow import fit, make_data, make_module
from lightning.pytorch.callbacks import LambdaCallback
from test_answers import KINDS

from lit_async_rl.problem import Prompt
from lit_async_rl.rewards.functions import IsolatedReward, MathVerify, exact_match, last_number, share_correct
from lit_async_rl.rewards.reference_check import ReferenceCheck, check_references
from lit_async_rl.rewards.references import grades, references_of
from lit_async_rl.runtime.isolation import IsolatedCallError
from lit_async_rl.tasks.calculator import Calculator


def prompts_of(answers):
    return [Prompt(text=f"question {n}", answer=answer) for n, answer in enumerate(answers)]


def faults_of(reward, answers):
    return {f.prompt.answer: f.problem for f in check_references(reward, references_of(reward), prompts_of(answers))}


@grades(lambda prompt: f"\\boxed{{{prompt.answer}}}")
def bare_library(prompt, completion):
    """Reads every reference as a formula, as many a trainer does."""
    gold = math_verify.parse(f"${prompt.answer}$", parsing_timeout=None)
    return float(math_verify.verify(gold, math_verify.parse(completion, parsing_timeout=None), timeout_seconds=None))


@pytest.mark.slow
def test_every_kind_of_reference_is_graded_right_by_math_verify():
    answers = [case[0] for cases in KINDS.values() for case in cases]
    assert faults_of(MathVerify(timeout_s=30.0), answers) == {}


def test_a_grader_that_reads_an_answer_wrong_is_named_with_the_answer():
    answers = ["18 dollars", "2 1/2", "1.5", "1e-05", "0.00002", "Paris", "Pairs", "7", "11"]
    found = faults_of(bare_library, answers)
    assert found["2 1/2"] == "has 1 for the answer '1.5'"
    assert found["Paris"] == "has 1 for the answer 'Pairs'"
    assert not {"7", "11"} & found.keys()


def test_an_answer_that_cannot_be_graded_is_named_with_the_reason():
    found = faults_of(last_number, ["5", "Paris", "1,234"])
    assert list(found) == ["Paris"]
    assert "cannot be graded (last_number needs a number" in found["Paris"]


def test_an_answer_without_full_marks_is_named():
    @grades(lambda prompt: prompt.answer)
    def only_short_ones(prompt, completion):
        return float(completion == prompt.answer and len(completion) < 4)

    assert faults_of(only_short_ones, ["12", "12345", "7"]) == {"12345": "has 0 of 1 for itself"}


def test_partial_credit_is_no_fault_and_equal_answers_are_not_compared():
    assert faults_of(share_correct, ["1234", "1243", "12"]) == {}
    assert faults_of(MathVerify(timeout_s=30.0), ["1/2", "0.5", "50%", "18", "18 dollars"]) == {}
    assert faults_of(exact_match, ["same", "same"]) == {}


def test_a_partial_and_an_async_reward_are_graders_too():
    @grades(lambda prompt: prompt.answer)
    async def waits(prompt, completion, worth=1.0):
        await asyncio.sleep(0)
        return worth * (completion == prompt.answer)

    assert faults_of(partial(waits, worth=1.0), ["1", "2"]) == {}
    assert len(faults_of(partial(waits, worth=0.5), ["1", "2"])) == 2


@pytest.mark.slow
def test_an_isolated_grader_is_asked_in_its_process():
    reward = IsolatedReward("lit_async_rl.rewards.functions.last_number", timeout_s=60.0)
    references = reward.ask_references()
    assert [f.prompt.answer for f in check_references(reward, references, prompts_of(["1", "x2", "3"]))] == ["x2"]
    assert IsolatedReward("os.path.join", timeout_s=60.0).ask_references() is None


def test_an_isolated_function_without_a_signature_is_called_as_any_other():
    with pytest.raises(IsolatedCallError, match="TypeError"):  # of the call: the process has started
        IsolatedReward("math.hypot", timeout_s=60.0)(Prompt(text="q"), "5")


def paid_judge(prompt, completion):
    raise AssertionError("a call of a reward that is no grader")


def test_a_reward_that_is_no_grader_is_not_called():
    check = ReferenceCheck(paid_judge)
    check.start([("data.prompts", prompts_of(["1", "2"]))])
    assert check.join(60.0)
    assert references_of(paid_judge) is None


def look_at(check_of, seen):
    def wait(trainer, module):
        seen.append(check_of(trainer.datamodule).join(60.0))

    return LambdaCallback(on_train_start=wait)


@grades(lambda prompt: prompt.answer + "?")
def broken_grader(prompt, completion):
    return float(completion.strip() == prompt.answer)


def test_a_run_names_what_its_grader_grades_wrong_in_one_line(caplog):
    seen = []
    wait = look_at(lambda data: data._reference_check, seen)
    fit(make_module(), make_data(reward=broken_grader), 1, [wait])
    lines = [
        record.getMessage() for record in caplog.records if "reference answers sampled from" in record.getMessage()
    ]
    assert seen == [True]
    assert len(lines) == 1
    assert "broken_grader gives wrong grades" in lines[0]
    assert "sampled from data.prompts: " in lines[0]
    assert "has 0 of 1 for itself; " in lines[0]


def test_an_environment_that_declares_references_is_checked():
    from lit_async_rl.engines.embedded.engine import EmbeddedEngine
    from lit_async_rl.environments.episode_engine import EpisodeEngine

    grader = EpisodeEngine(EmbeddedEngine(), Calculator()).grader()
    assert faults_of(grader, ["5", "7", "12"]) == {}
    assert grader(Prompt(text="2+3", answer="5"), "6") == 0.0


def test_a_users_mistake_in_the_claim_is_a_line_and_no_end(caplog):
    @grades(lambda prompt: prompt.metadata["missing"])
    def reward(prompt, completion):
        return 1.0

    check = ReferenceCheck(reward)
    check.start([("data.prompts", prompts_of(["1"]))])
    assert check.join(60.0)
    assert "could not be checked: KeyError: 'missing'" in caplog.text


@pytest.mark.parametrize("answer", ["", "   "])
def test_an_empty_answer_is_named(answer):
    assert "cannot be graded" in faults_of(MathVerify(timeout_s=30.0), [answer, "7"])[answer]
