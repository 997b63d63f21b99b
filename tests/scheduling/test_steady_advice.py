"""Advice of windows never contradicts advice before it while the load stays, whatever the noise of the windows."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lit_async_rl.scheduling.bottleneck import MIN_SHARE, Intervals, Setting, Settings, SteadyAdvice, diagnose

SETTINGS = Settings(
    engine=Setting(name="data.engine.num_slots", present=8, suggested=16),
    trainer=Setting(name="data.micro_batches_per_step", present=2, suggested=1),
    reward=Setting(name="data.scoring.workers", present=1, suggested=2),
    weight_sync=Setting(name="data.weight_sync_steps", present=1, suggested=2),
    staleness=Setting(name="data.max_staleness", present=4, suggested=8),
    fresher=Setting(name="data.max_staleness", present=4, suggested=3),
)


def window(wait=0.0, busy=0.0, sync=0.0, scoring=0.0, wall=10.0):
    return Intervals(wall_s=wall, wait_s=wall * wait, sync_s=wall * sync, engine_busy_s=wall * busy, scoring_s=scoring)


def advised(words):
    return [part for part in words.replace(". ", "; ").split("; ") if part.startswith(("change", "give", "make"))]


loads = st.fixed_dictionaries(
    {"wait": st.floats(0, 0.9), "busy": st.floats(0, 1), "sync": st.floats(0, 0.3), "scoring": st.floats(0, 1)}
)
noise = st.lists(st.tuples(*[st.floats(0.85, 1.15)] * 4), min_size=2, max_size=12)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(loads, noise)
def test_steady_loads_get_one_advice_at_most(load, noises):
    """Each window differs from the load by up to 15 %, for each side by itself."""
    trained = 1 - load["wait"]
    assume(load["sync"] <= 0.8 * trained)
    steady = SteadyAdvice()
    said = []
    for by_trainer, by_engine, by_sync, by_reward in noises:
        work = min(1.0, trained * by_trainer)
        sync = min(work, load["sync"] * by_sync)
        busy = min(1.0, load["busy"] * by_engine)
        verdict = diagnose(window(1 - work, busy, sync, min(1.0, load["scoring"] * by_reward) * 10), SETTINGS)
        words = steady.for_window(verdict)
        assert "Fresher" not in words
        if verdict.share_won < MIN_SHARE:
            assert not advised(words)
        said += advised(words)
    assert len(set(said)) <= 1, said


def test_two_windows_in_a_row_are_needed():
    steady = SteadyAdvice()
    slow_engine = diagnose(window(wait=0.3, busy=1.0), SETTINGS)
    assert steady.for_window(slow_engine) == slow_engine.shares
    assert "change data.engine.num_slots from 8 to 16" in steady.for_window(slow_engine)
    assert "less than 10% to gain" in steady.for_window(diagnose(window(wait=0.06, busy=1.0), SETTINGS))
    assert "num_slots" in steady.for_window(slow_engine)


def test_another_load_gets_other_advice():
    steady = SteadyAdvice()
    slow_engine = diagnose(window(wait=0.6, busy=1.0), SETTINGS)
    slow_trainer = diagnose(window(wait=0.0, busy=0.3), SETTINGS)
    for verdict in (slow_engine, slow_engine):
        steady.for_window(verdict)
    said = [steady.for_window(slow_trainer) for _ in range(2)]
    assert not advised(said[0])
    assert "micro_batches_per_step from 2 to 1" in said[1]


def test_the_whole_run_does_not_contradict_its_windows():
    steady = SteadyAdvice()
    waits = diagnose(window(wait=0.3, busy=0.7), SETTINGS)
    assert waits.side == "staleness bound"
    for _ in range(2):
        steady.for_window(waits)
    assert steady.for_run(waits, is_over=True) == waits
    assert steady.for_run(diagnose(window(wait=0.3, busy=1.0), SETTINGS), is_over=True) is None
    free = diagnose(window(wait=0.0, busy=0.95), SETTINGS)
    assert free.fresher is not None
    assert steady.for_run(free, is_over=True).fresher is None
    assert steady.has_named("data.max_staleness", None)
    assert SteadyAdvice().for_run(free, is_over=True) == free
    assert SteadyAdvice().for_run(free, is_over=False).fresher is None


def test_a_short_run_is_advised_at_its_end():
    waits = diagnose(window(wait=0.3, busy=1.0), SETTINGS)
    assert SteadyAdvice().for_run(waits, is_over=False) is None
    assert SteadyAdvice().for_run(waits, is_over=True) == waits
