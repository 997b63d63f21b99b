"""Stabilizers that serve a second run: what they measured in the first is forgotten."""

import math

import lightning.pytorch as pl
import pytest
import torch
from test_all_callbacks import BoundedRows, Rows, quick, train

from lit_async_rl.callbacks import (
    AdaptiveStaleness,
    CollapseAlarm,
    ESSLearningRate,
    GradientAlignmentControl,
)
from lit_async_rl.stabilizers.rollback import RollBack


class OneNaN(pl.Callback):
    """In the gradient of the second step."""

    def on_after_backward(self, trainer, pl_module):
        if trainer.global_step == 1:
            next(pl_module.parameters()).grad.fill_(math.nan)


REMEMBERING = [
    lambda: GradientAlignmentControl(low=0.0, calibrate_steps=4),
    lambda: ESSLearningRate(measure_steps=4),
    lambda: AdaptiveStaleness(target_ess_ratio=0.99, band=0.0, smoothing=0.95),
    lambda: CollapseAlarm(RollBack(every_n_steps=1, max_rollbacks=2), min_ess_ratio=0.4, patience=1, cooldown_steps=9),
    lambda: quick(limit=-1.0, cooldown_steps=1, calm_steps=2, copy_every_n_steps=1),
    lambda: CollapseAlarm(min_ess_ratio=None, max_reward_drop=0.02, window=3),
]


@pytest.mark.parametrize("make", REMEMBERING, ids=[f"{type(m()).__name__}-{n}" for n, m in enumerate(REMEMBERING)])
def test_in_another_run_what_it_measured_in_the_first_is_forgotten(make):
    used = make()
    first = Rows(200, scale=2.0)
    first.reward += 1
    train(OneNaN(), used, data=BoundedRows(first))
    found, expected = train(used), train(make())
    assert torch.equal(found[0], expected[0])
    assert found[1] == expected[1]
    assert found[2].metrics == expected[2].metrics
