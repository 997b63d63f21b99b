"""Heads from the answers of vLLM servers."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from replays import requests_of

from lit_async_rl.engines.vllm.servers.answers import completions_of
from lit_async_rl.engines.vllm.servers.schema import GENERATED, MalformedAnswer

IMPOSSIBLE = -9999.0  # JSON has no infinity


def answer(likely: list[list[tuple[int, float]]]) -> bytes:
    content: list[dict[str, Any]] = [
        {"token_id": 7, "logprob": -2.0, "top_logprobs": [{"token_id": t, "logprob": p} for t, p in found]}
        for found in likely
    ]
    logprobs = {"content": content}
    spans = [{"version": "run-3", "start": 0, "end": len(likely)}]
    choice = {"index": 0, "finish_reason": "length", "token_ids": [7] * len(likely), "logprobs": logprobs}
    return json.dumps({"choices": [choice | {"weight_versions": spans}]}).encode()


def test_the_likeliest_tokens_are_taken_without_the_sampled_one_if_that_is_not_among_them() -> None:
    (request,) = requests_of([3], num_samples=1, max_tokens=2, head=2)
    likely = [[(7, -2.0), (5, -0.5), (4, -1.5)], [(7, -2.0), (9, IMPOSSIBLE)]]
    (completion,) = completions_of(GENERATED.parse(answer(likely)), request, "run")
    assert completion.head is not None
    assert completion.head.ids.tolist() == [[5, 4], [7, 9]]
    assert completion.head.logprobs.tolist() == [[-0.5, -1.5], [-2.0, -math.inf]]
    assert torch.isnan(completion.head.entropy).all()


@pytest.mark.parametrize("likely", [[[(7, -2.0)]], [[]], [[(7, -2.0), (5, 3.0)]], [[(7, -2.0), (-5, -3.0)]]], ids=str)
def test_answers_without_the_tokens_that_were_asked_for_are_malformed(likely: list[list[tuple[int, float]]]) -> None:
    (request,) = requests_of([3], num_samples=1, max_tokens=1, head=2)
    with pytest.raises(MalformedAnswer, match=r"likely tokens|top_logprobs"):
        completions_of(GENERATED.parse(answer(likely)), request, "run")
