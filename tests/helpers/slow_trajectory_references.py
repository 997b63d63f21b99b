"""References of losses that are squares of a completion's log-ratio, see `slow_references`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slow_references import Batch, Result


def squared(batch: Batch, rule: Callable[[int], tuple[float, float]], scale: float = 1.0) -> Result:
    """scale * residual^2 in equal shares, residual and its derivative to log pi of the completion from `rule`."""
    values = batch.zeros()
    grads = batch.zeros()
    for row in range(len(batch.mask)):
        tokens = batch.tokens(row)
        if tokens:
            residual, slope = rule(row)
        for t in tokens:
            values[row][t] = scale * residual**2 / len(tokens)
            grads[row][t] = batch.cotangents[row][t] * scale * 2 * residual * slope
    return values, grads


def completion(batch: Batch, row: int) -> tuple[float, float]:
    tokens = batch.tokens(row)
    log_ratio = sum(batch.log_ratio(row, t) for t in tokens)
    return log_ratio, sum(batch.advantages[row][t] for t in tokens) / len(tokens)


def trajectory_balance(batch: Batch, loss: Any, scale: float = 1.0) -> Result:
    def rule(row: int) -> tuple[float, float]:
        group = [r for r, index in enumerate(batch.group_index) if index == batch.group_index[row] and batch.tokens(r)]
        mean = sum(completion(batch, r)[0] for r in group) / len(group)
        log_ratio, advantage = completion(batch, row)
        return log_ratio - mean - advantage / loss.beta, 1.0

    return squared(batch, rule, scale)


def trajectory_balance_prime(batch: Batch, loss: Any) -> Result:
    return trajectory_balance(batch, loss, loss.beta / 2)


def oapl(batch: Batch, loss: Any) -> Result:
    def rule(row: int) -> tuple[float, float]:
        log_ratio, advantage = completion(batch, row)
        return loss.beta * log_ratio - advantage, loss.beta

    return squared(batch, rule)
