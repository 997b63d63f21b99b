"""Every loss against a reference written as loops, and against what all losses have in common.

A new loss joins by one line in `CASES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import slow_references as slow
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonargparse import ArgumentParser
from torch import Tensor

import lit_async_rl.losses as losses_package
from lit_async_rl.importance import second_moment_excess
from lit_async_rl.losses import (
    ASPO,
    BAPO,
    CISPO,
    DPPO,
    GSPO,
    IPO,
    M2PO,
    OPMD,
    OPSM,
    SAPO,
    TOPR,
    VESPO,
    BAPOReleased,
    DPPOBinaryKL,
    GSPOToken,
    KimiRegression,
    LossInputs,
    LossOutput,
    M2POAdaptiveClip,
    MiniRL,
    PolicyLoss,
    PPOClip,
    Reinforce,
)
from lit_async_rl.losses.trust_region import water_level


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
    Case(GSPO(), slow.gspo),
    Case(GSPO(clip_low=0.2, clip_high=0.3), slow.gspo),
    Case(GSPOToken(clip_low=0.2, clip_high=0.3), slow.gspo_token),
    Case(TOPR(), slow.topr),
    Case(TOPR(positive_low=0.5, positive_high=2.0, negative_low=0.1, negative_high=1.5), slow.topr),
    Case(VESPO(), slow.vespo),
    Case(OPMD(), slow.opmd, on_policy_scale=0.5),
    Case(KimiRegression(), slow.kimi_regression),
    Case(DPPO(), slow.dppo),
    Case(IPO(), slow.ipo),
    Case(DPPOBinaryKL(), slow.dppo_binary_kl),
    Case(M2PO(), slow.m2po),
    Case(M2PO(budget=0.5), slow.m2po),
    Case(M2POAdaptiveClip(), slow.m2po_adaptive_clip),
    Case(M2POAdaptiveClip(budget=0.5), slow.m2po_adaptive_clip),
    Case(BAPO(), slow.bapo),
    Case(BAPOReleased(), slow.bapo_released),
]
every_loss = pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.loss))


def make_inputs(seed: int, shape: tuple[int, int] = (4, 6), spread: float = 0.5) -> LossInputs:
    """Random data in float64; `spread` is the standard deviation of log-ratios."""
    generator = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    anchor = -0.05 - torch.rand(shape, generator=generator, dtype=torch.float64) * 3
    logprobs = (anchor + spread * normal()).clamp(max=-0.01)
    advantages = torch.where(torch.rand(shape, generator=generator) < 0.1, 0.0, normal())
    return LossInputs(
        logprobs=logprobs.requires_grad_(),
        anchor_logprobs=anchor,
        behavior_logprobs=anchor + 0.1 * normal(),
        advantages=advantages,
        loss_mask=torch.rand(shape, generator=generator) < 0.7,
        staleness=torch.randint(0, 5, shape, generator=generator),
        token_weights=torch.rand(shape, generator=generator, dtype=torch.float64),
    )


def run(loss: PolicyLoss, inputs: LossInputs) -> tuple[LossOutput, Tensor]:
    """Output, and gradient of the token-weighted sum."""
    logprobs = inputs.logprobs.detach().clone().requires_grad_()
    output = loss(replace(inputs, logprobs=logprobs))
    (inputs.token_weights * output.per_token).sum().backward()
    assert logprobs.grad is not None
    return output, logprobs.grad


def as_batch(inputs: LossInputs) -> slow.Batch:
    return slow.Batch(
        logprobs=inputs.logprobs.tolist(),
        anchor=inputs.anchor_logprobs.tolist(),
        behavior=inputs.behavior_logprobs.tolist(),
        advantages=inputs.advantages.tolist(),
        cotangents=inputs.token_weights.tolist(),
        mask=inputs.loss_mask.tolist(),
    )


def junk_at(inputs: LossInputs, where: Tensor, seed: int) -> LossInputs:
    """The same with values that poison any arithmetic."""
    generator = torch.Generator().manual_seed(seed)
    poison = torch.tensor([math.nan, math.inf, -math.inf, 1e30, -1e30], dtype=torch.float64)

    def spoil(values: Tensor) -> Tensor:
        return torch.where(where, poison[torch.randint(0, 5, values.shape, generator=generator)], values)

    return replace(
        inputs,
        logprobs=spoil(inputs.logprobs.detach()),
        anchor_logprobs=spoil(inputs.anchor_logprobs),
        behavior_logprobs=spoil(inputs.behavior_logprobs),
        advantages=spoil(inputs.advantages),
        staleness=torch.where(where, -(10**9), inputs.staleness),
    )


def assert_close(actual: Any, expected: Any) -> None:
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)


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


@every_loss
def test_on_policy_every_loss_is_reinforce(case: Case) -> None:
    inputs = make_inputs(0)
    inputs = replace(
        inputs,
        anchor_logprobs=inputs.logprobs.detach(),
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
        return torch.nn.functional.pad(values.detach()[order], (1, 3, 0, 2), value=0)

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
        | {"logprobs": -torch.rand(4, 6), "anchor_logprobs": -far, "behavior_logprobs": -far}
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


@every_loss
def test_zero_advantages_move_nothing_but_a_pull_to_the_anchor(case: Case) -> None:
    inputs = make_inputs(6)
    inputs = replace(inputs, advantages=torch.zeros_like(inputs.advantages))
    _, grad = run(case.loss, inputs)
    if isinstance(case.loss, DPPO | IPO | KimiRegression):  # these have one; it points back
        assert (grad * inputs.log_ratio.detach() >= 0).all()
    else:
        assert (grad == 0).all()


def test_every_exported_loss_is_held_to_all_of_this() -> None:
    exported = {getattr(losses_package, name) for name in losses_package.__all__}
    losses = {c for c in exported if isinstance(c, type) and issubclass(c, PolicyLoss) and c is not PolicyLoss}
    assert losses == {type(case.loss) for case in CASES}


@pytest.mark.parametrize("loss_class", sorted({type(case.loss) for case in CASES}, key=lambda c: c.__name__))
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
        (lambda: DPPO(max_increase=-1.0), "max_increase"),
        (lambda: IPO(threshold=-1.0), "threshold"),
        (lambda: DPPOBinaryKL(cap=0.0), "cap"),
        (lambda: M2PO(budget=-1.0), "budget"),
        (lambda: M2POAdaptiveClip(budget=0.0), "budget"),
        (lambda: BAPO(low_step=0.0), "BAPO.low"),
        (lambda: BAPO(high_start=5.0), "BAPO.high"),
        (lambda: BAPOReleased(dual_clip=1.0), "dual_clip"),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(make: Callable[[], PolicyLoss], setting: str) -> None:
    with pytest.raises(ValueError, match=setting):
        make()


# -- identities -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "loss",
    [
        PPOClip(clip_low=math.inf, clip_high=math.inf),
        PPOClip(clip_low=math.inf, clip_high=math.inf, dual_clip=math.inf),
        MiniRL(clip_low=math.inf, clip_high=math.inf),
        OPSM(delta=math.inf, clip_low=math.inf, clip_high=math.inf),
        CISPO(clip_high=math.inf),
        DPPO(max_increase=math.inf, max_decrease=math.inf, kl_coefficient=0.0),
        IPO(threshold=math.inf, kl_coefficient=0.0),
        DPPOBinaryKL(threshold=math.inf, cap=math.inf),
        M2PO(budget=math.inf),
        M2POAdaptiveClip(budget=math.inf),
    ],
    ids=str,
)
def test_infinite_bounds_undo_clipping(loss: PolicyLoss) -> None:
    inputs = make_inputs(7, spread=2.0)
    output, grad = run(loss, inputs)
    expected = -inputs.token_weights * inputs.ratio.detach() * inputs.advantages
    assert_close(grad, torch.where(inputs.loss_mask, expected, 0.0))
    assert not output.clipped.any()


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), spread=spreads)
def test_topr_leaves_positive_completions_untouched(seed: int, spread: float) -> None:
    inputs = make_inputs(seed, spread=spread)
    (topr, topr_grad), (plain, plain_grad) = run(TOPR(), inputs), run(Reinforce(), inputs)
    positive = inputs.advantages > 0
    assert torch.equal(topr.per_token[positive], plain.per_token[positive])
    assert torch.equal(topr_grad[positive], plain_grad[positive])
    assert not topr.clipped[positive].any()
    assert (topr_grad[~positive].abs() <= plain_grad[~positive].abs() + 1e-12).all()


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), spread=spreads)
def test_mini_rl_has_the_gradient_of_ppo_clip(seed: int, spread: float) -> None:
    inputs = make_inputs(seed, spread=spread)
    assert_close(run(MiniRL(), inputs)[1], run(PPOClip(clip_low=0.2, clip_high=0.27), inputs)[1])


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), spread=spreads)
def test_gspo_and_its_token_form_agree_when_a_completion_has_one_advantage_and_weight(seed: int, spread: float) -> None:
    inputs = make_inputs(seed, spread=spread)
    inputs = replace(
        inputs,
        advantages=inputs.advantages[:, :1].expand(4, 6),
        token_weights=inputs.token_weights[:, :1].expand(4, 6),
    )
    assert_close(run(GSPO(0.1, 0.1), inputs)[1], run(GSPOToken(0.1, 0.1), inputs)[1])


@settings(max_examples=200, deadline=None)
@given(
    values=st.lists(st.floats(0, 4).map(lambda x: round(x, 1)), max_size=12),  # rounded: ties happen
    budget=st.floats(0, 2),
    data=st.data(),
)
def test_m2po_in_one_sort_drops_exactly_what_the_greedy_loop_drops(values: list, budget: float, data: Any) -> None:
    eligible = data.draw(st.lists(st.booleans(), min_size=len(values), max_size=len(values)))
    dropped = second_moment_excess(
        torch.tensor(values, dtype=torch.float64), torch.tensor(eligible, dtype=torch.bool), budget
    )
    places = [n for n, counts in enumerate(eligible) if counts]
    greedy = {places[n] for n in slow.greedy_second_moment([values[n] for n in places], budget)}
    assert set(dropped.nonzero().flatten().tolist()) == greedy


@settings(max_examples=100, deadline=None)
@given(values=st.lists(st.floats(0, 9), max_size=12), budget=st.floats(0.01, 5))
def test_water_level_caps_the_mean_at_the_budget(values: list[float], budget: float) -> None:
    level = water_level(torch.tensor(values, dtype=torch.float64), budget)
    assert level == pytest.approx(slow.water_level(values, budget), rel=1e-6)
    if level < math.inf:
        assert sum(min(value, level) for value in values) / len(values) == pytest.approx(budget)


@pytest.mark.parametrize(("loss", "bounds"), [(BAPO(), (0.9, 3.0)), (BAPOReleased(), (0.95, 2.0))])
def test_bapo_opens_fully_for_bad_completions_alone_and_stays_for_good_ones(loss: Any, bounds: tuple) -> None:
    inputs = make_inputs(8).cleaned()
    bad, good = (replace(inputs, advantages=sign * inputs.advantages.abs()) for sign in (-1, 1))
    assert loss.bounds(bad) == pytest.approx(bounds)
    assert loss.bounds(good) == (loss.low_start, loss.high_start)


def _bounds_of_rank(rank: int, port: int, results: Any) -> None:
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", world_size=2, rank=rank)
    inputs = make_inputs(9, shape=(8, 6)).cleaned()
    # the second rank has the larger part, and each would choose other bounds by itself
    part = slice(0, 3) if rank == 0 else slice(3, 8)
    inputs = LossInputs(**{name: value.detach()[part] for name, value in vars(inputs).items()})
    results[rank] = (BAPO(target_share=0.9).bounds(inputs), BAPOReleased(target_ratio=0.9).bounds(inputs))
    torch.distributed.destroy_process_group()


def test_bapo_bounds_over_two_ranks_are_those_of_one_process() -> None:
    results = torch.multiprocessing.Manager().dict()
    torch.multiprocessing.spawn(_bounds_of_rank, (free_port(), results), nprocs=2)
    inputs = make_inputs(9, shape=(8, 6)).cleaned()
    single = (BAPO(target_share=0.9).bounds(inputs), BAPOReleased(target_ratio=0.9).bounds(inputs))
    assert results[0] == results[1] == single


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
