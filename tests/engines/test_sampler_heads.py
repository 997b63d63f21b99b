"""Recorded sampling distributions: what the engine records, and supports that are replayed by the trainer."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hostile_engines import changed
from replays import groups_of, requests_of
from tiny_models import tiny_llama

from lit_async_rl.advantages.group import GroupMean
from lit_async_rl.data.collate import collate_step
from lit_async_rl.engines.base import Completion, SamplingParams
from lit_async_rl.engines.completion_check import find_fault
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.losses.aggregation import TokenMean
from lit_async_rl.models.policy import CausalPolicy
from lit_async_rl.problem import Prompt
from lit_async_rl.replay.tape import from_rows, to_row
from lit_async_rl.rollouts.group_book import GroupEntry, pack_groups, unpack_groups
from lit_async_rl.sampler_records import SamplerHead, blank_head, join_heads
from lit_async_rl.training.token_stats import on_support
from lit_async_rl.types import RolloutBatch

WIDTH = 12


def sampled(lm, head=WIDTH, **sampling) -> tuple[list, list[list[Completion]]]:
    requests = requests_of([5, 2, 9], num_samples=3, max_tokens=14, head=head, **sampling)
    return requests, EmbeddedEngine.from_module(lm, num_slots=4).run(requests)


def head_of(completion: Completion) -> SamplerHead:
    assert completion.head is not None
    return completion.head


def test_the_head_is_that_of_the_distribution_each_token_was_sampled_from():
    lm = tiny_llama()
    requests, results = sampled(lm, temperature=0.8)
    for request, completions in zip(requests, results, strict=True):
        for completion in completions:
            ids = torch.tensor([request.prompt_ids + completion.token_ids])
            with torch.no_grad():
                log_p = (lm(input_ids=ids).logits[0, len(request.prompt_ids) - 1 : -1] / 0.8).log_softmax(-1)
            best, head = log_p.topk(WIDTH), head_of(completion)
            torch.testing.assert_close(head.logprobs, best.values, rtol=0, atol=1e-5)
            torch.testing.assert_close(head.entropy, -(log_p.exp() * log_p).sum(-1), rtol=0, atol=1e-5)
            torch.testing.assert_close(log_p.gather(-1, head.ids.long()), head.logprobs, rtol=0, atol=1e-5)


def test_recording_changes_no_token():
    lm = tiny_llama()
    _, recorded = sampled(lm)
    plain = requests_of([5, 2, 9], num_samples=3, max_tokens=14)
    for rows, others in zip(recorded, EmbeddedEngine.from_module(lm, num_slots=4).run(plain), strict=True):
        assert [replace(row, head=None) for row in rows] == list(others)


@pytest.mark.parametrize(
    "truncation", [{"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.2}, {"top_k": 9, "top_p": 0.7, "temperature": 1.3}]
)
def test_ratios_of_fresh_data_are_one_on_the_recorded_support(truncation):
    lm = tiny_llama()
    policy = CausalPolicy(lm)
    requests, results = sampled(lm, head=60, **truncation)
    (batch,) = collate_step(
        groups_of(requests, results),
        advantage=GroupMean(),
        aggregation=TokenMean(),
        num_micro_batches=1,
        pad_token_id=0,
        temperature=truncation.get("temperature", 1.0),
    )
    plain, replayed = statistics(policy, batch)
    mask = batch.loss_mask
    error = (replayed.logprobs - batch.behavior_logprobs)[mask].abs()
    assert (plain.logprobs - batch.behavior_logprobs)[mask].abs().max() > 0.1
    whole = (batch.head_logprobs == -math.inf).any(-1)[mask]  # the support is smaller than the head
    assert whole.float().mean() > 0.9
    assert error[whole].max() < 1e-5


def test_without_truncation_the_support_is_everything():
    lm = tiny_llama()
    requests, results = sampled(lm)
    settings = dict(advantage=GroupMean(), aggregation=TokenMean(), num_micro_batches=1, pad_token_id=0)
    (batch,) = collate_step(groups_of(requests, results), **settings, temperature=1.0)
    plain, replayed = statistics(CausalPolicy(lm), batch)
    assert torch.equal(plain.logprobs, replayed.logprobs)


def test_gradients_through_the_support_are_finite_and_those_of_the_restricted_softmax():
    lm = tiny_llama()
    policy = CausalPolicy(lm)
    requests, results = sampled(lm, top_k=5)
    settings = dict(advantage=GroupMean(), aggregation=TokenMean(), num_micro_batches=1, pad_token_id=0)
    (batch,) = collate_step(groups_of(requests, results), **settings, temperature=1.0)
    stats = on_support(policy(batch.input_ids, batch.loss_mask, head_ids=batch.head_ids), batch)
    weights = torch.linspace(-1, 1, batch.loss_mask.numel()).reshape(batch.loss_mask.shape)
    (weights * stats.logprobs).sum().backward()
    found = lm.get_output_embeddings().weight.grad.clone()
    lm.zero_grad()
    logits = lm(input_ids=batch.input_ids).logits[:, :-1]
    allowed = torch.zeros_like(logits, dtype=torch.bool)
    ids, possible = batch.head_ids[:, 1:], batch.head_logprobs[:, 1:] > -math.inf
    allowed.scatter_(-1, ids, possible)
    log_p = logits.masked_fill(~allowed & allowed.any(-1, keepdim=True), -math.inf).log_softmax(-1)
    picked = log_p.gather(-1, batch.input_ids[:, 1:, None])[..., 0]
    torch.where(batch.loss_mask[:, 1:], weights[:, 1:] * picked, 0.0).sum().backward()
    torch.testing.assert_close(found, lm.get_output_embeddings().weight.grad, rtol=1e-4, atol=1e-5)


def test_heads_survive_checkpoints_and_tapes():
    requests, results = sampled(tiny_llama(), top_k=5)
    rows = [results[0][0].scored(1.0), replace(results[0][1], head=None), results[0][2]]
    prompt = Prompt(text="p")
    saved = GroupEntry(index=0, position=0, prompt=prompt, prompt_ids=(1,), version=0, rollouts=dict(enumerate(rows)))
    (restored,) = unpack_groups(pack_groups([saved]), lambda _: prompt)
    assert [row.head for row in restored.rollouts.values()] == [row.head for row in rows]
    (group, *_) = groups_of(requests, results)
    recorded = [to_row(group, n) for n in range(len(group.rollouts))]
    assert from_rows(recorded).rollouts == group.rollouts


def test_parts_of_one_completion_are_joined():
    (completion, *_), *_ = sampled(tiny_llama())[1]
    head = head_of(completion)
    tool = blank_head(3, WIDTH)
    joined = join_heads([head, tool])
    assert len(joined) == len(head) + 3
    assert SamplerHead(*(values[:-3] for values in joined.tensors)) == head
    assert (joined.logprobs[-3:] == -math.inf).all()


def test_a_wrong_head_is_the_engines_fault():
    requests, results = sampled(tiny_llama())
    completion, head = results[0][0], head_of(results[0][0])
    checks = dict(versions=(None, None), vocab_size=64, max_model_len=64, scores=False, is_partial=False)
    assert find_fault(completion, requests[0], **checks) == ""
    unlikely = SamplerHead(head.entropy, head.ids + 64, head.logprobs)
    positive = SamplerHead(head.entropy, head.ids, head.logprobs + 50)
    for broken in (
        None,
        SamplerHead(*(values[:1] for values in head.tensors)),
        unlikely,
        positive,
        SamplerHead(head.entropy, head.ids[:, :3], head.logprobs[:, :3]),
    ):
        assert "head" in find_fault(replace(completion, head=broken), requests[0], **checks)
    for broken in (head.tensors, "no head", 7):
        (wrong,) = changed(head=broken)(completion)
        assert "must be a SamplerHead" in find_fault(wrong, requests[0], **checks)
    not_asked = replace(requests[0], sampling=SamplingParams(max_tokens=14))
    assert "head" in find_fault(completion, not_asked, **checks)


def statistics(policy: CausalPolicy, batch: RolloutBatch):
    with torch.no_grad():
        plain = policy(batch.input_ids, batch.loss_mask, batch.temperature, head_ids=batch.head_ids)
    return plain, on_support(plain, batch)
