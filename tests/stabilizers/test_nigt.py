"""NIGT against the formula written out; C3PO's budget and Malenia's average against counting."""

import copy
from dataclasses import replace

import pytest
import torch
from groups import group
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lit_async_rl.advantages.group import GroupMean
from lit_async_rl.data.collate import collate_step
from lit_async_rl.losses.aggregation import SequenceMean, SourceMean, TokenBudget, TokenMean
from lit_async_rl.problem import Prompt
from lit_async_rl.stabilizers.nigt import NIGT
from lit_async_rl.stabilizers.step_lr import group_settings
from lit_async_rl.training.optimizer import ConstantRate, adopt_settings


def quadratic(x):
    """Not separable, and not symmetric around the start."""
    scale = torch.arange(1, len(x) + 1, dtype=x.dtype)
    return (scale * (x - 1).square()).sum() + (x[0] * x[-1]).sin()


@pytest.mark.parametrize("eta", [1.0, 0.5, 0.1])
def test_nigt_is_the_papers_recursion(eta):
    alphas = [0.1, 0.05, 0.02, 0.2, 0.01]
    a, b = nn.Parameter(torch.zeros(2, dtype=torch.float64)), nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = NIGT([{"params": [a]}, {"params": [b]}], lr=alphas[0], eta=eta)
    theta = torch.cat([a, b]).detach()
    before, momentum = theta.clone(), None
    for alpha in alphas:
        point = (theta + (1 - eta) / eta * (theta - before)).requires_grad_()  # where the paper takes its gradient
        torch.testing.assert_close(torch.cat([a, b]).detach(), point.detach(), atol=1e-12, rtol=1e-12)
        (gradient,) = torch.autograd.grad(quadratic(point), point)
        momentum = gradient if momentum is None else (1 - eta) * momentum + eta * gradient
        before, theta = theta, theta - alpha * momentum / momentum.norm()

        for group_of_parameters in optimizer.param_groups:
            group_of_parameters["lr"] = alpha  # as a scheduler does
        optimizer.zero_grad(set_to_none=False)  # gradients stay where they are
        optimizer.step(lambda: quadratic(torch.cat([a, b])).backward())
    optimizer.swap()
    torch.testing.assert_close(torch.cat([a, b]).detach(), theta, atol=1e-12, rtol=1e-12)
    optimizer.swap()
    point = theta + (1 - eta) / eta * (theta - before)
    torch.testing.assert_close(torch.cat([a, b]).detach(), point, atol=1e-12, rtol=1e-12)


def test_each_group_of_parameters_has_its_own_settings():
    rates, etas, point = torch.tensor([0.5, 0.1]), torch.tensor([0.5, 0.2]), torch.zeros(2)
    pair = [nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()))]
    optimizer = NIGT([dict(params=pair[0], lr=0.5, eta=0.5), dict(params=pair[1], lr=0.1, eta=0.2)])
    momentum, theta = None, point
    for gradient in torch.tensor([[3.0, 4.0], [-1.0, 2.0], [0.0, 1.0]]):
        momentum = gradient if momentum is None else (1 - etas) * momentum + etas * gradient
        before, theta = theta, theta - rates * momentum / momentum.norm()
        for p, g in zip(pair, gradient, strict=True):
            p.grad = g.clone()
        optimizer.step()
        expected = theta + (1 - etas) / etas * (theta - before)
        torch.testing.assert_close(torch.stack(pair).detach(), expected)


def test_nigt_resumes_and_stays_where_there_is_no_gradient():
    def steps(model, optimizer, num):
        for _ in range(num):
            optimizer.zero_grad()
            quadratic(model.weight[0]).backward()
            optimizer.step()

    torch.manual_seed(0)
    model = nn.Linear(3, 1, bias=False)
    optimizer = NIGT(model.parameters(), lr=0.05)
    steps(model, optimizer, 3)
    weights, saved = model.weight.detach().clone(), copy.deepcopy(optimizer.state_dict())
    optimizer.zero_grad()
    optimizer.step()
    model.weight.grad = torch.zeros_like(model.weight)
    fresh = NIGT([p := nn.Parameter(torch.ones(2))], lr=1.0)
    p.grad = torch.zeros(2)
    fresh.step()
    assert torch.equal(p, torch.ones(2))
    assert torch.equal(model.weight, weights)
    other = nn.Linear(3, 1, bias=False)
    other.load_state_dict({"weight": weights})
    resumed = NIGT(other.parameters(), lr=0.05)
    resumed.load_state_dict(saved)
    model.weight.grad = None
    steps(model, optimizer, 2)
    steps(other, resumed, 2)
    assert torch.equal(model.weight, other.weight)


def test_nigt_names_its_settings():
    for settings, message in ((dict(eta=0.0), r"NIGT.eta must be in \(0, 1\], got 0"), (dict(lr=-1.0), "NIGT.lr")):
        with pytest.raises(ValueError, match=message):
            NIGT([nn.Parameter(torch.zeros(1))], **settings)


def test_the_weight_of_the_newest_gradient_is_that_of_the_resumed_run():
    """Torch restores the checkpoint's with the optimizer's state, and nothing but the rate was set again."""
    weight = nn.Parameter(torch.zeros(2))
    saved, resumed = NIGT([weight], lr=1e-3, eta=0.1), NIGT([weight], lr=1e-3, eta=0.5)
    settings = group_settings(resumed)
    resumed.load_state_dict(saved.state_dict())
    assert resumed.param_groups[0]["eta"] == 0.1
    adopt_settings(resumed, settings, ConstantRate())
    assert resumed.param_groups[0]["eta"] == 0.5
    assert group_settings(resumed) == [{"lr": 1e-3, "eta": 0.5}]


LENGTHS = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), min_size=1, max_size=5)


@given(LENGTHS, st.integers(1, 60))
def test_a_token_budget_trains_exactly_its_tokens_in_order(lengths, budget):
    groups = [group([float(n) for n in range(len(row))], row, index) for index, row in enumerate(lengths)]
    selected = TokenBudget(budget, fill=True).select(groups)
    masks = [rollout.loss_mask or (True,) * len(rollout.token_ids) for g in selected for rollout in g.rollouts]
    flat = [on for mask in masks for on in mask]
    total = sum(map(sum, lengths))
    assert flat == [n < budget for n in range(total)], "the first tokens, and no others"
    assert TokenBudget(budget).select(groups) is groups


def test_a_token_budget_keeps_baselines_and_the_weight_of_a_token():
    groups = [group([1.0, 0.0], [4, 4], 0), group([0.0, 1.0], [4, 4], 1)]
    settings = dict(advantage=GroupMean(), num_micro_batches=1, pad_token_id=0, temperature=1.0)
    (batch,) = collate_step(groups, aggregation=TokenBudget(10, fill=True), **settings)
    assert batch.loss_mask.sum(-1).tolist() == [4, 4, 2, 0]
    assert batch.token_weights.sum() == pytest.approx(1.0)
    assert batch.advantages[2].tolist() == [0.0, -0.5, -0.5, 0.0, 0.0], "the baseline knows the rollout without tokens"


def test_a_token_budget_within_sources_fills_each_of_them():
    """It had no effect there, and steps trained on all tokens."""
    groups = [
        replace(group([1.0, 0.0], [4, 4], n), prompt=Prompt(text="p", metadata={"task": name}))
        for n, name in enumerate("aba")
    ]
    settings = dict(advantage=GroupMean(), num_micro_batches=1, pad_token_id=0, temperature=1.0)
    (batch,) = collate_step(groups, aggregation=SourceMean("task", TokenBudget(10, fill=True)), **settings)
    trained = dict.fromkeys(range(3), 0)
    for index, number in zip(batch.group_index.tolist(), batch.loss_mask.sum(-1).tolist(), strict=True):
        trained[index] += number
    assert trained == {0: 8, 1: 8, 2: 2}
    assert batch.token_weights.sum() == pytest.approx((1.0 + 0.8) / 2)


@given(LENGTHS, st.data())
def test_malenia_gives_every_source_the_same_weight(lengths, data):
    names = [data.draw(st.sampled_from("abc")) for _ in lengths]
    groups = [
        replace(group([0.0] * len(row), row, n), prompt=Prompt(text="p", metadata={"task": name}))
        for n, (row, name) in enumerate(zip(lengths, names, strict=True))
    ]
    for inner in (SequenceMean(), TokenMean()):
        found = iter(SourceMean("task", inner).of_step(groups))
        weights = [[next(found) for _ in row] for row in lengths]
        for name in set(names):
            members = [n for n, other in enumerate(names) if other == name]
            alone = iter(inner([n for m in members for n in lengths[m]], [len(lengths[m]) for m in members]))
            for m in members:
                assert weights[m] == pytest.approx([next(alone) / len(set(names)) for _ in lengths[m]])
    with pytest.raises(ValueError, match=r"SourceMean.key='kind' is missing in the metadata.*\['task'\]"):
        SourceMean("kind").of_step(groups)
