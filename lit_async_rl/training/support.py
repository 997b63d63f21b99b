"""Replay of the sampler's truncated support (top-k, top-p, min-p) in the trainer's log-probabilities."""

from __future__ import annotations

import dataclasses

from lit_async_rl.models.policy import TokenStats
from lit_async_rl.sampler_head import known_support, log_mass
from lit_async_rl.types import RolloutBatch


def on_support(stats: TokenStats, batch: RolloutBatch) -> TokenStats:
    """Log-probabilities renormalised over the tokens that the sampler could choose from.

    A truncated sampler draws from pi restricted to a support S, so that the ratio of the same weights is not 1 unless
    the trainer's log-probability is log pi - log sum over S of pi, too. S is known where it is smaller than the
    recorded head (`data.sampling.head`); elsewhere, and without truncation, nothing changes. The entropy stays that of
    the whole distribution.
    """
    if batch.head_logprobs is None or stats.head.shape[-1] == 0:
        return stats
    total = log_mass(stats.head, known_support(batch.head_logprobs, batch.loss_mask))
    return dataclasses.replace(stats, logprobs=stats.logprobs - total, head=stats.head - total[..., None])
