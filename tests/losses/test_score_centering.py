"""Identities of score centering, by enumeration over the vocabulary, and in float64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import slow_references as slow
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_helpers import as_batch, assert_close, known, make_heads, make_inputs
from torch import Tensor

from lit_async_rl.losses import ImportanceWeight, LossInputs, ScoreCentering

V = 8
every_weight = pytest.mark.parametrize("weight", list(ImportanceWeight))


def logit_gradient(loss: ScoreCentering, logits: Tensor, log_q: Tensor, token: int, head: int) -> Tensor:
    """Gradient to the logits of one position whose sampled token is `token`, advantage 1."""
    logits = logits.clone().requires_grad_()
    log_p = logits.log_softmax(-1)
    best = log_q.topk(head).indices
    one = torch.ones(1, 1, dtype=torch.float64)
    inputs = LossInputs(
        logprobs=log_p[token].reshape(1, 1),
        proximal_logprobs=log_q[token].reshape(1, 1),
        behavior_logprobs=log_q[token].reshape(1, 1),
        advantages=one,
        loss_mask=one > 0,
        staleness=torch.ones(1, 1, dtype=torch.long),
        token_weights=one,
        group_index=torch.zeros(1, dtype=torch.long),
        head_logprobs=log_p[best].reshape(1, 1, head),
        head_behavior_logprobs=log_q[best].reshape(1, 1, head),
        behavior_entropy=one,
    )
    loss(inputs).per_token.sum().backward()
    assert logits.grad is not None
    return logits.grad


def distributions(seed: int, spread: float) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(V, generator=generator, dtype=torch.float64)
    return logits, (logits + spread * torch.randn(V, generator=generator, dtype=torch.float64)).log_softmax(-1)


@every_weight
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31), spread=st.sampled_from([0.1, 1.0]))
def test_gradients_to_the_recorded_tokens_equal_the_slow_reference(
    weight: ImportanceWeight, seed: int, spread: float
) -> None:
    inputs, loss = make_inputs(seed, spread=spread), ScoreCentering(weight=weight)
    head = known(inputs.head_logprobs).requires_grad_()
    (inputs.token_weights * loss(replace(inputs, head_logprobs=head)).per_token).sum().backward()
    assert_close(known(head.grad), slow.score_centering_head(as_batch(inputs), loss))


@every_weight
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31), spread=st.sampled_from([0.1, 1.0]))
def test_with_the_whole_vocabulary_the_expected_centred_score_is_zero(
    weight: ImportanceWeight, seed: int, spread: float
) -> None:
    logits, log_q = distributions(seed, spread)
    loss = ScoreCentering(weight=weight)
    expected = sum(log_q[v].exp() * logit_gradient(loss, logits, log_q, v, V) for v in range(V))
    assert_close(expected, torch.zeros(V))


@every_weight
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31), spread=st.sampled_from([0.1, 1.0]), head=st.integers(1, V - 1))
def test_it_is_zero_under_the_model_of_the_tail(weight: ImportanceWeight, seed: int, spread: float, head: int) -> None:
    """The sampler that has mu's head, and beyond it probabilities in proportion to pi's."""
    logits, log_q = distributions(seed, spread)
    p, q, best = logits.softmax(-1), log_q.exp(), log_q.topk(head).indices
    inside = torch.zeros(V, dtype=torch.bool)
    inside[best] = True
    log_q = torch.where(inside, q, p * (1 - q[inside].sum()) / (1 - p[inside].sum())).log()
    loss, found = ScoreCentering(weight=weight), torch.zeros(V, dtype=torch.float64)
    for v in range(V):
        # the head stays the same tokens, though others may have become likelier
        shown = torch.where(inside, log_q, log_q - 100)
        gradient = logit_gradient(loss, logits, shown, v, head) if inside[v] else None
        if gradient is None:
            ratio_right = log_q.clone()
            gradient = tail_gradient(loss, logits, ratio_right, v, best)
        found += log_q[v].exp() * gradient
    assert_close(found, torch.zeros(V))


def tail_gradient(loss: ScoreCentering, logits: Tensor, log_q: Tensor, token: int, best: Tensor) -> Tensor:
    logits = logits.clone().requires_grad_()
    log_p = logits.log_softmax(-1)
    centering = loss.centering(log_p[best].detach().reshape(1, 1, -1), log_q[best].reshape(1, 1, -1)).reshape(-1)
    weight = loss.weigh((log_p[token] - log_q[token]).detach())
    (-(weight * log_p[token] - (centering * log_p[best]).sum())).backward()
    assert logits.grad is not None
    return logits.grad


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), size=st.integers(1, 8))
def test_full_weights_need_no_centering(seed: int, size: int) -> None:
    log_p, log_q, _ = make_heads(seed, (3, 4), 0.7, size)
    log_q = torch.where(log_q > -math.inf, log_q, log_p)
    log_q = torch.where((log_q.exp().sum(-1, keepdim=True) < 0.999), log_q, log_q.log_softmax(-1) - 0.5)
    log_p = torch.where((log_p.exp().sum(-1, keepdim=True) < 0.999), log_p, log_p.log_softmax(-1) - 0.5)
    assert_close(ScoreCentering(weight=ImportanceWeight.FULL).centering(log_p, log_q), torch.zeros(3, 4, size))


@every_weight
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), size=st.integers(1, 7))
def test_on_policy_nothing_is_subtracted(weight: ImportanceWeight, seed: int, size: int) -> None:
    log_p, _, _ = make_heads(seed, (3, 4), 0.0, size)
    found = ScoreCentering(weight=weight).centering(log_p, log_p)
    torch.testing.assert_close(found, torch.zeros_like(found), rtol=0, atol=1e-12)


def test_without_recorded_distributions_it_is_refused_by_name() -> None:
    inputs = replace(make_inputs(0), head_logprobs=None, head_behavior_logprobs=None)
    with pytest.raises(ValueError, match=r"data\.sampling\.head"):
        ScoreCentering()(inputs)
