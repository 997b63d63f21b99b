"""Replayed supports against a reference written as loops, in float64."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lit_async_rl.models.policy import TokenStats
from lit_async_rl.training.token_stats import on_support
from lit_async_rl.types import RolloutBatch

B, T, V, K = 2, 3, 7, 5


def recorded(log_q: Tensor, mask: Tensor) -> RolloutBatch:
    zeros, ids = torch.zeros(B, T, dtype=torch.float64), torch.zeros(B, T, dtype=torch.long)
    tokens = dict(input_ids=ids, versions=ids, behavior_logprobs=zeros, advantages=zeros, token_weights=zeros)
    rows = dict(rewards=zeros[:, 0], group_index=ids[:, 0])
    return RolloutBatch(**tokens, **rows, attention_mask=mask, loss_mask=mask, head_logprobs=log_q)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sampler(logits: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Ids and log-probabilities of the K likeliest tokens of the softmax over the `sizes` largest logits."""
    rank = logits.argsort(-1, descending=True).argsort(-1)
    best = logits.masked_fill(rank >= sizes[..., None], -math.inf).log_softmax(-1).topk(K)
    return best.indices, best.values


def statistics(logits: Tensor, tokens: Tensor, ids: Tensor) -> TokenStats:
    log_p = logits.log_softmax(-1)
    picked = log_p.gather(-1, tokens[..., None])[..., 0]
    return TokenStats(logprobs=picked, entropy=torch.zeros_like(picked), head=log_p.gather(-1, ids))


def slow(logits: list[float], token: int, support: set[int] | None) -> tuple[float, list[float]]:
    """log of p_token / sum over the support of p, and its gradient to the logits."""
    places = range(len(logits)) if support is None else sorted(support)
    total = math.fsum(math.exp(logits[v]) for v in places)
    shares = {v: math.exp(logits[v]) / total for v in places}
    gradient = [float(v == token) - shares.get(v, 0.0) for v in range(len(logits))]
    return logits[token] - math.log(total), gradient


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_values_and_gradients_equal_the_slow_reference(seed: int) -> None:
    sampled_from, logits = normal(seed, B, T, V), normal(seed + 1, B, T, V).requires_grad_()
    sizes = torch.randint(1, V + 1, (B, T), generator=torch.Generator().manual_seed(seed))  # 5 to 7: not known to end
    ids, log_q = sampler(sampled_from, sizes)
    tokens = ids[..., 0]
    mask = torch.rand(B, T, generator=torch.Generator().manual_seed(seed)) < 0.8
    stats = on_support(statistics(logits, tokens, ids), recorded(log_q, mask))
    cotangent = normal(seed + 2, B, T)
    (cotangent * stats.logprobs).sum().backward()
    assert logits.grad is not None
    for b in range(B):
        for t in range(T):
            ends = mask[b, t] and sizes[b, t] < K
            support = {int(v) for v in ids[b, t, : int(sizes[b, t])]} if ends else None
            value, gradient = slow(logits[b, t].tolist(), int(tokens[b, t]), support)
            assert math.isclose(float(stats.logprobs[b, t].detach()), value, rel_tol=1e-9, abs_tol=1e-9)
            expected = cotangent[b, t] * torch.tensor(gradient, dtype=torch.float64)
            torch.testing.assert_close(logits.grad[b, t], expected, rtol=1e-9, atol=1e-9)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_ratios_of_fresh_data_are_one(seed: int) -> None:
    logits = normal(seed, B, T, V)
    sizes = torch.randint(1, K, (B, T), generator=torch.Generator().manual_seed(seed))
    ids, log_q = sampler(logits, sizes)
    mask = torch.ones(B, T, dtype=torch.bool)
    stats = on_support(statistics(logits, ids[..., 0], ids), recorded(log_q, mask))
    ratios = (stats.logprobs - log_q[..., 0]).exp()
    torch.testing.assert_close(ratios, torch.ones_like(ratios), rtol=0, atol=1e-12)
