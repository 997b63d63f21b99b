"""Random inputs of losses, and their gradients."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import slow_references as slow
import torch
from torch import Tensor

from lit_async_rl.losses import LossInputs, LossOutput, PolicyLoss


def make_inputs(seed: int, shape: tuple[int, int] = (4, 6), spread: float = 0.5) -> LossInputs:
    """Random data in float64; `spread` is the standard deviation of log-ratios."""
    generator = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    proximal = -0.05 - torch.rand(shape, generator=generator, dtype=torch.float64) * 3
    logprobs = (proximal + spread * normal()).clamp(max=-0.01)
    advantages = torch.where(torch.rand(shape, generator=generator) < 0.1, 0.0, normal())
    log_p, log_q, entropy = make_heads(seed, shape, spread)
    return LossInputs(
        logprobs=logprobs.requires_grad_(),
        proximal_logprobs=proximal,
        behavior_logprobs=proximal + 0.1 * normal(),
        advantages=advantages,
        loss_mask=torch.rand(shape, generator=generator) < 0.7,
        staleness=torch.randint(0, 5, shape, generator=generator),
        token_weights=torch.rand(shape, generator=generator, dtype=torch.float64),
        group_index=torch.arange(shape[0]) // 2,
        head_logprobs=log_p,
        head_behavior_logprobs=log_q,
        behavior_entropy=entropy,
    )


def make_heads(seed: int, shape: tuple[int, int], spread: float, known: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    """Log pi and log mu of the `known` likeliest of 8 tokens, some of which mu cannot sample; entropy of mu."""
    generator = torch.Generator().manual_seed(seed + 1)
    logits = torch.randn(*shape, 8, generator=generator, dtype=torch.float64)
    moved = logits + spread * torch.randn(*shape, 8, generator=generator, dtype=torch.float64)
    truncated = torch.rand(*shape, 1, generator=generator) < 0.3
    lowest = logits <= logits.sort(-1).values[..., 3:4]
    log_q = logits.masked_fill(truncated & lowest, -math.inf).log_softmax(-1)
    best = log_q.topk(known, -1)
    entropy = -torch.where(log_q > -math.inf, log_q.exp() * log_q, 0.0).sum(-1)
    return moved.log_softmax(-1).gather(-1, best.indices), best.values, entropy


def run(loss: PolicyLoss, inputs: LossInputs) -> tuple[LossOutput, Tensor]:
    """Output, and gradient of the token-weighted sum."""
    logprobs = inputs.logprobs.detach().clone().requires_grad_()
    output = loss(replace(inputs, logprobs=logprobs))
    (inputs.token_weights * output.per_token).sum().backward()
    assert logprobs.grad is not None
    return output, logprobs.grad


def as_batch(inputs: LossInputs) -> slow.Batch:
    return slow.Batch(
        logprobs=inputs.logprobs.tolist(),
        proximal=inputs.proximal_logprobs.tolist(),
        behavior=inputs.behavior_logprobs.tolist(),
        advantages=inputs.advantages.tolist(),
        cotangents=inputs.token_weights.tolist(),
        mask=inputs.loss_mask.tolist(),
        group_index=inputs.group_index.tolist(),
        entropy=known(inputs.behavior_entropy).tolist(),
        head=torch.stack([known(inputs.head_logprobs), known(inputs.head_behavior_logprobs)], -1).tolist(),
    )


def known(values: Tensor | None) -> Tensor:
    assert values is not None
    return values


def junk_at(inputs: LossInputs, where: Tensor, seed: int) -> LossInputs:
    """The same with values that poison any arithmetic."""
    generator = torch.Generator().manual_seed(seed)
    poison = torch.tensor([math.nan, math.inf, -math.inf, 1e30, -1e30], dtype=torch.float64)

    def spoil(values: Tensor) -> Tensor:
        return torch.where(where, poison[torch.randint(0, 5, values.shape, generator=generator)], values)

    return replace(
        inputs,
        logprobs=spoil(inputs.logprobs.detach()),
        proximal_logprobs=spoil(inputs.proximal_logprobs),
        behavior_logprobs=spoil(inputs.behavior_logprobs),
        advantages=spoil(inputs.advantages),
        staleness=torch.where(where, -(10**9), inputs.staleness),
    )


def assert_close(actual: Any, expected: Any) -> None:
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)
