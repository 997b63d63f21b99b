"""The reward from which a completion counts as right: its default, and the line where rewards do not fit it."""

import pytest
from flow import fit, make_data, make_module

import lit_async_rl as rl
from lit_async_rl.rewards.success import Success, SuccessWatch


def short_and_right(prompt, completion):
    """The example of the README: a right answer has a reward below 1."""
    return float(completion.strip() == prompt.answer) - 0.01 * len(completion)


def accuracy(reward, **settings):
    data = make_data(reward=reward, val_prompts=rl.SortDigits(8, size=60, split="held_out"), **settings)
    trainer = rl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    (result,) = trainer.validate(make_module(), datamodule=data, verbose=False)
    return result["val/pass@1"]


def test_the_readmes_reward_has_the_accuracy_of_its_right_answers(caplog):
    right = accuracy(rl.exact_match)
    assert 0.1 < right < 0.9
    assert "count an answer as correct" not in caplog.text
    assert accuracy(short_and_right) == right
    assert (
        "count an answer as correct if its reward is at least data.validation.success_reward=0.5 (the default)"
        in caplog.text
    )


def test_a_threshold_that_no_reward_reaches_is_named_at_the_first_validation(caplog):
    assert accuracy(short_and_right, success_reward=1.0) == 0.0
    assert "no reward reaches the threshold data.validation.success_reward=1, so" in caplog.text


def test_graders_of_this_library_need_full_marks_and_other_rewards_a_half():
    assert Success.by(None, rl.exact_match) == Success(1.0)
    assert Success.by(None, short_and_right) == Success(0.5)
    assert Success.by(0.9, rl.exact_match) == Success(0.9)


def test_pass_rates_of_a_curriculum_count_as_validation_does():
    assert make_data(reward=short_and_right).intake.success.threshold == 0.5
    assert make_data(reward=rl.exact_match).intake.success.threshold == 1.0
    data = make_data(reward=short_and_right, groups_per_step=2)
    fit(make_module(), data, 1)
    assert data.intake.success.threshold == 0.5


@pytest.mark.parametrize(
    ("rewards", "threshold", "is_default", "line"),
    [
        ([0.0, 1.0], 1.0, True, ""),
        ([-1.0, 1.0], 0.5, True, ""),
        ([0.2, 0.2], 0.5, True, ""),  # nothing can be told yet
        ([0.0, 0.9], 1.0, False, "no reward reaches"),
        ([0.1, 0.9], 0.5, True, "count an answer as correct"),
        ([0.1, 0.9], 0.5, False, ""),  # chosen
    ],
)
def test_the_line_comes_where_rewards_and_threshold_do_not_fit_and_only_once(
    rewards, threshold, is_default, line, caplog
):
    watch = SuccessWatch("data.validation.success_reward", "accuracies", is_default)
    watch.add(rewards)
    watch.warn_once(threshold)
    watch.warn_once(threshold)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == bool(line)
    assert line in "".join(said)
