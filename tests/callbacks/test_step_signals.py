"""Signals of a step, where some of its micro-batches are empty."""

import lightning.pytorch as pl
import pytest
from flow import fit, make_data, make_module

from lit_async_rl import SharedPromptPacking
from lit_async_rl.callbacks import CollapseAlarm, RolloutMonitor


def test_the_mean_reward_is_that_of_the_completions_where_micro_batches_are_empty():
    seen = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.fit_loop._should_accumulate():
                return
            seen.append([float(trainer.callback_metrics[name]) for name in ("collapse/reward", "reward/mean")])

    data = make_data(micro_batches_per_step=6, reward=lambda prompt, completion: 1.0 + len(completion) % 3)
    module = make_module(packing=SharedPromptPacking())  # keeps groups whole: two of six parts are empty
    fit(module, data, 3, [CollapseAlarm(max_reward_drop=0.9), RolloutMonitor(), Watch()])
    assert len(seen) == 3
    for alarm, monitor in seen:
        assert alarm == pytest.approx(monitor)
