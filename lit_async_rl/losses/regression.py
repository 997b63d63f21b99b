"""Losses derived from regressing log-ratios on rewards: no importance weights, no clipping."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from lit_async_rl.losses.base import LossInputs, LossOutput, PolicyLoss, surrogate
from lit_async_rl.utils.checks import check_range


@dataclass(frozen=True)
class OPMD(PolicyLoss):
    """Online policy mirror descent in its simplest form: L = -A log pi / (1 + tau).

    As in Trinity-RFT (the method's own derivation could not be checked). A = R - mean is `GroupMean`; the other
    baseline, tau log mean exp(R / tau), is `LogMeanExp`.

    Args:
        tau: temperature of the KL penalty, which appears as the divisor 1 + tau.

    Raises:
        ValueError: tau is negative.
    """

    tau: float = 1.0

    uses_proximal: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_range("OPMD", ">= 0", tau=self.tau)

    def token_loss(self, inputs: LossInputs) -> LossOutput:
        """-A log pi / (1 + tau)."""
        weights = torch.full_like(inputs.logprobs, 1 / (1 + self.tau))
        return LossOutput(per_token=surrogate(weights, inputs), clipped=torch.zeros_like(inputs.loss_mask))


@dataclass(frozen=True)
class KimiRegression(PolicyLoss):
    """L = -A log pi + (tau / 2) (log pi - log pi_prox)^2: a quadratic pull to the proximal policy in place of a clip.

    After Kimi k1.5 (arXiv:2501.12599), per token as in ROLL; verl calls the same loss DRO. The paper's own form is of
    whole completions and could not be checked.

    Args:
        tau: coefficient of the quadratic penalty.

    Raises:
        ValueError: tau is negative.
    """

    tau: float = 0.1

    def __post_init__(self) -> None:
        check_range("KimiRegression", ">= 0", tau=self.tau)

    def token_loss(self, inputs: LossInputs) -> LossOutput:
        """-A log pi + (tau / 2) (log r)^2, with the log-ratio unclamped: the penalty must not vanish far away."""
        pull = self.tau / 2 * (inputs.logprobs - inputs.proximal_logprobs).square()
        loss = surrogate(torch.ones_like(inputs.logprobs), inputs) + pull
        return LossOutput(per_token=loss, clipped=torch.zeros_like(inputs.loss_mask))
