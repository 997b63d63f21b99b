"""What losses are of each other: limits, special cases, two forms of the same."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import slow_batch_references as slow
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_helpers import as_batch, assert_close, make_inputs, run
from test_losses import CASES, Case

from lit_async_rl.corrections import SecondMomentMask
from lit_async_rl.importance import second_moment_excess
from lit_async_rl.losses import (
    BAPO,
    CISPO,
    DPPO,
    ESTR,
    GSPO,
    IPO,
    M2PO,
    OAPL,
    OPSM,
    PNPO,
    SAT,
    TOPR,
    BAPOReleased,
    DPPOBinaryKL,
    GSPOToken,
    KimiRegression,
    LossInputs,
    LossOutput,
    M2POAdaptiveClip,
    MiniRL,
    MinPRO,
    PolicyLoss,
    PPOClip,
    Reinforce,
    TrajectoryBalance,
)
from lit_async_rl.losses.trust_region import binary_kl, water_level
from lit_async_rl.runtime.ports import free_port

spreads = st.sampled_from([0.001, 0.1, 0.5, 2.0])


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
        ESTR(tau=math.inf, clip_low=math.inf, clip_high=math.inf),
        SAT(clip_low=math.inf, clip_high=math.inf),
    ],
    ids=str,
)
def test_infinite_bounds_undo_clipping(loss: PolicyLoss) -> None:
    inputs = make_inputs(7, spread=2.0)
    output, grad = run(loss, inputs)
    expected = -inputs.token_weights * inputs.ratio.detach() * inputs.advantages
    assert_close(grad, torch.where(inputs.loss_mask, expected, 0.0))
    assert not output.clipped.any()
    bounded, bounded_grad = run(type(loss)(), inputs)
    assert bounded.clipped.any(), "there was nothing to undo"
    assert not torch.equal(bounded_grad, grad)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), spread=spreads)
def test_estr_without_a_bound_is_ppo_clip(seed: int, spread: float) -> None:
    inputs = make_inputs(seed, spread=spread)
    (estr, estr_grad), (ppo, ppo_grad) = run(ESTR(tau=math.inf), inputs), run(PPOClip(), inputs)
    assert torch.equal(estr.per_token, ppo.per_token)
    assert torch.equal(estr_grad, ppo_grad)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), spread=spreads)
def test_sat_without_a_stale_tail_is_ppo_clip(seed: int, spread: float) -> None:
    inputs = make_inputs(seed, spread=spread)
    (sat, sat_grad), (ppo, ppo_grad) = run(SAT(quantile=1.0), inputs), run(PPOClip(), inputs)
    assert torch.equal(sat.per_token, ppo.per_token)
    assert torch.equal(sat_grad, ppo_grad)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), spread=spreads)
def test_prefix_ratios_of_completions_of_one_token_are_token_ratios(seed: int, spread: float) -> None:
    inputs = make_inputs(seed, (4, 1), spread)
    for prefix, token in ((PNPO(), PPOClip()), (MinPRO(cap=2.0), CISPO(clip_high=1.0))):
        (_, prefix_grad), (_, token_grad) = run(prefix, inputs), run(token, inputs)
        assert_close(prefix_grad, token_grad)


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
    _, free_grad = run(TOPR(negative_low=0.0, negative_high=math.inf), inputs)
    trains = inputs.loss_mask & (inputs.advantages < 0)
    rounding = torch.exp(1e-4 * inputs.loss_mask.sum(-1, keepdim=True))
    assert torch.equal(topr.clipped & trains, (free_grad.abs() > topr_grad.abs() * rounding) & trains)


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


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**31), target=st.floats(0.1, 1.5))
def test_bapo_bounds_are_those_of_the_loop_that_computes_every_sum_anew(seed: int, target: float) -> None:
    inputs = make_inputs(seed, spread=1.0)
    inputs = replace(inputs, behavior_logprobs=3 * inputs.behavior_logprobs)  # so that mu matters
    coarse = dict(low_start=0.5, low_stop=0.9, low_step=0.3, high_start=1.1, high_stop=1.6, high_step=0.4)
    for paper, released in (
        (BAPO(target_share=target), BAPOReleased(target_ratio=target)),
        (BAPO(target_share=target, **coarse), BAPOReleased(target_ratio=target, **coarse)),
    ):
        _assert_same_bounds(inputs, paper, released)


def _assert_same_bounds(inputs: LossInputs, paper: BAPO, released: BAPOReleased) -> None:
    assert paper.bounds(inputs.cleaned()) == pytest.approx(slow.bapo_bounds(as_batch(inputs), paper))
    assert released.bounds(inputs.cleaned()) == pytest.approx(slow.bapo_released_bounds(as_batch(inputs), released))


UNEVEN = dict(low_start=0.6, low_stop=0.95, low_step=0.1, high_start=1.2, high_stop=2.05, high_step=0.3)


@pytest.mark.parametrize(
    ("loss", "bounds"),
    [
        (BAPO(), (0.9, 3.0)),
        (BAPOReleased(), (0.95, 2.0)),
        (BAPO(**UNEVEN), (0.95, 2.05)),  # steps that do not divide the range
        (BAPOReleased(**UNEVEN), (0.95, 2.05)),
        (BAPOReleased(low_stop=0.8, high_stop=1.2), (0.8, 1.2)),
    ],
)
def test_bapo_opens_fully_for_bad_completions_alone_and_stays_for_good_ones(loss: Any, bounds: tuple) -> None:
    inputs = make_inputs(8).cleaned()
    bad, good = (replace(inputs, advantages=sign * inputs.advantages.abs()) for sign in (-1, 1))
    assert loss.bounds(bad) == bounds
    assert loss.bounds(good) == (loss.low_start, loss.high_start)


def _bounds_of_rank(rank: int, port: int, results: Any) -> None:
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", world_size=2, rank=rank)
    inputs = make_inputs(9, shape=(8, 6)).cleaned()
    # the second rank has the larger part, and each would choose other bounds by itself
    part = slice(0, 3) if rank == 0 else slice(3, 8)
    inputs = LossInputs(**{name: value.detach()[part] for name, value in vars(inputs).items()})
    results[rank] = (BAPO(target_share=0.9).bounds(inputs), BAPOReleased(target_ratio=0.9).bounds(inputs))
    results[rank, "tokens"] = statistics_of(inputs)
    torch.distributed.destroy_process_group()


def statistics_of(inputs: LossInputs) -> list[Any]:
    """What parts with a statistic over the micro-batch do to each completion."""
    drift, mask = inputs.log_ratio.detach(), inputs.loss_mask
    found = [SAT(quantile=0.6).shrinkage(inputs), SecondMomentMask(0.01).weigh(drift, mask).rejected.float()]
    found += [loss.token_loss(inputs).per_token for loss in (M2PO(budget=0.01), M2POAdaptiveClip(budget=0.001))]
    return torch.stack(found, 1).detach().tolist()


@pytest.mark.slow
def test_statistics_over_two_ranks_are_those_of_one_process() -> None:
    results = torch.multiprocessing.Manager().dict()
    torch.multiprocessing.spawn(_bounds_of_rank, (free_port(), results), nprocs=2)
    inputs = make_inputs(9, shape=(8, 6)).cleaned()
    single = (BAPO(target_share=0.9).bounds(inputs), BAPOReleased(target_ratio=0.9).bounds(inputs))
    assert results[0] == results[1] == single
    torch.testing.assert_close(
        torch.tensor(results[0, "tokens"] + results[1, "tokens"]), torch.tensor(statistics_of(inputs))
    )


def test_binary_kl_is_that_of_two_coins_and_finite_for_certain_tokens() -> None:
    p, q = torch.tensor([0.3, 0.9, 1.0, 1.0, 0.5]), torch.tensor([0.6, 0.9, 1.0, 0.5, 1.0])
    exact = torch.distributions.kl_divergence(
        torch.distributions.Bernoulli(p[:4]), torch.distributions.Bernoulli(q[:4])
    )
    divergence = binary_kl(p.log(), q.log())
    torch.testing.assert_close(divergence[:4], exact, rtol=1e-4, atol=1e-6)
    assert divergence.isfinite().all()


class _Careless(PolicyLoss):
    """What a newcomer may write: its value depends on nothing that is 0 at masked tokens."""

    def token_loss(self, inputs: LossInputs) -> LossOutput:
        return LossOutput(per_token=1 + inputs.logprobs, clipped=torch.ones_like(inputs.loss_mask))


def test_a_loss_that_forgets_the_mask_is_masked_all_the_same() -> None:
    inputs = make_inputs(10)
    output, grad = run(_Careless(), inputs)
    for values in (output.per_token, grad, output.clipped):
        assert (values[~inputs.loss_mask] == 0).all()
        assert (values[inputs.loss_mask] != 0).all()


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.loss))
def test_zero_advantages_move_nothing_but_a_pull_to_the_proximal_logprobs(case: Case) -> None:
    inputs = make_inputs(6)
    inputs = replace(inputs, advantages=torch.zeros_like(inputs.advantages))
    _, grad = run(case.loss, inputs)
    if isinstance(case.loss, TrajectoryBalance | OAPL):  # of completions: tested in test_trajectory_losses
        return
    if isinstance(case.loss, DPPO | IPO | KimiRegression):  # these have one; it points back
        assert (grad * inputs.log_ratio.detach() >= 0).all()
    else:
        assert (grad == 0).all()
