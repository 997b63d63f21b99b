"""Distillation of rollouts of several rows, and beside estimators that read gradients: against loops over tokens."""

from dataclasses import replace

import pytest
import torch
from agent_runs import lm
from test_distillation import Given
from test_whole_rollouts import found, gradient, make  # noqa: F401  a fixture

import lit_async_rl as rl
from lit_async_rl.baselines.optimal import Norms
from lit_async_rl.losses.distillation import divergence
from lit_async_rl.models import packing as packing_module

TREE = rl.PrefixTreePacking()


@pytest.fixture(autouse=True)
def _always_split(monkeypatch):
    """These trees are too small for attention that is split at branches."""
    monkeypatch.setattr(packing_module, "split_is_cheaper", lambda lm, spans, shape: True)


@pytest.fixture(scope="module")
def teacher():
    """The same architecture with other weights."""
    torch.manual_seed(1)
    other = lm().double()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1 + 0.3 * torch.randn_like(parameter))
    return other


def distilled(teacher, packing=None, loss=None, correction=None, baseline=None, **settings):
    distillation = rl.Distillation(teacher=Given(teacher, packing), **settings)
    module = make(loss or rl.Reinforce(), correction, baseline=baseline, packing=packing, distillation=distillation)
    module.objective.distiller.open(module.policy, torch.device("cpu"))
    return module


def slow(groups, module, teacher, of_row):
    """Mean over all tokens that train, row by row, with ordinary forward passes."""
    module.zero_grad()
    student = module.policy.causal_lm
    total = 0.0
    number = 0
    for group in groups:
        for row in (row for rollout in group.rollouts for row in rollout.rows):
            prompt = group.prompt_ids if row.prompt_ids is None else row.prompt_ids
            ids = torch.tensor([[*prompt, *row.token_ids]])
            chosen = torch.tensor(row.loss_mask)
            places = slice(len(prompt) - 1, -1)
            p = student(ids).logits[0, places].log_softmax(-1)[chosen]
            with torch.no_grad():
                q = teacher(ids).logits[0, places].log_softmax(-1)[chosen]
            sampled = torch.tensor(row.logprobs, dtype=torch.float64)[chosen]
            total = total + of_row(p, q, torch.tensor(row.token_ids)[chosen], sampled).sum()
            number += int(chosen.sum())
    (total / number).backward()
    return torch.cat([p.grad.flatten() for p in student.parameters()])


@pytest.mark.parametrize("packing", [None, TREE], ids=["rows", "tree"])
@pytest.mark.parametrize("settings", [{}, {"divergence": "jsd"}, {"gradient": "sampled"}, {"top_k": 5}], ids=str)
def test_each_token_of_a_rollout_with_branches_is_compared_once(settings, packing, found, teacher):  # noqa: F811
    module = distilled(teacher, packing, **settings)
    fast = gradient(found, module, shares_prefixes=packing is not None)

    def of_row(p, q, ids, sampled):
        if settings.get("gradient") == "sampled":
            own, others = (one.gather(-1, ids[:, None])[:, 0] for one in (p, q))
            return (own - sampled).detach().exp() * (own - others).detach() * own
        if "top_k" in settings:
            best = q.topk(5).indices
            p, q = (torch.cat([one.gather(-1, best), rest(one, best)], -1) for one in (p, q))
        return divergence(settings.get("divergence", "reverse_kl"), p, q)

    def rest(logprobs, best):
        others = logprobs.scatter(-1, best, -torch.inf)
        return others.logsumexp(-1, keepdim=True)

    expected = slow(found, module, teacher, of_row)
    assert expected.norm() > 1e-3
    assert (fast - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize(
    ("rows", "norms"),
    [("branches", Norms.SCORE), ("branches", Norms.PER_TRAJECTORY), ("single", Norms.GHOST)],
    ids=str,
)
def test_the_divergence_is_added_to_a_reward_with_the_optimal_baseline(norms, rows, found, teacher):  # noqa: F811
    """The gradient is the sum of both: the baseline's norms are of the policy gradient alone."""
    some = found if rows == "branches" else [single(group) for group in found]
    settings = dict(correction=rl.SequenceTruncatedIS(1.1), packing=TREE if rows == "branches" else None)
    shares = dict(shares_prefixes=rows == "branches")
    both = distilled(teacher, baseline=rl.OptimalBaseline(norms), with_reward=True, **settings)
    of_both = gradient(some, both, **shares)
    of_reward = gradient(some, make(rl.Reinforce(), baseline=rl.OptimalBaseline(norms), **settings), **shares)
    of_teacher = gradient(some, distilled(teacher, packing=settings["packing"]), **shares)
    assert min(of_reward.norm(), of_teacher.norm()) > 1e-3
    assert (of_both - of_reward - of_teacher).norm() <= 1e-5 * of_both.norm()


def single(group):
    return replace(group, rollouts=tuple(replace(one, branches=(), prompt_ids=None) for one in group.rollouts))
