"""Losses and corrections as loops over Python floats, gradients by hand: independent of the package's own code.

A reference of a loss takes a `Batch` and the loss (for its settings) and returns, for each token, its loss and the
gradient of sum(cotangent * loss) with respect to that token's log-probability.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Matrix = list[list[float]]
Result = tuple[Matrix, Matrix]


@dataclass(frozen=True)
class Batch:
    logprobs: Matrix
    proximal: Matrix
    behavior: Matrix
    advantages: Matrix
    cotangents: Matrix
    mask: list[list[bool]]
    group_index: list[int]
    entropy: Matrix
    head: list[list[list[tuple[float, float]]]]  # log pi and log mu of the tokens that were recorded

    def tokens(self, row: int) -> list[int]:
        return [t for t, trains in enumerate(self.mask[row]) if trains]

    def log_ratio(self, row: int, t: int) -> float:
        return self.logprobs[row][t] - self.proximal[row][t]

    def all_tokens(self) -> list[tuple[int, int]]:
        return [(row, t) for row in range(len(self.mask)) for t in self.tokens(row)]

    def zeros(self) -> Matrix:
        return [[0.0] * len(row) for row in self.mask]


TokenRule = Callable[[Any, Batch, int, int], tuple[float, float]]


def token_wise(rule: TokenRule) -> Callable[[Batch, Any], Result]:
    """A reference from a rule that gives a token's loss and its derivative."""

    def reference(batch: Batch, loss: Any) -> Result:
        values = batch.zeros()
        grads = batch.zeros()
        for row, t in batch.all_tokens():
            value, slope = rule(loss, batch, row, t)
            values[row][t] = value
            grads[row][t] = batch.cotangents[row][t] * slope
        return values, grads

    return reference


def ppo(ratio: float, advantage: float, low: float, high: float) -> tuple[float, float]:
    """-min(r A, clip(r, low, high) A) and its derivative to log r."""
    clipped = min(max(ratio, low), high)
    if clipped * advantage < ratio * advantage:
        return -clipped * advantage, 0.0
    return -ratio * advantage, -ratio * advantage


def dual(value: float, slope: float, advantage: float, ceiling: float) -> tuple[float, float]:
    if advantage < 0 and value > -ceiling * advantage:
        return -ceiling * advantage, 0.0
    return value, slope


def weighted(weight: float, batch: Batch, row: int, t: int) -> tuple[float, float]:
    """-weight A log pi."""
    advantage = batch.advantages[row][t]
    return -weight * advantage * batch.logprobs[row][t], -weight * advantage


@token_wise
def reinforce(loss, batch, row, t):
    return weighted(1.0, batch, row, t=t)


@token_wise
def ppo_clip(loss, batch, row, t):
    advantage = batch.advantages[row][t]
    value, slope = ppo(math.exp(batch.log_ratio(row, t)), advantage, 1 - loss.clip_low, high=1 + loss.clip_high)
    return (value, slope) if loss.dual_clip is None else dual(value, slope, advantage, ceiling=loss.dual_clip)


@token_wise
def mini_rl(loss, batch, row, t):
    ratio = math.exp(batch.log_ratio(row, t))
    advantage = batch.advantages[row][t]
    if (advantage > 0 and ratio > 1 + loss.clip_high) or (advantage < 0 and ratio < 1 - loss.clip_low):
        return 0.0, 0.0
    return weighted(ratio, batch, row, t=t)


@token_wise
def aspo(loss, batch, row, t):
    ratio = math.exp(batch.log_ratio(row, t))
    advantage = batch.advantages[row][t]
    weight = min(1 / ratio, loss.cap) if advantage > 0 else ratio
    cut = (advantage > 0 and ratio > 1 + loss.clip_high) or (advantage < 0 and ratio < 1 - loss.clip_low)
    return -weight * advantage, 0.0 if cut else -weight * advantage


@token_wise
def opsm(loss, batch, row, t):
    tokens = batch.tokens(row)
    drift = sum(batch.behavior[row][u] - batch.logprobs[row][u] for u in tokens) / len(tokens)
    advantage = batch.advantages[row][t]
    if advantage < 0 and drift > loss.delta:
        return 0.0, 0.0
    return ppo(math.exp(batch.log_ratio(row, t)), advantage, 1 - loss.clip_low, high=1 + loss.clip_high)


def importance_weight(loss, ratio):
    name = loss.weight.value
    if name == "truncated":
        return min(ratio, loss.cap)
    if name == "masked":
        return ratio if loss.low <= ratio <= loss.high else 0.0
    return ratio if name == "full" else 1.0


def centering(loss, head):
    """mu_v w_v - alpha pi_v of each recorded token, which is what its log pi counts in the expected score."""
    p = [math.exp(log_p) for log_p, _ in head]
    q = [math.exp(log_q) for _, log_q in head]
    rho = max(1 - math.fsum(q), 1e-6) / max(1 - math.fsum(p), 1e-6)
    alpha = rho * importance_weight(loss, 1 / rho)
    both = zip(p, q, strict=True)
    return [b * importance_weight(loss, a / b) - alpha * a if b else 0.0 for a, b in both]


@token_wise
def score_centering(loss, batch, row, t):
    head = batch.head[row][t]
    advantage = batch.advantages[row][t]
    counts = centering(loss, head)
    expected = sum(count * log_p for count, (log_p, _) in zip(counts, head, strict=True))
    value, slope = weighted(importance_weight(loss, math.exp(batch.log_ratio(row, t))), batch, row, t=t)
    return value + advantage * expected, slope


def score_centering_head(batch: Batch, loss: Any) -> list[Matrix]:
    """Gradient of sum(cotangent * loss) with respect to log pi of the recorded tokens."""
    found = [[[0.0] * len(head) for head in row] for row in batch.head]
    for row, t in batch.all_tokens():
        scale = batch.cotangents[row][t] * batch.advantages[row][t]
        found[row][t] = [scale * count for count in centering(loss, batch.head[row][t])]
    return found


@token_wise
def estr(loss, batch, row, t):
    if batch.log_ratio(row, t) ** 2 / (batch.entropy[row][t] + loss.eps) > loss.tau:
        return 0.0, 0.0
    ratio = math.exp(batch.log_ratio(row, t))
    return ppo(ratio, batch.advantages[row][t], 1 - loss.clip_low, high=1 + loss.clip_high)


@token_wise
def cispo(loss, batch, row, t):
    return weighted(min(max(math.exp(batch.log_ratio(row, t)), 1 - loss.clip_low), 1 + loss.clip_high), batch, row, t=t)


@token_wise
def sapo(loss, batch, row, t):
    ratio = math.exp(batch.log_ratio(row, t))
    advantage = batch.advantages[row][t]
    tau = loss.tau_positive if advantage > 0 else loss.tau_negative
    gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
    return -4 / tau * gate * advantage, -ratio / math.cosh(tau * (ratio - 1) / 2) ** 2 * advantage


@token_wise
def opmd(loss, batch, row, t):
    return weighted(1 / (1 + loss.tau), batch, row, t=t)


@token_wise
def kimi_regression(loss, batch, row, t):
    value, slope = weighted(1.0, batch, row, t=t)
    log_ratio = batch.log_ratio(row, t)
    return value + loss.tau / 2 * log_ratio**2, slope + loss.tau * log_ratio


def unclipped(batch: Batch, row: int, t: int, keep: bool, kl: float) -> tuple[float, float]:
    log_ratio = batch.log_ratio(row, t)
    advantage = batch.advantages[row][t]
    gain = math.exp(log_ratio) * advantage if keep else 0.0
    return -gain + kl * log_ratio**2, -gain + 2 * kl * log_ratio


def _change(batch: Batch, row: int, t: int) -> float:
    return math.exp(batch.logprobs[row][t]) - math.exp(batch.proximal[row][t])


@token_wise
def dppo(loss, batch, row, t):
    change = _change(batch, row, t)
    if batch.advantages[row][t] > 0:
        keep = not change > loss.max_increase
    else:
        keep = not change < -loss.max_decrease
    return unclipped(batch, row, t, keep=keep, kl=loss.kl_coefficient)


@token_wise
def ipo(loss, batch, row, t):
    return unclipped(batch, row, t, keep=abs(_change(batch, row, t)) <= loss.threshold, kl=loss.kl_coefficient)


@token_wise
def dppo_binary_kl(loss, batch, row, t):
    p = math.exp(batch.proximal[row][t])
    q = math.exp(batch.logprobs[row][t])
    divergence = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    advantage = batch.advantages[row][t]
    away = (advantage > 0 and q > p) or (advantage < 0 and q < p)
    if away and divergence > loss.threshold:
        return 0.0, 0.0
    return weighted(min(q / p, loss.cap), batch, row, t=t)
