"""Data policies: nothing is lost unseen, and what is lost is said to be."""

from dataclasses import replace

import pytest
from flow import fit, make_data, make_module
from groups import group

from lit_async_rl.callbacks import LengthBiasMonitor
from lit_async_rl.prompts.curriculum import DifficultyWindow, Learnability
from lit_async_rl.rollouts.intake import DynamicSampling, FateTotals, Intake, OverlongPenalty
from lit_async_rl.scheduling.admission import Drop, Retry


def test_every_fate_is_added_up_with_the_difficulty_that_was_known_before():
    intake = Intake([DynamicSampling()])
    dropped, kept = group([1.0, 1.0], [3, 5], 0), group([1.0, 0.0], [2, 4], 1)
    assert intake.filter_group(dropped, 7) is None
    assert intake.filter_group(kept, 7) is kept
    intake.trained(kept, 7, 20)
    intake.trained(kept, 8, 21)  # as after a resume: judged by the run before
    assert (intake.pass_rates.of(7), intake.pass_rates.of(8)) == (0.75, 0.5)
    assert intake.filter_group(replace(kept, index=2), 9) is not None
    for length in (6.0, 8.0):
        intake.lose(2, 7, 22, length, 0.5, max_tries=2)
    assert not intake._num_lost, "given up"
    intake.lose(2, 7, 22, 0.0, 0.5, max_tries=2)
    intake.trained(kept, 9, 22)
    seconds = kept.generation_s
    assert intake.fates == {
        "no_signal": FateTotals(num_groups=1, length=4.0, seconds=dropped.generation_s),
        "trained": FateTotals(num_groups=3, length=9.0, seconds=3 * seconds, num_measured=1, pass_rate=1.0),
        "expired": FateTotals(num_groups=2, length=14.0, seconds=1.0, num_measured=2, pass_rate=1.5),
        "unbegun": FateTotals(num_groups=1, seconds=0.5, num_measured=1, pass_rate=0.75),
    }
    assert not intake._successes, "nothing is kept of groups that are gone"
    assert not intake._num_lost


@pytest.mark.slow
def test_the_monitor_logs_what_was_lost_and_warns_of_a_bias():
    logged = {}

    class Listener(LengthBiasMonitor):
        def compute(self, trainer, pl_module):
            logged.update(found := super().compute(trainer, pl_module))
            return found

    fit(make_module(), make_data(filters=[DynamicSampling()]), max_steps=4, callbacks=[Listener()])
    assert logged["intake/trained_share"] + logged["intake/no_signal_share"] == pytest.approx(1.0)
    assert logged["intake/trained_length"] > 0
    assert logged["intake/no_signal_s"] > 0

    monitor = LengthBiasMonitor(min_groups=2)
    short = Intake()
    for n in range(4):
        short.trained(group([1.0], [4], n), n, n)
    intake = Intake()
    intake._fates = dict(short.fates)
    for n in range(4):
        intake.lose(n, n, n, length=6.0, seconds=1.0)
    with pytest.warns(UserWarning, match=r"1.50 times as long"):
        monitor._warn(intake.fates)


def test_what_drops_is_refused_where_lag_is_fixed_and_settings_are_named():
    with pytest.raises(ValueError, match=r"data.admission=FixedLag with data.filters holding DynamicSampling"):
        make_data(filters=[DynamicSampling()], schedule="fixed_lag")
    for make, message in (
        (lambda: DynamicSampling(max_in_a_row=0), "max_in_a_row must be >= 1, got 0"),
        (lambda: OverlongPenalty(4, 5), "buffer_tokens must be in \\[1, 4\\], got 5"),
        (lambda: Drop(ahead=-1.0), "ahead must be >= 0, got -1"),
        (lambda: Retry(max_tries=0), "max_tries must be >= 1, got 0"),
        (lambda: Learnability(floor=0.0), r"floor must be in \(0, 1\]"),
        (lambda: DifficultyWindow(0.9, 0.1), r"high must be in \(0\.9, 1\], got 0\.1"),
        (lambda: LengthBiasMonitor(ratio=1.0), "ratio must be > 1, got 1.0"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
    assert replace(Drop(), ahead=2.0).ahead == 2.0


def test_a_resume_measures_pass_rates_as_the_run_would_have_before_filters_changed_rewards():
    first, again = (Intake([OverlongPenalty(4, 2)]) for _ in range(2))
    kept = first.filter_group(group([1.0, 1.0], [4, 3]), 5)
    assert [rollout.reward for rollout in kept.rollouts] != [1.0, 1.0]
    again.restore(first.pass_rates.state_dict(), first.successes)
    for intake in (first, again):
        intake.trained(kept, 5, 0)
        assert intake.pass_rates.of(5) == 1.0
        assert intake.successes == {}
