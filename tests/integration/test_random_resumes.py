"""A sample of the random runs that are resumed with one thing changed; `benchmarks/resumes.py` tries many."""

import pytest
from random_resumes import REWARDS, chosen_runs, part_of, try_run

PLAIN = {"loss": "PPOClip", "correction": None, "packing": None, "replay": False, "own_process": False, "ranks": 1}
PLAIN |= {"admission": "Bounded", "in_flight": True, "max_staleness": 2, "filter": None, "dtype": "float32"}
KINDS = [("reward", "async"), ("reward", "global"), ("agent", "object")]


def of(**changes):
    return next(chosen_runs(1)) | PLAIN | changes


@pytest.mark.slow
@pytest.mark.parametrize(("source", "reward"), KINDS, ids=str)
def test_rewards_of_a_resumed_run_are_those_of_its_settings(source, reward):
    assert try_run(of(source=source, reward=reward, change="value", filter="OverlongPenalty")).startswith("held")


def test_a_reward_that_another_setting_gave_would_be_found():
    with pytest.raises(AssertionError, match=r"the reward 1\.0"):
        try_run(of(source="reward", reward="closure", change="value", resume_rewards="keep"))


@pytest.mark.slow
def test_groups_that_were_sampled_again_for_nothing_would_be_found(monkeypatch):
    held = (n for n in range(2))  # a value that cannot be compared
    monkeypatch.setitem(REWARDS, "unknown", lambda value: lambda prompt, text: value + part_of(text) * bool(held))
    with pytest.raises(AssertionError, match=r"cannot be compared with that of the checkpoint for its <lambda>\.held"):
        try_run(of(source="reward", reward="unknown", change="nothing"))


@pytest.mark.slow
def test_random_runs_hold_or_are_refused_by_name():
    results = [try_run(chosen | {"ranks": 1}) for chosen in chosen_runs(12)]
    assert sum(result.startswith("held") for result in results) >= 6, results
