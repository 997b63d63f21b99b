"""Intervals of held-out averages: what `evaluate` prints behind `±`."""

import math
import statistics
from types import SimpleNamespace

import pytest
import torch

from lit_async_rl.rewards.success import Success
from lit_async_rl.training.validation import Validator


def validated(rewards: list[list[float]]) -> Validator:
    validator = Validator()
    validator.num_samples = len(rewards[0])
    for row in rewards:
        validator._update(row, Success(1.0))
    validator.compute()
    return validator


def test_the_rewards_half_width_is_that_of_a_mean_over_prompts():
    rewards = torch.rand(40, 3, generator=torch.Generator().manual_seed(0)).tolist()
    validator = validated(rewards)
    spread = torch.tensor(rewards).mean(1).std().item()
    assert validator.num_scored == 40
    assert validator.half_widths["val/reward"] == pytest.approx(1.96 * spread / math.sqrt(40), rel=1e-4)


@pytest.mark.parametrize("base", [0.0, 1e3, -1e4])
def test_the_half_width_does_not_depend_on_how_far_from_0_the_rewards_are(base):
    """In float32 it was eight times as large at 1000, and 0 at 10000."""
    rewards = [base + n % 7 / 10 for n in range(300)]
    validator = validated([[reward] for reward in rewards])
    expected = 1.96 * statistics.stdev(n % 7 / 10 for n in range(300)) / math.sqrt(300)
    assert validator.half_widths["val/reward"] == pytest.approx(expected, rel=1e-4)
    assert float(validator.reward.compute()) == pytest.approx(statistics.fmean(rewards), rel=1e-8)


@pytest.mark.parametrize("num_correct", [0, 3, 10])
def test_a_share_has_the_interval_of_agresti_and_coull(num_correct):
    validator = validated([[float(n < num_correct)] for n in range(10)])
    share = (num_correct + 2) / 14
    expected = 1.96 * math.sqrt(share * (1 - share) / 14)
    assert validator.half_widths["val/pass@1"] == pytest.approx(expected, rel=1e-4)


def test_one_prompt_has_no_interval_of_its_reward():
    assert "val/reward" not in validated([[1.0, 0.0]]).half_widths


def test_a_second_validation_begins_anew():
    validator = validated([[1.0]] * 8)
    first = validator.half_widths
    linear = torch.nn.Linear(1, 1)
    policy = SimpleNamespace(parameters=linear.parameters, has_adapters=False)
    validator.begin(SimpleNamespace(policy=policy, trainer=SimpleNamespace(strategy=SimpleNamespace(model=linear))))
    for _ in range(8):
        validator._update([1.0], Success(1.0))
    validator.compute()
    assert (validator.num_scored, validator.half_widths) == (8, first)
