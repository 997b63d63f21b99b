"""Proximal policies, and their compatibility with losses and corrections."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lit_async_rl.advantages.group import AdvantageEstimator, GroupMean, LengthWeighted, LogMeanExp
from lit_async_rl.corrections import Correction, IcePop, SequenceTruncatedIS, TokenTruncatedIS
from lit_async_rl.corrections.weights import BehaviorProximal, CurrentProximal, InterpolatedProximal, Proximal
from lit_async_rl.losses import (
    CISPO,
    GSPO,
    M2PO,
    OAPL,
    OPMD,
    TOPR,
    LossInputs,
    MiniRL,
    PolicyLoss,
    PPOClip,
    Reinforce,
    TrajectoryBalance,
)
from lit_async_rl.losses.aggregation import FixedLength, PromptMean, SequenceMean, SourceMean, TokenMean
from lit_async_rl.replay.tape_source import NoEngine
from lit_async_rl.rules import of_estimates, of_objective, of_step, refuse

PROXIMALS = [BehaviorProximal(), CurrentProximal(), InterpolatedProximal()]


def make(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logprobs, behavior = (-3 * torch.rand(3, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    return logprobs, behavior, torch.randint(0, 6, (3, 5), generator=generator)


def decoupled_gradient(
    loss: PolicyLoss, proximal: Proximal, correction: Correction | None, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the policy module composes them; the gradient, and log pi - log mu."""
    logprobs, behavior, staleness = make(seed)
    logprobs.requires_grad_()
    mask = torch.ones(3, 5, dtype=torch.bool)
    proximal_logprobs = proximal(logprobs.detach(), behavior, staleness)
    inputs = LossInputs(
        logprobs=logprobs,
        proximal_logprobs=proximal_logprobs,
        behavior_logprobs=behavior,
        advantages=advantages(seed),
        loss_mask=mask,
        staleness=staleness,
        token_weights=torch.ones(3, 5, dtype=torch.float64),
        group_index=torch.zeros(3, dtype=torch.long),
    )
    per_token = loss(inputs).per_token
    if correction is not None:
        per_token = per_token * correction(proximal_logprobs - behavior, mask).weights
    per_token.sum().backward()
    assert logprobs.grad is not None
    return logprobs.grad, logprobs.detach() - behavior


def advantages(seed: int) -> torch.Tensor:
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)


@given(seed=st.integers(0, 2**31))
def test_interpolated_ratio_is_the_staleness_th_root(seed: int) -> None:
    logprobs, behavior, staleness = make(seed)
    proximal_logprobs = InterpolatedProximal()(logprobs, behavior, staleness)
    for row in range(3):
        for t in range(5):
            d = staleness[row, t].item()
            expected = (logprobs - behavior)[row, t].item() / d if d else 0.0
            assert (logprobs - proximal_logprobs)[row, t].item() == pytest.approx(expected, abs=1e-12)


def test_interpolated_proximal_is_current_when_fresh_and_behavior_one_version_later() -> None:
    logprobs, behavior, _ = make(0)
    zero = torch.zeros(3, 5, dtype=torch.long)
    assert torch.equal(InterpolatedProximal()(logprobs, behavior, zero), logprobs)
    assert torch.equal(InterpolatedProximal()(logprobs, behavior, zero + 1), behavior)


@pytest.mark.parametrize("proximal", PROXIMALS, ids=lambda p: type(p).__name__)
def test_proximals_carry_no_gradient_and_agree_on_policy(proximal: Proximal) -> None:
    logprobs, _, staleness = make(1)
    proximal_logprobs = proximal(logprobs.clone().requires_grad_(), logprobs, staleness)
    assert not proximal_logprobs.requires_grad
    torch.testing.assert_close(proximal_logprobs, logprobs)


@pytest.mark.slow
@given(seed=st.integers(0, 2**31))
def test_without_bounds_every_way_of_decoupling_gives_the_same_gradient(seed: int) -> None:
    """(pi / pi_prox) x (pi_prox / mu) = pi / mu: unclipped and untruncated, the proximal policy cancels."""
    free, whole = PPOClip(clip_low=math.inf, clip_high=math.inf), TokenTruncatedIS(cap=math.inf)
    plain, log_ratio = decoupled_gradient(free, BehaviorProximal(), None, seed)
    torch.testing.assert_close(plain, -log_ratio.exp() * advantages(seed))
    for loss, proximal in [
        (free, CurrentProximal()),
        (free, InterpolatedProximal()),
        (Reinforce(), CurrentProximal()),
        (MiniRL(clip_low=math.inf, clip_high=math.inf), InterpolatedProximal()),
    ]:
        torch.testing.assert_close(decoupled_gradient(loss, proximal, whole, seed)[0], plain)


@given(seed=st.integers(0, 2**31))
def test_decoupled_ppo_is_ppo_when_the_proximal_policy_is_the_behavior_policy(seed: int) -> None:
    plain, _ = decoupled_gradient(PPOClip(), BehaviorProximal(), None, seed)
    decoupled, _ = decoupled_gradient(PPOClip(), BehaviorProximal(), TokenTruncatedIS(), seed)
    assert torch.equal(plain, decoupled)


@given(seed=st.integers(0, 2**31))
def test_with_the_current_proximal_no_clip_acts_and_only_the_correction_weighs(seed: int) -> None:
    grad, log_ratio = decoupled_gradient(PPOClip(), CurrentProximal(), TokenTruncatedIS(cap=2.0), seed)
    torch.testing.assert_close(grad, -log_ratio.exp().clamp(max=2.0) * advantages(seed))


@pytest.mark.parametrize(
    ("loss", "proximal", "correction"),
    [
        (PPOClip(), BehaviorProximal(), None),
        (PPOClip(), CurrentProximal(), TokenTruncatedIS()),
        (PPOClip(), InterpolatedProximal(), IcePop()),
        (GSPO(), InterpolatedProximal(), SequenceTruncatedIS()),
        (CISPO(), BehaviorProximal(), None),
        (Reinforce(), BehaviorProximal(), None),
        (Reinforce(), CurrentProximal(), SequenceTruncatedIS()),
        (OPMD(), BehaviorProximal(), None),
        (M2PO(), BehaviorProximal(), None),
        (MiniRL(), CurrentProximal(), TokenTruncatedIS(cap=5.0)),
        (TrajectoryBalance(), BehaviorProximal(), None),
        (OAPL(), BehaviorProximal(), None),
    ],
)
def test_methods_are_allowed(loss: PolicyLoss, proximal: Proximal, correction: Correction | None) -> None:
    refuse(of_objective(loss, proximal, correction))


@pytest.mark.parametrize(
    ("loss", "proximal", "correction", "message"),
    [
        (PPOClip(), BehaviorProximal(), IcePop(), "IcePop.*BehaviorProximal.*is 1 here"),
        (Reinforce(), BehaviorProximal(), IcePop(), "IcePop.*BehaviorProximal"),
        (PPOClip(), CurrentProximal(), None, "PPOClip.*CurrentProximal.*ratio is always 1"),
        (GSPO(), InterpolatedProximal(), None, "GSPO.*InterpolatedProximal.*proximal to behavior policy is missing"),
        (M2PO(), CurrentProximal(), IcePop(), "M2PO.*CurrentProximal.*Use BehaviorProximal"),
        (TOPR(), InterpolatedProximal(), IcePop(), "TOPR.*InterpolatedProximal.*Use BehaviorProximal"),
        (TrajectoryBalance(), CurrentProximal(), IcePop(), "TrajectoryBalance.*ratio to the reference"),
        (OAPL(), CurrentProximal(), IcePop(), "OAPL.*Use BehaviorProximal"),
        (Reinforce(), CurrentProximal(), None, "Reinforce.*CurrentProximal.*nothing reads the proximal policy"),
        (Reinforce(), InterpolatedProximal(), IcePop(), "Reinforce.*InterpolatedProximal.*Use CurrentProximal"),
    ],
)
def test_senseless_combinations_are_refused_by_name(
    loss: PolicyLoss, proximal: Proximal, correction: Correction | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        refuse(of_objective(loss, proximal, correction))


def test_a_length_weighted_baseline_is_refused_where_length_is_divided_out() -> None:
    step: dict[str, Any] = dict(stream_groups=False, groups_per_step=4, group_size=2, micro_batches_per_step=1)
    with pytest.raises(ValueError, match=r"LengthWeighted.*SequenceMean"):
        refuse(of_step(LengthWeighted(), SequenceMean(), **step))
    with pytest.raises(ValueError, match=r"LengthWeighted.*SourceMean: .*SequenceMean divides out"):
        refuse(of_step(LengthWeighted(), SourceMean("task"), **step))  # SequenceMean within each
    refuse(of_step(LengthWeighted(), SourceMean("task", TokenMean()), **step))
    for aggregation in (TokenMean(), FixedLength(8)):
        refuse(of_step(LengthWeighted(), aggregation, **step))
    refuse(of_step(GroupMean(), SequenceMean(), **step))


@pytest.mark.parametrize(("loss", "advantage"), [(TrajectoryBalance(), GroupMean()), (OAPL(), LogMeanExp())])
def test_sources_do_not_hide_weights_that_depend_on_the_length(loss: PolicyLoss, advantage: AdvantageEstimator) -> None:
    rest = None, NoEngine(scores=True)
    for inner in (SequenceMean(), PromptMean()):
        said = rf"{type(loss).__name__} with data\.aggregation=SourceMean: .* as {type(inner).__name__}'s do"
        with pytest.raises(ValueError, match=said):
            refuse(of_estimates(loss, advantage, SourceMean("task", inner), *rest))
    refuse(of_estimates(loss, advantage, SourceMean("task", FixedLength(1)), *rest))
