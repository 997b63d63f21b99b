"""The default optimizer is fused; updates that the dtype rounds away are warned of."""

import logging

import pytest
import torch

import lit_async_rl as rl
from lit_async_rl.assets import asset
from lit_async_rl.training.optimizer import lost_share, make_adamw

MODEL = asset("small_sort_policy")
QUICK = dict(max_steps=1, groups_per_step=2, group_size=2, accelerator="cpu", logger=False, enable_checkpointing=False)


def trained(**settings) -> rl.Trainer:
    prompts = rl.SortDigits(4, size=64)
    sampling = rl.SamplingParams(max_tokens=4)
    return rl.fit(MODEL, prompts, rl.share_correct, sampling=sampling, enable_progress_bar=False, **QUICK, **settings)


def test_adamw_is_fused():
    assert trained().optimizers[0].defaults["fused"] is True


def test_not_where_lightning_could_not_clip():
    trainer = rl.Trainer(accelerator="cpu", logger=False)
    trainer.strategy.precision_plugin.scaler = object()
    parameters = [torch.nn.Parameter(torch.ones(2))]
    assert make_adamw(parameters, trainer, lr=1e-3).defaults["fused"] is None


@pytest.mark.parametrize(("dtype", "rate", "warns"), [("bfloat16", 1e-6, True), ("bfloat16", 1e-2, False)])
def test_updates_that_are_rounded_away_are_warned_of(dtype, rate, warns, caplog):
    with caplog.at_level(logging.WARNING):
        trained(dtype=dtype, learning_rate=rate)
    lines = [r.getMessage() for r in caplog.records if "of the weights do not change" in r.getMessage()]
    assert len(lines) == warns
    assert not warns or ("model.dtype=bfloat16 with the learning rate 1e-06" in lines[0] and "float32" in lines[0])


def test_the_share_of_lost_updates():
    weights = torch.nn.Parameter(torch.cat([torch.full((300,), 1.0), torch.full((100,), 1e-6)]).bfloat16())
    assert lost_share([weights], 1e-6) == pytest.approx(0.75, abs=0.02)
    assert lost_share([torch.nn.Parameter(weights.float())], 1e-6) == 0
    moved = torch.optim.Adam([weights], lr=1e-6)
    before = weights.detach().clone()
    weights.grad = torch.ones_like(weights)
    moved.step()
    assert (before == weights).float().mean() == pytest.approx(0.75, abs=0.02)
