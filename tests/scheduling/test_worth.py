"""Worth of asynchrony: the formula against simulation, and advice that is checked by a sweep of the bound."""

import math
import random

import pytest
from flow import fit, make_data, make_module

from lit_async_rl.callbacks import BottleneckVerdict
from lit_async_rl.callbacks.monitors import bottleneck_verdict
from lit_async_rl.scheduling.admission import Admission
from lit_async_rl.scheduling.bottleneck import StepWork, advise, expected_maximum
from lit_async_rl.simulation.engine import SimulatedEngine
from lit_async_rl.simulation.latency import Constant, LogNormal, Pareto, Stragglers
from lit_async_rl.simulation.virtual import VirtualRun

SWEEP = (0, 1, 2, 4, 8)
GROUPS, GROUP_SIZE = 16, 4


def measured(latency, train_s, seed=0):
    rng = random.Random(seed)
    waits = [max(latency.draw(rng) for _ in range(GROUP_SIZE)) for _ in range(400)]
    return StepWork(train_s=train_s, engine_s=0.0, waits=waits, busy_share=0.0, groups_per_step=GROUPS)


def step_s(latency, train_s, bound):
    run = VirtualRun(Admission(GROUPS, bound), latency, 10**6, train_s, group_size=GROUP_SIZE, seed=5)
    return run.run(100).wall_s / 100


def test_the_expected_maximum_is_that_of_draws_with_replacement():
    assert expected_maximum([1.0, 3.0], 1) == pytest.approx(2.0)
    assert expected_maximum([3.0, 1.0], 2) == pytest.approx(0.25 * 1 + 0.75 * 3)
    assert expected_maximum([], 5) == 0.0


def test_with_equal_waits_it_is_the_smaller_of_two_bounds():
    work = measured(Constant(0.4), 0.2)
    assert [work.worth(bound) for bound in (0, 1, 2, 8)] == pytest.approx([1.0, 2.0, 3.0, 3.0])
    advice = advise(work, ess_ratio=None, present=0)
    assert (advice.max_staleness, advice.rate_scale) == (2, 1.0)
    assert advice.text() == "asynchrony is worth about 3.0x here: data.max_staleness 2 is enough"
    assert advice.text(names_bound=False) == "asynchrony is worth about 3.0x here"


def test_it_is_worth_nothing_where_one_side_has_all_the_work_or_the_cores():
    for work in (
        StepWork(train_s=0.1, engine_s=2.0, waits=[2.0], busy_share=1.0, groups_per_step=4),
        StepWork(train_s=1.0, engine_s=1.0, waits=[1.0], busy_share=1.0, groups_per_step=4, core_s=1.9),
    ):
        advice = advise(work, ess_ratio=None, present=1)
        assert advice.max_staleness == 0
        assert "loses little" in advice.text()


# unseen: none of these was used when the formula was chosen
# the last number is how far the formula may be from the simulation: 400 draws know the tail of Pareto(1.8) badly
UNSEEN = [
    (LogNormal(0.7, 1.4), 0.25, 0.13),
    (Pareto(0.5, 1.8), 0.1, 0.38),
    (Stragglers(0.3, 0.05, 6.0), 0.15, 0.03),
]


@pytest.mark.parametrize(("latency", "train_s", "off"), UNSEEN)
def test_the_advised_bound_has_nine_tenths_of_the_best_of_a_sweep(latency, train_s, off):
    advice = advise(measured(latency, train_s), ess_ratio=None, present=0, bounds=SWEEP)
    seconds = {bound: step_s(latency, train_s, bound) for bound in SWEEP}
    assert min(seconds.values()) / seconds[advice.max_staleness] >= 0.9
    assert seconds[0] / seconds[advice.max_staleness] == pytest.approx(advice.worth, rel=off)


def test_the_steady_staleness_is_latency_over_the_time_of_a_step():
    assert measured(Constant(0.4), 0.2).steady_staleness() == pytest.approx(2.0)
    assert measured(Constant(0.0), 0.2).steady_staleness() == 0.0, "nothing to wait for"
    busy = StepWork(train_s=0.2, engine_s=0.8, waits=[5.0], busy_share=1.0, groups_per_step=4)
    assert busy.steady_staleness() == pytest.approx(0.25), "an engine that is always busy makes nobody wait"
    nothing = StepWork(train_s=0.0, engine_s=0.0, waits=[1.0], busy_share=0.0, groups_per_step=4)
    assert nothing.steady_staleness() is None


@pytest.mark.parametrize(("latency", "train_s"), [(LogNormal(0.7), 0.25), (Stragglers(0.3, 0.05, 6.0), 0.25)])
def test_below_the_steady_staleness_the_trainer_waits_at_least_as_long_as_it_says(latency, train_s):
    steady = measured(latency, train_s).steady_staleness()
    assert steady > 2
    below = math.ceil(steady) // 2
    assert step_s(latency, train_s, below) > 0.95 * train_s * (steady + 1) / (below + 1) > 1.1 * train_s


def test_with_equal_waits_nothing_waits_from_the_steady_staleness_on():
    assert measured(Constant(1.2), 0.3).steady_staleness() == pytest.approx(4.0)
    assert step_s(Constant(1.2), 0.3, 3) > 1.2 * 0.3
    assert step_s(Constant(1.2), 0.3, 4) < 1.1 * 0.3


def test_a_small_effective_sample_size_is_paid_for_with_a_lower_bound():
    work = measured(Constant(0.4), 0.2)
    healthy, stale = (advise(work, ess_ratio=ess, present=2) for ess in (0.95, 0.2))
    assert (healthy.max_staleness, stale.max_staleness) == (2, 1)
    assert (healthy.worth, stale.worth) == pytest.approx((3.0, 2.0))
    only = advise(work, ess_ratio=0.2, present=2, bounds=(2,))  # at the bound that 0.2 was measured at
    assert only.worth == pytest.approx(3.0 * math.sqrt(math.log(0.5) / math.log(0.2)))


def test_the_rate_that_is_named_is_that_of_the_advised_bound():
    work = measured(Constant(4.0), 0.1)
    factors = {0: 1.0, 8: 0.5}
    advice = advise(work, ess_ratio=0.3, present=8, bounds=(0, 8), rate_factor=factors.__getitem__)
    assert (advice.max_staleness, advice.rate_scale) == (8, 0.5)
    assert advice.text().endswith("is enough, at 0.5 times the model.learning_rate of a synchronous run")
    assert "learning_rate" not in advise(work, ess_ratio=0.3, present=8, bounds=(0, 8)).text()


def test_more_slots_where_the_engine_limits_while_rollouts_wait_for_one():
    work = StepWork(train_s=0.2, engine_s=0.8, waits=[1.0], busy_share=1.0, groups_per_step=4)
    assert advise(work, ess_ratio=None, present=1, num_slots=8, waiting_rollouts=64.0).num_slots == 32
    assert advise(work, ess_ratio=None, present=1, num_slots=64, waiting_rollouts=32.0).num_slots is None


@pytest.mark.parametrize(("train_s", "core_s"), [(0.2, 0.9), (0.9, 0.2)])
def test_no_more_slots_where_training_or_the_cores_limit_already(train_s, core_s):
    work = StepWork(train_s=train_s, engine_s=0.8, waits=[1.0], busy_share=1.0, groups_per_step=4, core_s=core_s)
    assert advise(work, ess_ratio=None, present=1, num_slots=8, waiting_rollouts=64.0).num_slots is None


def test_as_many_slots_as_bring_the_engine_to_the_slower_of_training_and_cores():
    work = StepWork(train_s=0.2, engine_s=0.8, waits=[1.0], busy_share=1.0, groups_per_step=4, core_s=0.4)
    assert advise(work, ess_ratio=None, present=1, num_slots=8, waiting_rollouts=64.0).num_slots == 16


@pytest.mark.slow
def test_a_run_says_what_asynchrony_is_worth_at_its_end(capsys, monkeypatch):
    monkeypatch.setattr(bottleneck_verdict, "MIN_STEPS_FOR_VERDICT", 0)
    judge = BottleneckVerdict()
    data = make_data(engine=SimulatedEngine(LogNormal(1.0), num_slots=64), groups_per_step=2, max_staleness=0)
    fit(make_module(), data, 8, callbacks=[judge])
    assert judge.advice is not None
    assert judge.advice.max_staleness > 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert f"worth about {judge.advice.worth:.1f}x here" in last
    assert last.count("data.max_staleness") == 1, "one bound is advised, not two"
