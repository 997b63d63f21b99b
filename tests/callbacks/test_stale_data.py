"""What the last verdict says of the age of the data and of the parts of their ratios, and when it is silent."""

from __future__ import annotations

import math

import pytest
import torch
from flow import fit, make_data, make_module
from ratio_watch import ShiftedEngine

from lit_async_rl.callbacks import (
    BottleneckVerdict,
    FreshDataMonitor,
    RolloutMonitor,
    StalenessMonitor,
    WeightDriftMonitor,
)
from lit_async_rl.callbacks.monitors.stale_data import StaleDataWords
from lit_async_rl.losses import Reinforce

OLD = {"sample/staleness_mean": 16.0, "drift/half_lag": 4.0, "drift/stale": 3.0, "drift/radius": 1.5}
PARTS = {"ratio/discrepancy": 0.1, "ratio/staleness": 0.02, "rollout/length_mean": 40.0}
VCPO = "add VCPO"


def said(*steps, times=10, remedy=VCPO):
    words = StaleDataWords()
    for metrics in steps:
        for _ in range(times):
            words.observe({name: torch.tensor(value) for name, value in metrics.items()})
    return words.sentences(remedy)


def test_data_older_than_the_rate_allows():
    (sentence,) = said(OLD)
    assert "16 versions old" in sentence
    assert "lost at 4 (drift/half_lag)" in sentence
    assert "model.learning_rate to 0.5 times its value, or add VCPO" in sentence


def test_a_discrepancy_that_is_larger_than_staleness():
    (sentence,) = said(PARTS)
    lost = 1 - math.exp(-40 * 0.1**2)
    assert f"cost about {lost:.0%} of the effective sample size" in sentence
    assert "engine/logprob_error" in sentence
    assert len(said(OLD | PARTS)) == 2


@pytest.mark.parametrize(
    "metrics",
    [
        {},
        OLD | {"drift/radius": 2.9},
        OLD | {"drift/radius": math.nan},
        {name: value for name, value in OLD.items() if name != "drift/radius"},
        PARTS | {"ratio/staleness": 0.11},
        PARTS | {"ratio/staleness": 0.0},
        PARTS | {"ratio/discrepancy": 0.05},
        PARTS | {"ratio/discrepancy": math.inf},
        {name: value for name, value in PARTS.items() if name != "rollout/length_mean"},
    ],
    ids=str,
)
def test_nothing_is_said_without_a_reason(metrics):
    assert said(metrics) == []


def test_few_steps_say_nothing_and_the_last_ones_count():
    assert said(OLD | PARTS, times=9) == []
    young = OLD | {"drift/radius": 9.0}
    assert said(OLD, young, times=26) == [], "medians of the last 50: 24 and 26"
    assert said(young, OLD, times=26) != []
    assert said(OLD, OLD, OLD, young) == [], "what is over at the end"


def test_with_an_optimal_baseline_data_may_be_old():
    assert said(OLD, remedy="") == []


def varied(prompt, completion):
    """A reward that differs between nearly all completions, so that no step is without a gradient."""
    return sum(map(ord, completion)) % 17 / 17


def last_words(capsys, *monitors, engine, module=None, steps=12, **data):
    judge = BottleneckVerdict()
    source = make_data(engine=engine, **data)
    monitors = [RolloutMonitor(), StalenessMonitor(), *monitors, judge]
    fit(make_module(**(module or {})), source, steps, monitors)
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("whole run")]
    assert printed == [f"whole run: {judge.words}"]
    return judge.words


@pytest.mark.slow
def test_runs_say_it_at_their_end_or_do_not(capsys):
    stale = dict(max_staleness=3)
    shifted = ShiftedEngine(seed=1, shift=0.3)
    wrong = last_words(capsys, FreshDataMonitor(), engine=shifted, module=dict(learning_rate=1e-5), **stale)
    assert "ratio/discrepancy" in wrong
    assert "drift/half_lag" not in wrong
    right = last_words(capsys, FreshDataMonitor(), engine=ShiftedEngine(seed=1, shift=0.0), **stale)
    assert "ratio/discrepancy" not in right
    lagging = dict(schedule="fixed_lag", max_staleness=4, steps=12, reward=varied)
    fast = dict(learning_rate=1e-3, loss=Reinforce())
    engine = ShiftedEngine(seed=1, shift=0.0, in_flight_weight_updates=False)
    words = last_words(capsys, WeightDriftMonitor(), engine=engine, module=fast, **lagging)
    assert "drift/half_lag" in words
    assert "configs/stabilizers/vcpo.yaml" in words
