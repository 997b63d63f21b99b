"""Importance ratios and divergences between two policies, from log-ratios of sampled tokens.

B rollouts, T positions. `log_ratio` is log pi - log mu of each token sampled from mu, `mask` is True where a token
counts; values elsewhere are ignored, NaN included.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Float64, Num
from torch import Tensor

# e^20 squared, summed over a million tokens, is still a float32; a ratio beyond carries no information any more
MAX_LOG_RATIO = 20.0


def masked(values: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Returns `values` where `mask`, and 0 with zero gradient elsewhere."""
    return torch.where(mask, values, 0.0)


def masked_quantiles(
    values: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"], probabilities: Sequence[float]
) -> Float[Tensor, " Q"]:
    """Quantiles (nearest lower rank) of the values in `mask`; zeros if there are none.

    Sorts, because `torch.quantile` refuses more than 16M values.
    """
    chosen = values[mask].sort().values
    if chosen.numel() == 0:
        return values.new_zeros(len(probabilities))
    ranks = [int(p * (chosen.numel() - 1)) for p in probabilities]
    return chosen[torch.tensor(ranks, dtype=torch.long, device=values.device)]


def safe_exp(log_ratio: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Ratio exp(log_ratio) with the log-ratio clamped to ±`MAX_LOG_RATIO`; the gradient is 0 beyond."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def sequence_log_ratio(log_ratio: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, " B"]:
    """Log-ratio of whole completions: log w_i = sum over tokens of log pi - log mu."""
    return masked(log_ratio, mask).sum(-1)


def geometric_log_ratio(log_ratio: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, " B"]:
    """Length-normalised log-ratio of completions: log s_i = (log w_i) / L_i; 0 for a completion without tokens."""
    return sequence_log_ratio(log_ratio, mask) / mask.sum(-1).clamp(min=1)


def weight_sums(log_weights: Float64[Tensor, " B"]) -> Float64[Tensor, "3"]:
    """Maximum M of the log-weights l, sum of exp(l - M), and sum of its squares; NaN and -inf are weight 0."""
    if log_weights.numel() == 0:
        return log_weights.new_tensor([-torch.inf, 0.0, 0.0])
    largest = torch.finfo(torch.float64).max / 4
    log_weights = log_weights.nan_to_num(nan=-torch.inf, posinf=largest, neginf=-torch.inf)
    top = log_weights.max()
    weights = torch.where(top > -torch.inf, (log_weights - top).exp(), 0.0)
    return torch.stack([top, weights.sum(), weights.square().sum()])


def ess_of_sums(sums: Float64[Tensor, "R 3"]) -> Float64[Tensor, ""]:
    """Kish's effective sample size (sum w)^2 / sum w^2 from `weight_sums` of R parts (ranks); 0 without any weight.

    Combines the parts in log space, so no weight overflows.
    """
    top = sums[:, 0].max()
    shift = torch.where(sums[:, 0] > -torch.inf, (sums[:, 0] - top).exp(), 0.0)
    weights = (sums[:, 1] * shift).sum()
    squares = (sums[:, 2] * shift.square()).sum()
    return torch.where(squares > 0, weights.square() / squares, 0.0)


def effective_sample_size(log_weights: Float[Tensor, " B"]) -> Float[Tensor, ""]:
    """Kish's effective sample size (sum w)^2 / sum w^2, between 1 and B; 0 if none is positive. NaN counts as 0."""
    size = ess_of_sums(weight_sums(log_weights.double())[None])
    return torch.where(size > 0, size.clamp(1, max(log_weights.numel(), 1)), 0.0).float()


def ess_ratio(log_weights: Float[Tensor, " B"]) -> Float[Tensor, ""]:
    """Effective sample size as a share of the sample, between 1/B and 1.

    VCPO (arXiv:2602.17616) takes it of raw sequence weights over all trajectories of an optimizer step; PipelineRL
    (arXiv:2509.19128) of token weights. The two are not comparable; the argument decides which it is.
    """
    return effective_sample_size(log_weights) / max(log_weights.numel(), 1)


def kl_k1(log_ratio: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Estimate -log r: unbiased for KL(mu || pi) under samples of mu, of either sign. Schulman 2020."""
    return -log_ratio


def kl_k2(log_ratio: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Estimate (log r)^2 / 2: biased, never negative, low variance. Schulman 2020, "Approximating KL divergence"."""
    return log_ratio.square() / 2


def kl_k3(log_ratio: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Estimate r - 1 - log r: unbiased for KL(mu || pi) under samples of mu, never negative. Schulman 2020.

    Beyond log r = 20, r continues as its tangent, so that values are finite and gradients keep their sign.
    """
    excess = (log_ratio - MAX_LOG_RATIO).clamp(min=0.0)
    return torch.expm1(log_ratio.clamp(max=MAX_LOG_RATIO)) + math.exp(MAX_LOG_RATIO) * excess - log_ratio


def second_moment_excess(
    squares: Float[Tensor, "*shape"], eligible: Bool[Tensor, "*shape"], budget: float
) -> Bool[Tensor, "*shape"]:
    """Mask of the fewest largest eligible values whose removal brings the mean of the rest to at most `budget`.

    Over all ranks: a collective. Equals dropping the largest repeatedly while the mean is above the budget (M2PO,
    arXiv:2510.01161, algorithm 1), in one sort: the remaining means are suffix means of the sorted values. Equal values
    are dropped together, so neither order nor ranks matter.
    """
    values = gather_over_ranks(squares[eligible].double()).sort(descending=True).values
    suffix_means = values.flip(0).cumsum(0).flip(0) / torch.arange(values.numel(), 0, -1, device=values.device)
    num_dropped = int((suffix_means > budget).sum())  # suffix means fall, so those above the budget come first
    if not num_dropped:
        return torch.zeros_like(eligible)
    return eligible & (squares.double() >= values[num_dropped - 1])


def entropy(logits: Float[Tensor, "*shape V"]) -> Float[Tensor, "*shape"]:
    """Entropy -sum p log p over the last axis, in nats; logits of -inf (tokens that cannot be sampled) add 0."""
    logprobs = logits.log_softmax(-1)
    possible = logprobs > -torch.inf
    return -torch.where(possible, logprobs.exp() * torch.where(possible, logprobs, 0.0), 0.0).sum(-1)


def sum_over_ranks(values: Num[Tensor, "*shape"]) -> Num[Tensor, "*shape"]:
    """Sum over all ranks; `values` itself without `torch.distributed`. A collective: all ranks call."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        values = values.clone()
        dist.all_reduce(values)
    return values


def gather_over_ranks(values: Float[Tensor, " N"]) -> Float[Tensor, " M"]:
    """Values of all ranks, which may differ in number; `values` itself without `torch.distributed`.

    A collective: all ranks call.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return values
    sizes = torch.zeros(dist.get_world_size(), dtype=torch.long, device=values.device)
    sizes[dist.get_rank()] = values.numel()
    ends = sum_over_ranks(sizes).cumsum(0).tolist()
    found = values.new_zeros(ends[-1])
    end = ends[dist.get_rank()]
    found[end - values.numel() : end] = values
    return sum_over_ranks(found)
