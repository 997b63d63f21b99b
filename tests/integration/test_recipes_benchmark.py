"""Screening of recipes: the lag is exact, and every recipe trains."""

from argparse import Namespace

import pytest

from benchmarks.staleness import recipes


@pytest.fixture
def settings(monkeypatch):
    monkeypatch.setattr(recipes, "NUM_GROUPS", 2)
    monkeypatch.setattr(recipes, "NUM_HELD_OUT", 4)
    rates = dict(schedule="cosine", learning_rate=1e-3, beta2=0.95, ess_power=0.5)
    return Namespace(recipe="vcpo_score", cap=8.0, lag=0, num_steps=3, seed=1, **rates)


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_data_is_as_old_as_it_should_be(settings, lag):
    settings.lag = lag
    ess = recipes.train(settings).ess
    assert ess[0] == pytest.approx(1, abs=1e-4)  # nothing is older than the first weights
    assert [value < 0.999 for value in ess] == [n > 0 and lag > 0 for n in range(3)]


@pytest.mark.parametrize("recipe", ["plain", "dual_clip", "cispo", "vcpo_last_block"])
def test_every_recipe_trains(settings, recipe):
    settings.recipe, settings.lag, settings.num_steps, settings.schedule = recipe, 1, 2, "one_cycle"
    assert recipes.train(settings).ess[1] < 1
    with pytest.raises(ValueError, match="recipe='grpo'"):
        recipes.objective("grpo", 1.0)


def test_a_fall_counts_below_the_highest_mean_so_far_and_after_the_beginning():
    assert recipes.largest_fall([1.0] * 10 + [0.0] * 5 + [0.5] * 5 + [0.9] * 5 + [0.6] * 5) == pytest.approx(0.3)
