"""Importance ratios and distances between two policies, from log-ratios of sampled tokens.

B rollouts, T positions. `log_ratio` is log pi - log mu of each token, `mask` is True where a token counts; what stands
elsewhere never matters, NaN included.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def masked(values: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """`values` where `mask`, exactly 0 (in the gradient too) elsewhere."""
    return torch.where(mask, values, 0.0)


def sequence_log_ratio(log_ratio: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, " B"]:
    """log w_i = sum over tokens of log pi - log mu: the ratio of whole completions."""
    return masked(log_ratio, mask).sum(-1)


def geometric_log_ratio(log_ratio: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, " B"]:
    """log s_i = (log w_i) / L_i: the mean over tokens; 0 for a completion without tokens."""
    return sequence_log_ratio(log_ratio, mask) / mask.sum(-1).clamp(min=1)


def effective_sample_size(log_weights: Float[Tensor, " B"]) -> Float[Tensor, ""]:
    """Kish's (sum w)^2 / sum w^2, between 1 and B; in log space, so that no weight overflows."""
    log_weights = log_weights.double()
    return (2 * log_weights.logsumexp(0) - (2 * log_weights).logsumexp(0)).exp().to(torch.float32)


def ess_ratio(log_weights: Float[Tensor, " B"]) -> Float[Tensor, ""]:
    """Effective sample size as a share of the sample, between 1/B and 1 (VCPO, arXiv:2602.17616, and others)."""
    return effective_sample_size(log_weights) / log_weights.numel()


def kl_k1(log_ratio: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """-log r: unbiased for KL(mu || pi) under samples of mu, of either sign. Schulman 2020, "Approximating KL"."""
    return -log_ratio


def kl_k2(log_ratio: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """(log r)^2 / 2: biased, never negative, low variance. Schulman 2020, "Approximating KL divergence"."""
    return log_ratio.square() / 2


def kl_k3(log_ratio: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """r - 1 - log r: unbiased for KL(mu || pi) under samples of mu, never negative. Schulman 2020."""
    return torch.expm1(log_ratio) - log_ratio
