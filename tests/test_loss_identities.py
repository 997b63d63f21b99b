"""What losses are of each other: limits, special cases, two forms of the same."""

from __future__ import annotations

import math
import socket
from dataclasses import replace
from typing import Any

import pytest
import slow_batch_references as slow
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_helpers import assert_close, make_inputs, run

from lit_async_rl.importance import second_moment_excess
from lit_async_rl.losses import (
    BAPO,
    CISPO,
    DPPO,
    GSPO,
    IPO,
    M2PO,
    OPSM,
    TOPR,
    BAPOReleased,
    DPPOBinaryKL,
    GSPOToken,
    LossInputs,
    M2POAdaptiveClip,
    MiniRL,
    PolicyLoss,
    PPOClip,
    Reinforce,
)
from lit_async_rl.losses.trust_region import water_level

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
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
