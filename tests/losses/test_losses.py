"""Every loss against a reference written as loops, and against what all losses have in common.

A new loss joins by one line in `CASES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import slow_batch_references as slow_batch
import slow_references as slow
import slow_sequence_references as slow_sequence
import slow_trajectory_references as slow_trajectory
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_helpers import as_batch, assert_close, junk_at, make_inputs, run
from torch import Tensor

import lit_async_rl.losses as losses_package
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
    ImportanceWeight,
    KimiRegression,
    LossInputs,
    M2POAdaptiveClip,
    MiniRL,
    MinPRO,
    PolicyLoss,
    PPOClip,
    Reinforce,
    ScoreCentering,
    TrajectoryBalance,
    TrajectoryBalancePrime,
)


@dataclass(frozen=True)
class Case:
    loss: PolicyLoss
    reference: Callable[[slow.Batch, Any], slow.Result]
    on_policy_scale: float = 1.0  # gradient on-policy as a multiple of REINFORCE's


CASES = [
    Case(Reinforce(), slow.reinforce),
    Case(PPOClip(), slow.ppo_clip),
    Case(PPOClip(clip_low=0.2, clip_high=0.28, dual_clip=1.5), slow.ppo_clip),
    Case(PPOClip(clip_low=math.inf, clip_high=math.inf), slow.ppo_clip),
    Case(MiniRL(), slow.mini_rl),
    Case(ASPO(), slow.aspo),
    Case(OPSM(delta=0.1), slow.opsm),
    Case(CISPO(), slow.cispo),
    Case(CISPO(clip_low=0.1, clip_high=0.1), slow.cispo),
    Case(SAPO(), slow.sapo),
    Case(GSPO(), slow_sequence.gspo),
    Case(GSPO(clip_low=0.2, clip_high=0.3), slow_sequence.gspo),
    Case(GSPOToken(clip_low=0.2, clip_high=0.3), slow_sequence.gspo_token),
    Case(TOPR(), slow_sequence.topr),
    Case(TOPR(positive_low=0.5, positive_high=2.0, negative_low=0.1, negative_high=1.5), slow_sequence.topr),
    Case(TOPR(positive_low=0.0, positive_high=math.inf, negative_high=math.inf), slow_sequence.topr),
    Case(VESPO(), slow_sequence.vespo),
    Case(OPMD(), slow.opmd, on_policy_scale=0.5),
    Case(KimiRegression(), slow.kimi_regression),
    Case(TrajectoryBalance(beta=0.1), slow_trajectory.trajectory_balance, on_policy_scale=20.0),
    Case(TrajectoryBalancePrime(beta=0.1), slow_trajectory.trajectory_balance_prime),
    Case(OAPL(beta=0.3), slow_trajectory.oapl, on_policy_scale=0.6),
    Case(DPPO(), slow.dppo),
    Case(IPO(), slow.ipo),
    Case(DPPOBinaryKL(), slow.dppo_binary_kl),
    Case(M2PO(), slow_batch.m2po),
    Case(M2PO(budget=0.5), slow_batch.m2po),
    Case(M2POAdaptiveClip(), slow_batch.m2po_adaptive_clip),
    Case(M2POAdaptiveClip(budget=0.5), slow_batch.m2po_adaptive_clip),
    Case(MinPRO(), slow_sequence.min_pro),
    Case(MinPRO(cap=math.inf), slow_sequence.min_pro),
    Case(PNPO(), slow_sequence.pnpo),
    Case(PNPO(clip_low=0.1, clip_high=0.5), slow_sequence.pnpo),
    Case(SAT(), slow_batch.sat),
    Case(SAT(clip_low=0.3, clip_high=0.1, quantile=0.5), slow_batch.sat),
    Case(ESTR(tau=0.1), slow.estr),
    Case(ESTR(tau=2.0, eps=0.5, clip_low=0.1), slow.estr),
    *(Case(ScoreCentering(weight=weight), slow.score_centering) for weight in ImportanceWeight),
    Case(BAPO(), slow_batch.bapo),
    Case(BAPOReleased(), slow_batch.bapo_released),
]
every_loss = pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.loss))

# settings under which nothing is cut; losses that stand in neither table cut nothing
NO_CLIP = {"clip_low": math.inf, "clip_high": math.inf}
WITHOUT_BOUNDS: dict[type[PolicyLoss], dict[str, float | None]] = {
    PPOClip: NO_CLIP | {"dual_clip": None},
    MiniRL: NO_CLIP,
    ASPO: NO_CLIP | {"cap": math.inf},
    OPSM: NO_CLIP | {"delta": math.inf},
    CISPO: NO_CLIP,
    GSPO: NO_CLIP,
    GSPOToken: NO_CLIP,
    TOPR: {"negative_low": 0.0, "negative_high": math.inf},
    DPPO: {"max_increase": math.inf, "max_decrease": math.inf},
    IPO: {"threshold": math.inf},
    DPPOBinaryKL: {"threshold": math.inf, "cap": math.inf},
    M2PO: {"budget": math.inf},
    M2POAdaptiveClip: {"budget": math.inf},
    MinPRO: {"cap": math.inf},
    PNPO: NO_CLIP,
    SAT: NO_CLIP,
    ESTR: NO_CLIP | {"tau": math.inf},
    ScoreCentering: {"low": 0.0, "high": math.inf, "cap": math.inf},
}


def slowly_cut(case: Case, inputs: LossInputs) -> tuple[Tensor, Tensor]:
    """Tokens whose gradient is another than without bounds, by the slow references; and those where that is certain.

    A truncated weight within a rounding of 1e-4 nats a token of its bound does not count as cut.
    """
    loss, reference = case.loss, case.reference
    batch = as_batch(inputs)
    values, grads = reference(batch, loss)
    if isinstance(loss, BAPO | BAPOReleased):  # its bounds cannot be infinite
        free_values, free_grads = slow.ppo_clip(batch, PPOClip(clip_low=math.inf, clip_high=math.inf))
    else:
        bounds = WITHOUT_BOUNDS.get(type(loss), {})
        if isinstance(loss, TOPR) and loss.positive_low != loss.positive_high:  # equal: weights that are no ratios
            bounds = bounds | {"positive_low": 0.0, "positive_high": math.inf}
        free_values, free_grads = reference(batch, replace(loss, **bounds))  # type: ignore[type-var]
    if isinstance(loss, GSPO):  # a token's gradient is spread over its completion; its value is its own
        cut = torch.tensor(values, dtype=torch.float64) != torch.tensor(free_values, dtype=torch.float64)
        return cut, torch.ones_like(cut)
    slack = torch.exp(1e-4 * (inputs.loss_mask.sum(-1, keepdim=True) + 1))
    sizes = torch.tensor(grads, dtype=torch.float64).abs()
    free_sizes = torch.tensor(free_grads, dtype=torch.float64).abs()
    cut = sizes != free_sizes
    return cut, ~cut | (free_sizes > sizes * slack) | (free_sizes * slack < sizes)


shapes = st.tuples(st.integers(1, 5), st.integers(1, 7))
spreads = st.sampled_from([0.001, 0.1, 0.5, 2.0])


@every_loss
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), shape=shapes, spread=spreads)
def test_values_and_gradients_equal_the_slow_reference(case: Case, seed: int, shape: tuple, spread: float) -> None:
    inputs = make_inputs(seed, shape, spread)
    output, grad = run(case.loss, inputs)
    values, grads = case.reference(as_batch(inputs), case.loss)
    assert_close(output.per_token.detach(), values)
    assert_close(grad, grads)
    trains = inputs.loss_mask & (inputs.advantages != 0)  # without an advantage there is no gradient to cut
    cut, is_certain = slowly_cut(case, inputs)
    assert torch.equal(output.clipped & trains & is_certain, cut & trains & is_certain)


@every_loss
def test_clipped_tokens_occur_in_every_loss_that_has_bounds(case: Case) -> None:
    found = torch.zeros(4, 6, dtype=torch.bool)
    for seed in range(8):
        found |= run(case.loss, make_inputs(seed, spread=2.0))[0].clipped
    infinite = {
        PPOClip(clip_low=math.inf, clip_high=math.inf),
        MinPRO(cap=math.inf),
        TOPR(positive_low=0.0, positive_high=math.inf, negative_high=math.inf),
    }
    has_bounds = type(case.loss) in {*WITHOUT_BOUNDS, BAPO, BAPOReleased} and case.loss not in infinite
    if isinstance(case.loss, ScoreCentering):
        has_bounds = case.loss.weight in {ImportanceWeight.TRUNCATED, ImportanceWeight.MASKED}
    assert bool(found.any()) is has_bounds


@every_loss
def test_on_policy_every_loss_is_reinforce(case: Case) -> None:
    inputs = make_inputs(0)
    inputs = replace(
        inputs,
        proximal_logprobs=inputs.logprobs.detach(),
        behavior_logprobs=inputs.logprobs.detach(),
        advantages=inputs.advantages[:, :1].expand(4, 6),
        token_weights=inputs.token_weights[:, :1].expand(4, 6),  # as every average does; GSPO spreads over a completion
    )
    output, grad = run(case.loss, inputs)
    expected = torch.where(inputs.loss_mask, -inputs.token_weights * inputs.advantages, 0.0)
    assert_close(grad, case.on_policy_scale * expected)
    assert not output.clipped.any()


@every_loss
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31), spread=spreads)
def test_what_stands_at_masked_tokens_never_matters(case: Case, seed: int, spread: float) -> None:
    inputs = make_inputs(seed, spread=spread)
    output, grad = run(case.loss, inputs)
    junk_output, junk_grad = run(case.loss, junk_at(inputs, ~inputs.loss_mask, seed))
    assert torch.equal(output.per_token, junk_output.per_token)
    assert torch.equal(grad, junk_grad)
    assert torch.equal(output.clipped, junk_output.clipped)
    assert (output.per_token[~inputs.loss_mask] == 0).all()
    assert (grad[~inputs.loss_mask] == 0).all()
    assert not output.clipped[~inputs.loss_mask].any()


@every_loss
def test_order_of_completions_and_padding_change_nothing(case: Case) -> None:
    inputs = make_inputs(3)
    output, grad = run(case.loss, inputs)
    order = torch.tensor([2, 0, 3, 1])

    def shuffled_and_padded(values: Tensor) -> Tensor:
        if values.ndim == 1:
            return torch.nn.functional.pad(values[order], (0, 2), value=-1)
        trailing = (0, 0) * (values.ndim - 2)
        return torch.nn.functional.pad(values.detach()[order], (*trailing, 1, 3, 0, 2), value=0)

    moved = LossInputs(**{name: shuffled_and_padded(value) for name, value in vars(inputs).items()})
    moved_output, moved_grad = run(case.loss, moved)
    assert_close(moved_output.per_token[:4, 1:-3].detach(), output.per_token.detach()[order])
    assert_close(moved_grad[:4, 1:-3], grad[order])


@every_loss
@pytest.mark.parametrize("size", [80.0, 1e4])
def test_extreme_log_ratios_give_finite_losses_and_gradients(case: Case, size: float) -> None:
    inputs = make_inputs(4)
    signs = torch.where(torch.rand(4, 6, generator=torch.Generator().manual_seed(0)) < 0.5, 1.0, -1.0)
    # completions far away as a whole, too
    far = (size * torch.cat([signs[:2], torch.ones(1, 6), -torch.ones(1, 6)])).float()
    inputs = LossInputs(
        **{name: value.float() if value.is_floating_point() else value for name, value in vars(inputs).items()}
        | {"logprobs": -torch.rand(4, 6), "proximal_logprobs": -far, "behavior_logprobs": -far}
    )
    output, grad = run(case.loss, inputs)
    assert output.per_token.isfinite().all()
    assert grad.isfinite().all()


@every_loss
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_a_completion_with_a_broken_number_trains_nothing_and_spoils_no_other(case: Case, seed: int) -> None:
    inputs = make_inputs(seed)
    where = torch.zeros(4, 6, dtype=torch.bool)
    where[1, 2] = True
    inputs = replace(inputs, loss_mask=inputs.loss_mask | where)
    broken = junk_at(inputs, where, seed)
    broken = replace(broken, behavior_logprobs=torch.where(where, math.nan, inputs.behavior_logprobs))
    output, grad = run(case.loss, broken)
    left_out = inputs.loss_mask.clone()
    left_out[1] = False
    expected, expected_grad = run(case.loss, replace(inputs, loss_mask=left_out))
    assert torch.equal(output.per_token, expected.per_token)
    assert torch.equal(grad, expected_grad)
    assert torch.equal(output.clipped[1], inputs.loss_mask[1])  # and says so


@every_loss
@pytest.mark.parametrize("shape", [(1, 1), (3, 4), (2, 0)])
def test_a_batch_without_tokens_gives_zero(case: Case, shape: tuple[int, int]) -> None:
    inputs = make_inputs(5, shape)
    inputs = junk_at(replace(inputs, loss_mask=torch.zeros(shape, dtype=torch.bool)), torch.ones(shape).bool(), 0)
    output, grad = run(case.loss, inputs)
    assert (output.per_token == 0).all()
    assert (grad == 0).all()
    assert not output.clipped.any()


def test_every_exported_loss_is_held_to_all_of_this() -> None:
    exported = {getattr(losses_package, name) for name in losses_package.__all__}
    losses = {c for c in exported if isinstance(c, type) and issubclass(c, PolicyLoss) and c is not PolicyLoss}
    assert losses == {type(case.loss) for case in CASES}
