"""OPOB: the off-policy baseline of least variance (VCPO, arXiv:2602.17616), from gradient norms of trajectories.

For the estimator sum_i (R_i - b) g_i with unit-advantage gradients g_i, the constant b of least second moment is

    b* = sum_i W_i R_i / sum_i W_i,      W_i = ||g_i||^2

With g_i = w_i grad log pi(tau_i) that is the paper's b* = sum w^2 ||grad log pi||^2 R / sum w^2 ||grad log pi||^2.
B trajectories.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lit_async_rl.baselines.ghost_gradients import can_keep_books
from lit_async_rl.baselines.ghost_norms import GhostTape
from lit_async_rl.baselines.layer_norms import is_sharded
from lit_async_rl.importance import masked, sequence_log_ratio
from lit_async_rl.models.policy import CausalPolicy
from lit_async_rl.types import RolloutBatch


class Flavour(Enum):
    """Which W_i.

    CONSISTENT takes the gradient exactly as it is accumulated: truncated weight and length factor included. It is the
    optimum for the update that is made. PAPER takes the raw w^2 ||grad log pi||^2 of whole trajectories whatever the
    loss does with them. PAPER_CODE is what the published code computes: the norm contains the truncated weight already
    and is multiplied by the raw w^2 once more (about w^4 where nothing is truncated); only to reproduce it.
    """

    CONSISTENT = "consistent"
    PAPER = "paper"
    PAPER_CODE = "paper_code"


class Norms(Enum):
    """How the norms are computed.

    GHOST: all trajectories of a micro-batch from one backward pass to the layers' outputs, also of sharded models.
    PER_TRAJECTORY: one backward pass for each, exact for any module whose parameters are whole (single device, DDP).
    """

    GHOST = "ghost"
    PER_TRAJECTORY = "per_trajectory"


def optimal_baseline(log_weights: Float[Tensor, " B"], rewards: Float[Tensor, " B"]) -> Float[Tensor, ""]:
    """b* = sum W R / sum W from log W, in log space: no weight over- or underflows. Broken weights count as 0."""
    log_weights = torch.nan_to_num(log_weights.double(), nan=-torch.inf, posinf=torch.inf)
    if not torch.isfinite(log_weights).any():
        return rewards.mean()  # nothing is known about the gradients: every trajectory counts the same
    return (torch.softmax(log_weights, 0) * rewards.double()).sum().to(rewards.dtype)


def optimal_advantages(
    log_weights: Float[Tensor, " B"],
    rewards: Float[Tensor, " B"],
    group_index: Int[Tensor, " B"],
    divide_by_std: bool = True,
) -> Float[Tensor, " B"]:
    """(R - b*) / std within each group; exactly 0 where a group's rewards are equal, and for padding (index -1)."""
    advantages = torch.zeros_like(rewards)
    for index in group_index.unique().tolist():
        rows = group_index == index
        group = rewards[rows]
        if index < 0 or group.max() == group.min():
            continue
        centered = group - optimal_baseline(log_weights[rows], group)
        advantages[rows] = centered / group.std(correction=0) if divide_by_std else centered
    return advantages


def per_trajectory_squared_norms(
    policy: CausalPolicy, logprobs: Float[Tensor, "B T"], coefficients: Float[Tensor, "B T"]
) -> Float[Tensor, " B"]:
    """|| d/d theta of sum_t c_it log pi(y_it) ||^2 of each row, by one backward pass each; keeps the graph.

    Raises:
        ValueError: parameters are sharded.
    """
    if is_sharded(policy):
        raise ValueError("model.baseline.norms=PER_TRAJECTORY needs whole parameters: use GHOST with FSDP")
    parameters = [p for p in policy.parameters() if p.requires_grad]
    norms = []
    for row, weights in zip(logprobs, coefficients.detach(), strict=True):
        grads = torch.autograd.grad((row * weights).sum(), parameters, retain_graph=True, allow_unused=True)
        norms.append(torch.stack([grad.square().sum() for grad in grads if grad is not None]).sum())
    return torch.stack(norms)


@dataclass(frozen=True)
class OptimalBaseline:
    """Replaces the advantages of each group by (R_i - b*) / std, b* from this micro-batch's gradient norms.

    For losses without ratio (`Reinforce`), whose gradient is linear in the advantage; the correction's weights are part
    of g_i. A group must not be split over micro-batches (`data.keep_groups_whole`, which the command line sets).

    As in the published code a trajectory takes part in its own baseline. That, and weights that are truncated, adds
    some bias to the gradient, as for any such baseline; the first vanishes as groups grow.

    Args:
        norms: how gradient norms are computed, see `Norms`.
        flavour: which W_i, see `Flavour`.
        divide_by_std: by the population standard deviation of the group's rewards, as the paper's runs do.
    """

    norms: Norms = Norms.GHOST
    flavour: Flavour = Flavour.CONSISTENT
    divide_by_std: bool = True

    def record(self, policy: CausalPolicy) -> AbstractContextManager[GhostTape | None]:
        """What the forward pass must run in."""
        return GhostTape(policy) if self.norms is Norms.GHOST else nullcontext()

    def can_keep_books(self, tape: GhostTape | None) -> bool:
        """Whether the tape's gradients are those of the update, so that the real backward pass can use them again."""
        return tape is not None and self.flavour is not Flavour.PAPER and can_keep_books(tape)

    def advantages(
        self,
        policy: CausalPolicy,
        tape: GhostTape | None,
        logprobs: Float[Tensor, "B T"],
        weights: Float[Tensor, "B T"],
        batch: RolloutBatch,
    ) -> Float[Tensor, "B T"]:
        """Advantages of each token; `logprobs` with the graph of the forward pass, `weights` the correction's."""
        mask = batch.loss_mask
        coefficients = mask.float() if self.flavour is Flavour.PAPER else batch.token_weights * weights
        if tape is None:
            norms = per_trajectory_squared_norms(policy, logprobs, coefficients)
        else:
            norms = tape.squared_norms(coefficients, batch.input_ids, mask, batch.temperature)
        log_weights = norms.log()
        if self.flavour is not Flavour.CONSISTENT:
            log_weights = log_weights + 2 * sequence_log_ratio(logprobs.detach() - batch.behavior_logprobs, mask)
        rows = optimal_advantages(log_weights, batch.rewards, batch.group_index, self.divide_by_std)
        return masked(rows[:, None].expand_as(logprobs), mask)
