"""Heads of sampling distributions from vLLM's log-probabilities of the likeliest tokens (`logprobs=k`).

With `logprobs_mode: processed_logprobs` these are of the distribution that was sampled from: temperature and truncation
(top-k, top-p, min-p) are applied, and tokens outside of the support have -inf. vLLM returns no entropy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from lit_async_rl.sampler_head import SamplerHead

NO_PROBABILITY = -9999.0  # in place of -inf in JSON


def head_of(positions: Sequence[Iterable[tuple[int, float]]], width: int) -> SamplerHead:
    """Head of the tokens of a completion, with entropy NaN.

    Args:
        positions: for each token, the ids and log-probabilities that vLLM returned: of the likeliest tokens, and of the
            sampled one, which may be among them.
        width: entries of each token; missing ones are impossible.
    """
    ids = torch.zeros(len(positions), width, dtype=torch.int32)
    logprobs = torch.full((len(positions), width), -torch.inf)
    for row, found in enumerate(positions):
        best = sorted(dict(found).items(), key=lambda pair: -pair[1])[:width]
        if best:
            ids[row, : len(best)] = torch.tensor([token for token, _ in best])
            logprobs[row, : len(best)] = torch.tensor([value for _, value in best])
    logprobs[logprobs <= NO_PROBABILITY] = -math.inf
    return SamplerHead(torch.full((len(positions),), torch.nan), ids, logprobs)
