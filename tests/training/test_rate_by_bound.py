"""The learning rate that fits a staleness bound: the factor, what it depends on, and the runs it was fitted to."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import lit_async_rl as rl
from lit_async_rl.losses import ScoreCentering
from lit_async_rl.problem import Prompt
from lit_async_rl.training.rate_by_bound import LOWEST_FACTOR, WHOLE_RATE_UP_TO, Handling, handling, rate_factor

KINDS = st.sampled_from([*Handling, None])


@given(bound=st.integers(0, 1000), kind=KINDS)
def test_the_factor_never_rises_with_the_bound_and_leaves_fresh_data_alone(bound, kind):
    assert rate_factor(0, kind) == 1.0
    assert LOWEST_FACTOR <= rate_factor(bound + 1, kind) <= rate_factor(bound, kind) <= 1.0


@pytest.mark.parametrize("kind", Handling)
def test_from_its_start_on_twice_the_bound_is_half_of_the_rate_down_to_the_lowest(kind):
    start = WHOLE_RATE_UP_TO[kind]
    assert [rate_factor(bound, kind) for bound in (start, 2 * start, 8 * start)] == [1.0, 0.5, LOWEST_FACTOR]


@given(bound=st.integers(0, 100), sync_steps=st.integers(1, 20), kind=KINDS)
def test_the_lag_counts_steps_between_publications(bound, sync_steps, kind):
    oldest = (bound + 1) * sync_steps - 1
    assert rate_factor(bound, kind, weight_sync_steps=sync_steps) == rate_factor(oldest, kind)


WEIGHTS = rl.SequenceTruncatedIS(cap=8.0)


@pytest.mark.parametrize(
    ("loss", "correction", "baseline", "kind"),
    [
        (rl.Reinforce(), None, None, Handling.NOTHING),
        (rl.Reinforce(), WEIGHTS, None, Handling.WEIGHTS),
        (rl.Reinforce(), WEIGHTS, rl.OptimalBaseline(), Handling.OPTIMAL_BASELINE),
        (rl.PPOClip(), None, None, Handling.WEIGHTS),
        (rl.PPOClip(), rl.TokenTruncatedIS(), None, Handling.WEIGHTS),
        (ScoreCentering(), None, None, Handling.WEIGHTS),
        (rl.GSPO(), None, None, Handling.SEQUENCE_LOSS),
        (rl.OPMD(), None, None, None),
        (rl.OAPL(), None, None, None),
    ],
)
def test_what_an_objective_does_about_stale_data(loss, correction, baseline, kind):
    assert handling(loss, correction, baseline) is kind


# -- The benchmark that fits and tests it ------------------------------------------------------------------------------


def sweep(gains, method="ppo_clip", lag=16, ess_ratio=0.9):
    from benchmarks.staleness.rate_by_bound import Sweep

    return Sweep("heavy_tails", method, lag, gains=gains, ess_ratio=ess_ratio)


def test_gains_between_rates_that_were_run_are_interpolated_and_beyond_them_the_last():
    found = sweep({0.25: 0.4, 1.0: 0.2})
    assert found.gain(0.5) == pytest.approx(0.3)
    assert (found.gain(0.1), found.gain(3.0)) == pytest.approx((0.4, 0.2))
    assert found.share_kept(1.0) == pytest.approx(0.5)
    assert [found.has_run(scale) for scale in (0.1, 0.25, 0.5, 1.0, 3.0)] == [False, True, True, True, False]


def test_the_fit_takes_the_largest_start_that_loses_nothing():
    from benchmarks.staleness.rate_by_bound import fit

    assert fit([sweep({0.25: 0.4, 1.0: 0.2})], lowest=0.0)[0] == 4
    assert fit([sweep({0.25: 0.2, 1.0: 0.4})], lowest=0.0)[0] == 64
    assert fit([sweep({0.25: 0.4, 1.0: 0.4})], lowest=0.0)[0] == 64


def test_a_method_is_handled_as_its_configuration_says():
    from benchmarks.staleness.rate_by_bound import handling_of

    found = {name: handling_of(name) for name in ("uncorrected", "sequence_tis", "topr", "vcpo+gac_project")}
    assert list(found.values()) == [*Handling]


@pytest.mark.parametrize(
    ("completion", "reward"), [("[17+25]", 1.0), (" [17+25]\n", 1.0), ("[25+17]", 0.0), ("42", 0.0), ("[17+25]42", 0.0)]
)
def test_a_call_counts_if_it_has_the_numbers_of_the_problem(completion, reward):
    from benchmarks.staleness.calls import calls_calculator

    assert calls_calculator(Prompt(text="17+25=", answer="42"), completion) == reward


@pytest.mark.slow
def test_the_starts_are_those_that_the_benchmark_fits(monkeypatch):
    from benchmarks.staleness import rate_by_bound
    from benchmarks.staleness.rate_by_bound import FIT_REGIME, fit, handling_of, read_sweeps

    read_table = rate_by_bound.read_table
    # other regimes test the fit, and take most of the time
    monkeypatch.setattr(rate_by_bound, "read_table", lambda path: read_table(path).query(f"regime == {FIT_REGIME!r}"))
    fitted = [one for one in read_sweeps() if one.is_fitted]
    kinds = {method: handling_of(method) for method in {one.method for one in fitted}}
    found = {kind: fit([s for s in fitted if kinds[s.method] is kind], LOWEST_FACTOR)[0] for kind in Handling}
    assert found == WHOLE_RATE_UP_TO | {Handling.NOTHING: 4}  # see the comment there
