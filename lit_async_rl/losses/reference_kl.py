"""Estimators of the penalty KL(pi || ref), from tokens that a behavior policy mu sampled. B rollouts, T positions.

An unbiased value does not give an unbiased gradient: on samples of pi, k1 and k3 are unbiased for the value of
KL(pi || ref), but as losses they have the gradients of 0 and of KL(ref || pi), because the expectation over pi is not
differentiated (arXiv:2506.09477, arXiv:2510.01555, arXiv:2512.21852). Value and gradient are therefore defined
separately here.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lit_async_rl.importance import kl_k3, masked, safe_exp

KLEstimator = Literal["token", "sequence", "k3"]


def reference_kl(
    estimator: KLEstimator,
    logprobs: Float[Tensor, "B T"],
    reference_logprobs: Float[Tensor, "B T"],
    behavior_logprobs: Float[Tensor, "B T"],
    loss_mask: Bool[Tensor, "B T"],
    group_index: Int[Tensor, " B"],
) -> Float[Tensor, "B T"]:
    """Penalty of each token, in nats; the weighted sum of penalties is a loss.

    With k = log pi - log ref and r = pi / mu of a token:

    * `token`: gradient r k grad log pi, value r k3. Unbiased for the gradient of the sum over positions of
      KL(pi(. | prefix) || ref(. | prefix)), at the prefixes that mu visits. It is the gradient of k2 on fresh data
      (r = 1), and in general that of r k3 differentiated through r, as in DeepSeek-V3.2 (arXiv:2512.02556).
    * `sequence`: the gradient of KL(pi || ref) of whole completions (k1 in the reward), which includes a token's effect
      on later prefixes. The coefficient of token t is C_t - R_t B_t: C_t is the sum over s >= t of R_s k_s, R_s the
      ratio of the completion up to s, and B_t the mean of C_t over the other completions of the group, a baseline
      independent of this one (groups must be whole). Unbiased on stale data, too; the variance grows with length and
      staleness.
    * `k3`: the derivative of k3 = ref / pi - 1 + k, without importance weights, as in GRPO (arXiv:2402.03300). On fresh
      data it is the gradient of KL(ref || pi), on stale data of neither KL.

    Log-ratios of importance weights are limited to ±20. A completion with a non-finite log-probability has no penalty.

    Args:
        estimator: `token`, `sequence` or `k3`.
        logprobs: log pi, with gradient.
        reference_logprobs: log ref, without gradient.
        behavior_logprobs: log mu, without gradient.
        loss_mask: True where a token trains.
        group_index: group of each row.
    """
    finite = logprobs.isfinite() & reference_logprobs.isfinite() & behavior_logprobs.isfinite()
    usable = loss_mask & (finite | ~loss_mask).all(-1, keepdim=True)
    logprobs = masked(logprobs, usable)
    reference_logprobs = masked(reference_logprobs, usable)
    log_weights = logprobs.detach() - masked(behavior_logprobs, usable)
    log_ratio = logprobs.detach() - reference_logprobs
    if estimator == "k3":
        return masked(kl_k3(reference_logprobs - logprobs), usable)
    if estimator == "sequence":
        log_weights = log_weights.cumsum(-1)
    weights = masked(safe_exp(log_weights), usable)
    coefficient = weights * log_ratio
    if estimator == "sequence":
        to_go = coefficient.flip(-1).cumsum(-1).flip(-1)
        coefficient = to_go - weights * _mean_of_others(to_go, group_index, usable.any(-1))
    value = weights * kl_k3(-log_ratio)
    return value + masked(coefficient, usable) * (logprobs - logprobs.detach())


def _mean_of_others(
    values: Float[Tensor, "B T"], group_index: Int[Tensor, " B"], counts: Bool[Tensor, " B"]
) -> Float[Tensor, "B T"]:
    """Mean over the other rows of each row's group for which `counts` is True; 0 if there are none."""
    same = (group_index[:, None] == group_index) & counts
    others = (same & ~torch.eye(len(group_index), dtype=torch.bool, device=values.device)).to(values.dtype)
    return (others @ values) / others.sum(-1, keepdim=True).clamp(min=1)
