"""Rewards before and after filters, and a progress bar that counts optimizer steps."""

import lightning.pytorch as pl
import pytest
from flow import fit, make_data, make_module

from lit_async_rl import DynamicSampling
from lit_async_rl.callbacks import Progress, RolloutMonitor
from lit_async_rl.simulation.latency import Constant
from lit_async_rl.simulation.run import SimulatedEngine


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
    data = make_data(engine=engine, reward=make_reward(), filters=filters)
    steps = Steps()
    fit(make_module(), data, 4, callbacks=[RolloutMonitor(), steps])
    assert len(steps.logged) == 4
    for logged in steps.logged:
        if filters:
            assert logged["reward/mean"] == 0.5
            assert logged["reward/mean_sampled"] == pytest.approx(0.5 * (1 - logged["sample/dropped_share"]))
    dropped = [float(logged["sample/dropped_share"]) for logged in steps.logged]  # of the groups scored since the last
    assert (max(dropped) > 0) == bool(filters)


class Steps(pl.Callback):
    """Keeps what each step logged."""

    def __init__(self):
        self.logged = []

    def on_train_batch_end(self, trainer, *_):
        self.logged.append(dict(trainer.callback_metrics))


def test_the_bar_counts_optimizer_steps():
    bar = Progress()
    data = make_data(engine=SimulatedEngine(Constant(0.001), num_slots=16), micro_batches_per_step=4)
    fit(make_module(), data, 3, callbacks=[bar], enable_progress_bar=True)
    assert (bar.num_steps, bar.max_steps) == (3, 3)
