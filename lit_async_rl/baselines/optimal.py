"""OPOB: the off-policy optimal baseline (VCPO, arXiv:2602.17616), from gradient norms of trajectories.

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
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lit_async_rl.baselines.ghost_norms import GhostTape, has_sharded_parameters
from lit_async_rl.importance import masked, sequence_log_ratio
from lit_async_rl.models.policy import CausalPolicy, TokenStats
from lit_async_rl.sampler_records import Support, known_support
from lit_async_rl.types import RolloutBatch
from lit_async_rl.utils.checks import check_range


class Flavour(Enum):
    """Definition of the weights W_i.

    CONSISTENT uses the gradient as accumulated, with truncated weight and length factor: the optimum for the actual
    update. PAPER uses the raw w^2 ||grad log pi||^2 of whole trajectories. PAPER_CODE multiplies a norm that contains
    the truncated weight by the raw w^2 again, as the published code does (about w^4 without truncation).
    """

    CONSISTENT = "consistent"
    PAPER = "paper"
    PAPER_CODE = "paper_code"


class Norms(Enum):
    """Computation of the gradient norms.

    GHOST: all trajectories of a micro-batch from one backward pass to the layers' outputs; supports DDP and FSDP, but
        not tensor parallelism, which divides the layers.
    PER_TRAJECTORY: one backward pass per trajectory; any module with unsharded parameters (single device, DDP).
    SCORE: a proxy from the probabilities of the sampled tokens, without a backward pass, see `score_squared_norms`. Any
        model, any layout.
    """

    GHOST = "ghost"
    PER_TRAJECTORY = "per_trajectory"
    SCORE = "score"


def optimal_baseline(log_weights: Float[Tensor, " B"], rewards: Float[Tensor, " B"]) -> Float[Tensor, ""]:
    """b* = sum W R / sum W from log W, in log space: no weight over- or underflows. NaN is weight 0."""
    # float64: log-weights of whole trajectories span hundreds of nats
    log_weights = torch.nan_to_num(log_weights.double(), nan=-torch.inf, posinf=torch.inf)
    if not torch.isfinite(log_weights).any():
        return rewards.mean()  # without a finite weight every trajectory counts the same
    return (torch.softmax(log_weights, 0) * rewards.double()).sum().to(rewards.dtype)


def optimal_advantages(
    log_weights: Float[Tensor, " B"],
    rewards: Float[Tensor, " B"],
    group_index: Int[Tensor, " B"],
    divide_by_std: bool = True,
    eps: float = 1e-6,
) -> Float[Tensor, " B"]:
    """(R - b*) / (std + eps) within each group; exactly 0 for equal rewards and for padding (index -1)."""
    advantages = torch.zeros_like(rewards)
    for index in group_index.unique().tolist():
        rows = group_index == index
        group = rewards[rows]
        if index < 0 or group.max() == group.min():
            continue
        centered = group - optimal_baseline(log_weights[rows], group)
        advantages[rows] = centered / (group.std(correction=0) + eps) if divide_by_std else centered
    return advantages


def per_trajectory_squared_norms(
    policy: CausalPolicy, logprobs: Float[Tensor, "B T"], coefficients: Float[Tensor, "B T"]
) -> Float[Tensor, " B"]:
    """|| d/d theta sum_t c_it log pi(y_it) ||^2 of each row i, by a backward pass each; retains the graph.

    Raises:
        ValueError: parameters are sharded.
    """
    if has_sharded_parameters(policy):
        raise ValueError(
            "model.baseline.norms=PER_TRAJECTORY does not work with sharded parameters: with FSDP, set "
            "model.baseline.norms=GHOST; with tensor parallelism, SCORE"
        )
    parameters = [p for p in policy.parameters() if p.requires_grad]
    norms = []
    for row, weights in zip(logprobs, coefficients.detach(), strict=True):
        grads = torch.autograd.grad((row * weights).sum(), parameters, retain_graph=True, allow_unused=True)
        norms.append(torch.stack([grad.float().square().sum() for grad in grads if grad is not None]).sum())
    return torch.stack(norms)


def score_squared_norms(
    logprobs: Float[Tensor, "B T"], coefficients: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
) -> Float[Tensor, " B"]:
    """sum_t c_it^2 (1 - p_it)^2 of each row i: the squared score at the sampled token's own logit.

    The gradient of c log p_y with respect to all logits, c (onehot_y - p), has a squared norm between c^2 (1 - p_y)^2
    and twice that. The proxy leaves out the network below the logits, which all trajectories share, and products of
    different tokens.
    """
    return masked((coefficients * torch.expm1(logprobs.detach())).square(), mask).sum(-1)


@dataclass(frozen=True)
class OptimalBaseline:
    """Replaces the advantages of each group by (R_i - b*) / (std + eps), b* from this micro-batch's gradient norms.

    For losses without ratio (`Reinforce`), whose gradient is linear in the advantage; the correction's weights are part
    of g_i. A group must not be split over micro-batches (`data.keep_groups_whole`, which `WeightSync` sets).

    As in the published code, a trajectory is part of its own baseline, a bias that vanishes as groups grow; truncated
    weights add another.

    Args:
        norms: computation of the gradient norms, see `Norms`.
        flavour: definition of W_i, see `Flavour`.
        divide_by_std: divide by the population standard deviation of the group's rewards, as the paper's runs do.
        eps: added to the standard deviation.
        last_blocks: take the norms over the head and this many last transformer blocks, a proxy at a fraction of the
            cost of a backward pass; None is all layers.

    Raises:
        ValueError: `last_blocks` is not positive, or the norms are not `GHOST`; `eps` is negative.
    """

    norms: Norms = Norms.GHOST
    flavour: Flavour = Flavour.CONSISTENT
    divide_by_std: bool = True
    last_blocks: int | None = None
    eps: float = 1e-6

    def __post_init__(self) -> None:
        check_range("model.baseline", "integer >= 1", last_blocks=self.last_blocks)
        check_range("model.baseline", ">= 0", eps=self.eps)
        if self.last_blocks is not None and self.norms is not Norms.GHOST:
            raise ValueError(f"model.baseline.last_blocks={self.last_blocks} needs model.baseline.norms=GHOST")

    @property
    def reads_weights(self) -> bool:
        """Whether the norms need the policy's weights after the forward pass."""
        return self.norms is not Norms.SCORE

    def record(self, policy: CausalPolicy) -> AbstractContextManager[GhostTape | None]:
        """Context manager that the forward pass must run in."""
        return GhostTape(policy, self.last_blocks) if self.norms is Norms.GHOST else nullcontext()

    def can_keep_books(self, tape: GhostTape) -> bool:
        """Whether the tape's gradients can be reused for the update, which saves the second backward pass.

        Not with `Flavour.PAPER`, `last_blocks`, packing, sharded parameters or a head in several chunks.
        """
        return self.flavour is not Flavour.PAPER and tape.is_complete and not has_sharded_parameters(tape.policy)

    def advantages(
        self,
        policy: CausalPolicy,
        tape: GhostTape | None,
        stats: TokenStats,
        weights: Float[Tensor, "B T"],
        batch: RolloutBatch,
    ) -> Float[Tensor, "B T"]:
        """Advantage of each token, 0 where it does not train.

        Args:
            policy: policy of the forward pass.
            tape: recording of the forward pass, for `norms=GHOST`.
            stats: its statistics, with the graph; log-probabilities renormalised `on_support`, as in the loss.
            weights: importance weights of the correction.
            batch: the micro-batch.
        """
        mask = batch.loss_mask
        logprobs = stats.logprobs
        coefficients = mask.float() if self.flavour is Flavour.PAPER else batch.token_weights * weights
        if batch.credits is not None:  # the advantage of a rollout is multiplied by them, so its gradient has them
            coefficients = coefficients * batch.credits
        if self.norms is Norms.SCORE:
            norms = score_squared_norms(logprobs, coefficients, mask)
        elif tape is None:
            norms = per_trajectory_squared_norms(policy, logprobs, coefficients)
        else:
            norms = tape.squared_norms(
                coefficients, batch.input_ids, mask, batch.temperature, stats.rows, _support(batch)
            )
        log_weights = norms.log()
        if self.flavour is not Flavour.CONSISTENT:
            log_weights = log_weights + 2 * sequence_log_ratio(logprobs.detach() - batch.behavior_logprobs, mask)
        rows = optimal_advantages(
            log_weights, batch.rewards, batch.group_index, divide_by_std=self.divide_by_std, eps=self.eps
        )
        advantages = rows[:, None].expand_as(logprobs)
        return masked(advantages if batch.credits is None else advantages * batch.credits, mask)


def _support(batch: RolloutBatch) -> Support | None:
    if batch.head_ids is None or batch.head_logprobs is None or batch.head_ids.shape[-1] == 0:
        return None
    return Support(batch.head_ids, known_support(batch.head_logprobs, batch.loss_mask, batch.truncated))
