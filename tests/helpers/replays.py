"""Reference for every engine: ordinary forward passes of transformers over the whole text."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import torch
from tiny_models import save
from transformers import DynamicCache

from lit_async_rl.engines.base import Completion, GenerationRequest, SamplingParams
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.problem import Prompt
from lit_async_rl.types import Rollout, RolloutGroup


def requests_of(sizes, max_tokens=12, num_samples=3, seed=0, first_id=0, **sampling) -> list[GenerationRequest]:
    """One request for each prompt length in `sizes`."""
    rng = random.Random(seed)
    return [
        GenerationRequest(
            id=first_id + n,
            prompt_ids=tuple(rng.randrange(2, 64) for _ in range(size)),
            num_samples=num_samples,
            sampling=SamplingParams(max_tokens=max_tokens, **sampling),
        )
        for n, size in enumerate(sizes)
    ]


@torch.no_grad()
def full_logprobs(lm, prompt_ids, completion_ids, temperature=1.0) -> torch.Tensor:
    """Log-probabilities of a completion by one ordinary forward over the whole text."""
    ids = torch.tensor([prompt_ids + completion_ids])
    log_p = (lm(input_ids=ids).logits[0].float() / temperature).log_softmax(-1)
    return log_p[len(prompt_ids) - 1 : -1].gather(-1, ids[0, len(prompt_ids) :, None])[:, 0]


@torch.no_grad()
def replayed_logprobs(lms, prompt_ids, completion: Completion) -> torch.Tensor:
    """Each token under the version it is tagged with, after the keys and values that older versions left."""
    cache = DynamicCache()
    ids = torch.tensor([prompt_ids])
    found = []
    for token, version in zip(completion.token_ids, completion.versions, strict=True):
        logits = lms[version](input_ids=ids, past_key_values=cache, use_cache=True).logits[0, -1]
        found.append(logits.float().log_softmax(-1)[token])
        ids = torch.tensor([[token]])
    return torch.stack(found)


def assert_exact(lm, requests, results, temperature=1.0) -> None:
    for request, completions in zip(requests, results, strict=True):
        assert [c.sample_index for c in completions] == list(range(request.num_samples))
        for c in completions:
            expected = full_logprobs(lm, request.prompt_ids, c.token_ids, temperature=temperature)
            torch.testing.assert_close(torch.tensor(c.logprobs), expected, atol=1e-5, rtol=0)


def own_engine(lm, tmp_path, **kwargs) -> EmbeddedEngine:
    engine = EmbeddedEngine(**{"device": "cpu", **kwargs})
    engine.setup(save(lm, tmp_path))
    engine.load_weights(0, lm.named_parameters())
    return engine


def collect(engine, num, timeout_s=60.0) -> list[Completion]:
    found = []
    deadline = time.monotonic() + timeout_s
    while len(found) < num:
        assert time.monotonic() < deadline, f"{len(found)} of {num} completions"
        found += engine.poll(1.0)
    return found


def key(completion):
    return completion.request_id, completion.sample_index


def assert_greedy(lm, requests, results) -> None:
    """Each token is the likeliest."""
    for request, completions in zip(requests, results, strict=True):
        ids = torch.tensor([request.prompt_ids + completions[0].token_ids])
        with torch.no_grad():
            best = lm(input_ids=ids).logits[0, len(request.prompt_ids) - 1 : -1].argmax(-1)
        assert all(completion.token_ids == tuple(best.tolist()) for completion in completions)


def assert_replayed(lms, requests, completions, num_tokens: int, cache_cleared: bool) -> None:
    """Each token's log-probability is that under the version it is tagged with, whatever came between its tokens.

    Keys and values are those that older versions left, or those of the tagged version throughout (`cache_cleared`).
    """
    prompts = {request.id: request.prompt_ids for request in requests}
    for c in completions:
        assert len(c.token_ids) == num_tokens
        assert list(c.versions) == sorted(c.versions)
        if cache_cleared:
            under = {v: full_logprobs(lms[v], prompts[c.request_id], c.token_ids) for v in set(c.versions)}
            expected = torch.stack([under[v][n] for n, v in enumerate(c.versions)])
        else:
            expected = replayed_logprobs(lms, prompts[c.request_id], c)
        torch.testing.assert_close(torch.tensor(c.logprobs), expected, atol=1e-5, rtol=0)


def groups_of(requests, results) -> list[RolloutGroup]:
    """The completions of each request as a group, with rewards 0, 1, ..."""
    return [
        RolloutGroup(
            index=n,
            prompt=Prompt(text="p"),
            prompt_ids=request.prompt_ids,
            rollouts=tuple(_scored(c, float(k)) for k, c in enumerate(completions)),
            admitted_version=0,
        )
        for n, (request, completions) in enumerate(zip(requests, results, strict=True))
    ]


def _scored(completion: Completion, reward: float) -> Rollout:
    """With log-probabilities as a tape keeps them, in float32."""
    return replace(completion, logprobs=tuple(torch.tensor(completion.logprobs).tolist())).scored(reward)
