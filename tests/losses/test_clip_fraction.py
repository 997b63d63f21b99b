"""The share of clipped tokens is 0 where the ratios are 1 up to rounding, and right beyond it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from loss_helpers import make_inputs

from lit_async_rl.losses import (
    ASPO,
    CISPO,
    TOPR,
    DPPOBinaryKL,
    ImportanceWeight,
    LossInputs,
    MinPRO,
    PolicyLoss,
    ScoreCentering,
)
from lit_async_rl.losses.clipped import minimum_before

AT_ONE = [  # losses whose truncation begins at a ratio of 1
    TOPR(),
    TOPR(positive_low=0.5, negative_low=1.0, negative_high=2.0),
    CISPO(clip_low=0.0, clip_high=0.0),
    MinPRO(cap=1.0),
    ASPO(cap=1.0),
    DPPOBinaryKL(cap=1.0),
    ScoreCentering(weight=ImportanceWeight.TRUNCATED, cap=1.0),
]


def moved(drift: float, seed: int) -> LossInputs:
    """Inputs in float32 of 64 tokens a row; log-ratios of a random sign and of the size `drift`."""
    inputs = make_inputs(seed, shape=(16, 64), spread=0.0)
    signs = torch.randn(16, 64, generator=torch.Generator().manual_seed(seed)).sign()
    logprobs = (inputs.proximal_logprobs + drift * signs).float()
    heads = [values.float() for values in (inputs.head_logprobs, inputs.head_behavior_logprobs)]
    return replace(
        inputs,
        logprobs=logprobs.requires_grad_(),
        proximal_logprobs=inputs.proximal_logprobs.float(),
        advantages=inputs.advantages.float(),
        head_logprobs=heads[0],
        head_behavior_logprobs=heads[1],
    )


@pytest.mark.parametrize("loss", AT_ONE, ids=repr)
@pytest.mark.parametrize("drift", [0.0, 1e-7, 1e-5])
def test_nothing_is_clipped_at_lag_zero(loss: PolicyLoss, drift: float) -> None:
    for seed in range(4):
        inputs = moved(drift, seed)
        assert inputs.loss_mask.any()
        assert not loss(inputs).clipped[inputs.loss_mask].any()


@pytest.mark.parametrize("loss", AT_ONE[2:], ids=repr)
def test_a_ratio_beyond_rounding_is_clipped(loss: PolicyLoss) -> None:
    inputs = moved(0.01, seed=1)
    above = inputs.log_ratio.detach() > 0
    outside = {
        CISPO: torch.ones_like(above),
        ASPO: (inputs.advantages > 0) & ~above,
        MinPRO: above & (minimum_before(inputs.log_ratio.detach(), inputs.loss_mask) > -0.005),
    }.get(type(loss), above)
    assert torch.equal(loss(inputs).clipped & inputs.loss_mask, outside & inputs.loss_mask)
    assert (outside & inputs.loss_mask).any()


@pytest.mark.parametrize("drift", [0.02, 0.5])
def test_topr_counts_bad_completions_beyond_its_bound(drift: float) -> None:
    inputs = moved(drift, seed=2)
    log_w = (inputs.log_ratio.detach() * inputs.loss_mask).sum(-1, keepdim=True)
    slack = 1e-4 * inputs.loss_mask.sum(-1, keepdim=True)
    expected = (inputs.advantages <= 0) & (log_w > slack) & inputs.loss_mask
    assert 0 < expected.sum() < inputs.loss_mask.sum()
    assert torch.equal(TOPR()(inputs).clipped & inputs.loss_mask, expected)
    wide = TOPR(positive_low=0.0, positive_high=math.inf, negative_high=math.inf)
    assert not wide(inputs).clipped[inputs.loss_mask].any()
