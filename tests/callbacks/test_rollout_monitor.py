"""Rewards before and after filters, and a progress bar that counts optimizer steps."""

import pytest
from flow import fit, make_data, make_module

from lit_async_rl import DynamicSampling, Intake
from lit_async_rl.callbacks import Progress, RolloutMonitor
from lit_async_rl.simulation.engine import SimulatedEngine
from lit_async_rl.simulation.latency import Constant


def make_reward():
    """Rewards of every second prompt differ, the others are all 0."""
    seen = {}

    def reward(prompt, completion):
        number, times = seen.get(prompt.text, (len(seen), 0))
        seen[prompt.text] = number, times + 1
        return float(number % 2 and times % 2)

    return reward


@pytest.mark.parametrize("filters", [[], [DynamicSampling()]])
def test_the_reward_of_all_samples_and_the_share_that_filters_dropped_are_logged(filters):
    engine = SimulatedEngine(Constant(0.001), num_slots=16)
    data = make_data(engine=engine, reward=make_reward(), intake=Intake(filters=filters))
    logged = fit(make_module(), data, 4, callbacks=[RolloutMonitor()]).logged_metrics
    if filters:
        assert logged["reward/mean"] == 0.5
        assert 0 < logged["reward/mean_sampled"] < 0.5
        assert logged["reward/mean_sampled"] == pytest.approx(0.5 * (1 - logged["sample/dropped_share"]))
    else:
        assert logged["sample/dropped_share"] == 0


def test_the_bar_counts_optimizer_steps():
    bar = Progress()
    data = make_data(engine=SimulatedEngine(Constant(0.001), num_slots=16), micro_batches_per_step=4)
    fit(make_module(), data, 3, callbacks=[bar], enable_progress_bar=True)
    assert (bar.num_steps, bar.max_steps) == (3, 3)
