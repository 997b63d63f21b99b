"""Prompts are read by kernels that hold no scores, in parts of bounded size."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from replays import assert_exact, requests_of
from tiny_models import tiny_gpt2, tiny_llama

from lit_async_rl.engines.embedded import forward, slots
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.engines.embedded.forward import CachedForward
from lit_async_rl.engines.embedded.slots import prefill_parts

MAX_TOKENS = 60


@pytest.fixture
def calls(monkeypatch):
    """(has a mask, shares keys between heads, is causal, number of queries) of each attention."""
    found = []
    attention = F.scaled_dot_product_attention

    def recorded(query, key, value, attn_mask=None, **kwargs):
        heads = (query.shape[1], key.shape[1])
        found.append((attn_mask is not None, heads, kwargs.get("is_causal", False), kwargs.get("enable_gqa", False)))
        return attention(query, key, value, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", recorded)
    return found


@pytest.mark.parametrize("takes_groups", [True, False], ids=["groups of heads", "repeated heads"])
def test_no_attention_of_a_prompt_has_a_mask_and_groups_of_heads(takes_groups, calls, monkeypatch):
    lm = tiny_llama()
    assert lm.config.num_attention_heads > lm.config.num_key_value_heads
    if not takes_groups:  # as on CUDA in float32
        monkeypatch.setattr(forward, "_takes_groups", lambda x: False)
    requests = requests_of([9, 4, 1], max_tokens=6, num_samples=2)
    engine = EmbeddedEngine.from_module(lm, num_slots=8, self_check=False)
    results = engine.run(requests)
    assert calls
    for has_mask, (queries, keys), is_causal, has_groups in calls:
        assert is_causal
        assert not has_mask
        assert has_groups == takes_groups
        assert takes_groups or queries == keys
    assert_exact(lm, requests, results)


def test_parts_are_bounded_and_hold_every_prompt_once(monkeypatch):
    monkeypatch.setattr(slots, "MAX_PREFILL_TOKENS", MAX_TOKENS)
    prompts = [tuple(range(n, n + size)) for n, size in enumerate([3, 70, 25, 30, 2, 8, 61, 20, 20, 1])]
    parts = prefill_parts(prompts)
    assert sorted(prompt for part in parts for prompt in part) == sorted(prompts)
    for part in parts:
        assert len(part) * max(map(len, part)) <= MAX_TOKENS or len(part) == 1
    few = prompts[4:6]
    assert prefill_parts(few) == [few]  # in their order


@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2], ids=["llama", "gpt2"])
def test_completions_of_prompts_read_in_parts_are_exact(make, monkeypatch):
    monkeypatch.setattr(slots, "MAX_PREFILL_TOKENS", MAX_TOKENS)
    shapes = []
    call = CachedForward.__call__
    monkeypatch.setattr(
        CachedForward, "__call__", lambda self, *args: shapes.append(args[0].shape) or call(self, *args)
    )
    lm = make()
    requests = requests_of([20, 3, 40, 17, 8, 30], max_tokens=5, num_samples=3)
    requests += [dataclasses.replace(requests[1], id=len(requests), num_samples=1)]  # the same prompt once more
    assert_exact(lm, requests, EmbeddedEngine.from_module(lm, num_slots=32, self_check=False).run(requests))
    prefills = [shape for shape in shapes if shape[1] > 1]
    assert len(prefills) > 2
    assert sum(shape[0] for shape in prefills) == 6
    assert all(shape.numel() <= MAX_TOKENS for shape in prefills)


def test_resumed_completions_are_read_in_parts(monkeypatch):
    monkeypatch.setattr(slots, "MAX_PREFILL_TOKENS", MAX_TOKENS)
    lm = tiny_llama()
    lm.generation_config.eos_token_id = []
    first = requests_of([9, 4], max_tokens=30, num_samples=3)
    engine = EmbeddedEngine.from_module(lm, num_slots=8, self_check=False)
    engine.submit(first)
    for _ in range(12):
        engine.poll(0.0)
    partial = engine.partial_completions()
    engine.abort([0, 1])
    assert len(partial) == 6
    prompt_of = {request.id: request.prompt_ids for request in first}
    resumed = [
        dataclasses.replace(
            first[0],
            id=10 + n,
            prompt_ids=prompt_of[c.request_id] + c.token_ids,
            num_samples=1,
        )
        for n, c in enumerate(partial)
    ]
    assert_exact(lm, resumed, engine.run(resumed))


def test_rows_that_end_with_their_first_token_leave_the_other_parts_alone(monkeypatch):
    monkeypatch.setattr(slots, "MAX_PREFILL_TOKENS", MAX_TOKENS)
    lm = tiny_llama()
    requests = requests_of([40, 30, 20, 10], max_tokens=1, num_samples=2)
    results = EmbeddedEngine.from_module(lm, num_slots=16, self_check=False).run(requests)
    assert_exact(lm, requests, results)
    assert torch.tensor([len(c.token_ids) for group in results for c in group]).eq(1).all()
