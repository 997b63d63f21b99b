"""Every loss is built by its name from YAML, and refuses settings that make no sense."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from jsonargparse import ArgumentParser
from loss_helpers import known, make_inputs

import lit_async_rl.losses as losses_package
from lit_async_rl.corrections import Correction
from lit_async_rl.losses import (
    ASPO,
    BAPO,
    CISPO,
    DPPO,
    ESTR,
    GSPO,
    IPO,
    M2PO,
    OAPL,
    OPMD,
    OPSM,
    PNPO,
    SAPO,
    SAT,
    TOPR,
    VESPO,
    BAPOReleased,
    DPPOBinaryKL,
    GSPOToken,
    KimiRegression,
    M2POAdaptiveClip,
    MiniRL,
    MinPRO,
    PolicyLoss,
    PPOClip,
    ScoreCentering,
    TrajectoryBalance,
    TrajectoryBalancePrime,
)

EXPORTED = [getattr(losses_package, name) for name in sorted(losses_package.__all__)]
LOSSES = [c for c in EXPORTED if isinstance(c, type) and issubclass(c, PolicyLoss) and c is not PolicyLoss]


@pytest.mark.parametrize("loss_class", LOSSES)
def test_every_loss_is_named_and_built_by_yaml(loss_class: type[PolicyLoss]) -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--loss", type=PolicyLoss)
    config = parser.parse_object({"loss": {"class_path": f"lit_async_rl.losses.{loss_class.__name__}"}})
    assert parser.instantiate_classes(config).loss == loss_class()


@pytest.mark.parametrize(
    ("make", "setting"),
    [
        (lambda: PPOClip(clip_low=-0.1), "clip_low"),
        (lambda: PPOClip(clip_high=math.nan), "clip_high"),
        (lambda: PPOClip(dual_clip=1.0), "dual_clip"),
        (lambda: MiniRL(clip_high=-1.0), "clip_high"),
        (lambda: ASPO(cap=0.5), "cap"),
        (lambda: OPSM(delta=-1.0), "delta"),
        (lambda: CISPO(clip_high=-1.0), "clip_high"),
        (lambda: SAPO(tau_negative=0.0), "tau"),
        (lambda: GSPO(clip_low=-1.0), "clip_low"),
        (lambda: GSPOToken(clip_low=-1.0), "clip_low"),
        (lambda: TOPR(negative_low=2.0), "TOPR"),
        (lambda: VESPO(c1_negative=-1.0), "c1_negative"),
        (lambda: OPMD(tau=-2.0), "tau"),
        (lambda: KimiRegression(tau=-1.0), "tau"),
        (lambda: TrajectoryBalance(beta=0.0), "TrajectoryBalance.beta"),
        (lambda: TrajectoryBalancePrime(beta=-1.0), "TrajectoryBalancePrime.beta"),
        (lambda: OAPL(beta=0.0), "OAPL.beta"),
        (lambda: DPPO(max_increase=-1.0), "max_increase"),
        (lambda: IPO(threshold=-1.0), "threshold"),
        (lambda: DPPOBinaryKL(cap=0.0), "cap"),
        (lambda: M2PO(budget=-1.0), "budget"),
        (lambda: M2POAdaptiveClip(budget=0.0), "budget"),
        (lambda: ESTR(tau=0.0), "ESTR.tau"),
        (lambda: ScoreCentering(low=2.0, high=1.0), "ScoreCentering.high"),
        (lambda: MinPRO(cap=0.0), "MinPRO.cap"),
        (lambda: PNPO(clip_low=-1.0), "PNPO.clip_low"),
        (lambda: SAT(quantile=0.0), "SAT.quantile"),
        (lambda: BAPO(low_step=0.0), "BAPO.low"),
        (lambda: BAPO(high_start=5.0), "BAPO.high"),
        (lambda: BAPOReleased(dual_clip=1.0), "dual_clip"),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(make: Callable[[], PolicyLoss], setting: str) -> None:
    with pytest.raises(ValueError, match=setting):
        make()


def test_what_a_tape_has_not_recorded_is_refused_and_not_taken_for_nothing() -> None:
    """A tape of vLLM has no entropies, one recorded with `head: 0` no tokens, whatever the settings of the replay."""
    inputs = make_inputs(0)
    with pytest.raises(ValueError, match="ESTR needs the entropy of the sampling distribution"):
        ESTR()(replace(inputs, behavior_entropy=torch.full_like(known(inputs.behavior_entropy), torch.nan)))
    with pytest.raises(ValueError, match=r"ESTR needs .* set data\.sampling\.head to 0 or more"):
        ESTR()(replace(inputs, behavior_entropy=None))
    without = {name: known(getattr(inputs, name))[..., :0] for name in ("head_logprobs", "head_behavior_logprobs")}
    with pytest.raises(ValueError, match=r"ScoreCentering needs .* data\.sampling\.head"):
        ScoreCentering()(replace(inputs, **without))


class Whole(PolicyLoss):
    """A custom loss that averages by itself."""

    def token_loss(self, inputs):
        return SimpleNamespace(per_token=-(inputs.advantages * inputs.logprobs).mean(), clipped=~inputs.loss_mask)


class Rows(Whole):
    """One loss for each completion."""

    def token_loss(self, inputs):
        loss = -(inputs.advantages * inputs.logprobs).mean(-1, keepdim=True)
        return SimpleNamespace(per_token=loss, clipped=~inputs.loss_mask)


class OneMask(Whole):
    """No mask of the tokens whose gradient was cut."""

    def token_loss(self, inputs):
        return SimpleNamespace(per_token=-inputs.advantages * inputs.logprobs, clipped=False)


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (Whole(), r"model\.loss=Whole: per_token must be a tensor with one value for each token, .* got shape \(\)"),
        (Rows(), r"model\.loss=Rows: per_token must be .* of shape \(4, 7\), got shape \(4, 1\)"),
        (OneMask(), r"model\.loss=OneMask: clipped must be .* got False"),
    ],
)
def test_a_custom_loss_of_another_shape_is_refused(loss: PolicyLoss, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        loss(make_inputs(0, shape=(4, 7)))


class OneWeight(Correction):
    def weigh(self, log_ratio, loss_mask):
        return SimpleNamespace(weights=log_ratio.exp().mean(), rejected=~loss_mask)


def test_a_custom_correction_of_another_shape_is_refused() -> None:
    mask = torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"model\.correction=OneWeight: weights must be .*\(2, 3\), got shape \(\)"):
        OneWeight()(torch.zeros(2, 3), mask)
