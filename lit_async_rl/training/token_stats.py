"""Statistics of a micro-batch's tokens under a policy, as their sampler drew them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from lit_async_rl.models.policy import Compare, TokenStats
from lit_async_rl.sampler_records import known_support, log_mass
from lit_async_rl.types import RolloutBatch

Reference = Callable[..., TokenStats]  # has the signature of `CausalPolicy`, and frozen weights


def on_support(stats: TokenStats, batch: RolloutBatch) -> TokenStats:
    """Log-probabilities renormalised over the tokens that the sampler could choose from.

    A truncated sampler draws from pi restricted to a support S. At equal weights the ratio is 1 only if the trainer's
    log-probability is log pi - log pi(S), too, with pi(S) the sum of pi over S. The engine records the likeliest tokens
    H of S (`data.sampling.head`) with their probabilities q, which sum to 1 over S:

        log pi(S) = log pi(H) - log q(H)

    This is exact if all of S is recorded (q(H) is 1), and for the sampling policy (its q is pi / pi(S)), so that fresh
    data have ratios of 1 with a head of any size. Otherwise it assumes that the tokens of S outside of H have kept
    their share of S. Without truncation nothing changes. The entropy is that of the whole distribution.
    """
    if batch.head_logprobs is None or stats.head.shape[-1] == 0:
        return stats
    known = known_support(batch.head_logprobs, batch.loss_mask, batch.truncated)
    total = log_mass(stats.head, known) - log_mass(batch.head_logprobs, known)
    return dataclasses.replace(stats, logprobs=stats.logprobs - total, head=stats.head - total[..., None])


def token_stats(
    policy: Reference,
    batch: RolloutBatch,
    entropy_grad: bool = False,
    experts: Tensor | None = None,
    more_ids: Int[Tensor, "B T q"] | None = None,
    compare: Compare | None = None,
) -> TokenStats:
    """Statistics of a batch's tokens, renormalised over the sampler's support.

    Args:
        policy: that has them.
        batch: the micro-batch.
        entropy_grad: differentiate the entropy.
        experts: to replay.
        more_ids: further tokens at each position; their log-probabilities, over all tokens, become `more`.
        compare: see `CausalPolicy.forward`; also over all tokens.
    """
    known = [ids for ids in (batch.head_ids, more_ids) if ids is not None]
    comparing: dict[str, Any] = {} if compare is None else {"compare": compare}
    stats = policy(
        batch.input_ids,
        batch.loss_mask,
        batch.temperature,
        entropy_grad,
        batch.tree_groups,
        head_ids=torch.cat(known, dim=-1) if known else None,
        experts=experts,
        **comparing,
    )
    if more_ids is None:
        return on_support(stats, batch)
    width = stats.head.shape[-1] - more_ids.shape[-1]
    own = on_support(dataclasses.replace(stats, head=stats.head[..., :width]), batch)
    return dataclasses.replace(own, more=stats.head[..., width:])
