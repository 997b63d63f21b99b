"""Rewards before and after filters, and a progress bar that counts optimizer steps."""

from dataclasses import replace

import lightning.pytorch as pl
import pytest
import torch
from flow import fit, make_data, make_module
from groups import collate, group

from lit_async_rl import DynamicSampling
from lit_async_rl.callbacks import Progress, RolloutMonitor
from lit_async_rl.simulation.engine import SimulatedEngine
from lit_async_rl.simulation.latency import Constant
from lit_async_rl.types import Branch


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


def test_the_length_of_a_rollout_is_that_of_all_its_branches():
    plain = group([0.0, 1.0], lengths=[3, 3])
    branch = Branch(
        prompt_ids=(1, 1), token_ids=(1,) * 5, logprobs=(-1.0,) * 5, versions=(0,) * 5, loss_mask=(True,) * 5
    )
    rollouts = (replace(plain.rollouts[0], branches=(branch,)), plain.rollouts[1])
    (batch,) = collate([replace(plain, rollouts=rollouts)], 1)
    assert len(batch.loss_mask) == 3
    monitor = RolloutMonitor()
    module = make_module()
    module.stabilizer_signals = {"entropy": torch.zeros(batch.loss_mask.shape), "loss": torch.tensor(0.0)}
    monitor.update(pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False), module, batch)
    assert monitor.length.compute() == (3 + 5 + 3) / 2


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
