"""Replay of the sampler's truncated support (top-k, top-p, min-p) in the trainer's log-probabilities."""

from __future__ import annotations

import dataclasses

from lit_async_rl.models.policy import TokenStats
from lit_async_rl.sampler_head import known_support, log_mass
from lit_async_rl.types import RolloutBatch


def on_support(stats: TokenStats, batch: RolloutBatch) -> TokenStats:
    """Log-probabilities renormalised over the tokens that the sampler could choose from.

    A truncated sampler draws from pi restricted to a support S, so that the ratio of the same weights is not 1 unless
    the trainer's log-probability is log pi - log pi(S), too, with pi(S) the sum of pi over S. Recorded are the
    likeliest tokens H of S (`data.sampling.head`) with their probabilities q, which sum to 1 over S:

        log pi(S) = log pi(H) - log q(H)

    This is exact where all of S is recorded, as q(H) is then 1. Where it is not, it is exact for the policy that
    sampled, whose q is pi / pi(S), so that fresh data have ratios of 1 with a head of any size; of another policy it
    says that the tokens of S beyond H have kept their share of S. Without truncation nothing changes. The entropy
    stays that of the whole distribution.
    """
    if batch.head_logprobs is None or stats.head.shape[-1] == 0:
        return stats
    known = known_support(batch.head_logprobs, batch.loss_mask, batch.truncated)
    total = log_mass(stats.head, known) - log_mass(batch.head_logprobs, known)
    return dataclasses.replace(stats, logprobs=stats.logprobs - total, head=stats.head - total[..., None])
