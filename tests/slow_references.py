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
    anchor: Matrix
    behavior: Matrix
    advantages: Matrix
    cotangents: Matrix
    mask: list[list[bool]]

    def tokens(self, row: int) -> list[int]:
        return [t for t, trains in enumerate(self.mask[row]) if trains]

    def log_ratio(self, row: int, t: int) -> float:
        return self.logprobs[row][t] - self.anchor[row][t]

    def all_tokens(self) -> list[tuple[int, int]]:
        return [(row, t) for row in range(len(self.mask)) for t in self.tokens(row)]

    def zeros(self) -> Matrix:
        return [[0.0] * len(row) for row in self.mask]


TokenRule = Callable[[Any, Batch, int, int], tuple[float, float]]


def token_wise(rule: TokenRule) -> Callable[[Batch, Any], Result]:
    """A reference from a rule that gives a token's loss and its derivative."""

    def reference(batch: Batch, loss: Any) -> Result:
        values, grads = batch.zeros(), batch.zeros()
        for row, t in batch.all_tokens():
            value, slope = rule(loss, batch, row, t)
            values[row][t], grads[row][t] = value, batch.cotangents[row][t] * slope
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
    return weighted(1.0, batch, row, t)


@token_wise
def ppo_clip(loss, batch, row, t):
    advantage = batch.advantages[row][t]
    value, slope = ppo(math.exp(batch.log_ratio(row, t)), advantage, 1 - loss.clip_low, 1 + loss.clip_high)
    return (value, slope) if loss.dual_clip is None else dual(value, slope, advantage, loss.dual_clip)


@token_wise
def mini_rl(loss, batch, row, t):
    ratio, advantage = math.exp(batch.log_ratio(row, t)), batch.advantages[row][t]
    if (advantage > 0 and ratio > 1 + loss.clip_high) or (advantage < 0 and ratio < 1 - loss.clip_low):
        return 0.0, 0.0
    return weighted(ratio, batch, row, t)


@token_wise
def aspo(loss, batch, row, t):
    ratio, advantage = math.exp(batch.log_ratio(row, t)), batch.advantages[row][t]
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
    return ppo(math.exp(batch.log_ratio(row, t)), advantage, 1 - loss.clip_low, 1 + loss.clip_high)


@token_wise
def cispo(loss, batch, row, t):
    return weighted(min(max(math.exp(batch.log_ratio(row, t)), 1 - loss.clip_low), 1 + loss.clip_high), batch, row, t)


@token_wise
def sapo(loss, batch, row, t):
    ratio, advantage = math.exp(batch.log_ratio(row, t)), batch.advantages[row][t]
    tau = loss.tau_positive if advantage > 0 else loss.tau_negative
    gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
    return -4 / tau * gate * advantage, -ratio / math.cosh(tau * (ratio - 1) / 2) ** 2 * advantage


def gspo(batch: Batch, loss: Any) -> Result:
    values, grads = batch.zeros(), batch.zeros()
    for row in range(len(batch.mask)):
        tokens = batch.tokens(row)
        for t in tokens:
            ratio = math.exp(sum(batch.log_ratio(row, u) for u in tokens) / len(tokens))
            value, slope = ppo(ratio, batch.advantages[row][t], 1 - loss.clip_low, 1 + loss.clip_high)
            values[row][t] = value
            for u in tokens:  # s contains every token of the completion
                grads[row][u] += batch.cotangents[row][t] * slope / len(tokens)
    return values, grads


@token_wise
def gspo_token(loss, batch, row, t):
    tokens = batch.tokens(row)
    ratio = math.exp(sum(batch.log_ratio(row, u) for u in tokens) / len(tokens))
    return ppo(ratio, batch.advantages[row][t], 1 - loss.clip_low, 1 + loss.clip_high)


def sequence_ratio(batch: Batch, row: int) -> float:
    product = 1.0
    for t in batch.tokens(row):
        product *= math.exp(batch.logprobs[row][t]) / math.exp(batch.anchor[row][t])
    return product


@token_wise
def topr(loss, batch, row, t):
    ratio = sequence_ratio(batch, row)
    if batch.advantages[row][t] > 0:
        return weighted(min(max(ratio, loss.positive_low), loss.positive_high), batch, row, t)
    return weighted(min(max(ratio, loss.negative_low), loss.negative_high), batch, row, t)


@token_wise
def vespo(loss, batch, row, t):
    ratio = sequence_ratio(batch, row)
    if batch.advantages[row][t] >= 0:
        weight = ratio**loss.c1_positive * math.exp(loss.c2_positive * (1 - ratio))
    else:
        weight = ratio**loss.c1_negative * math.exp(loss.c2_negative * (1 - ratio))
    return weighted(weight, batch, row, t)


@token_wise
def opmd(loss, batch, row, t):
    return weighted(1 / (1 + loss.tau), batch, row, t)


@token_wise
def kimi_regression(loss, batch, row, t):
    value, slope = weighted(1.0, batch, row, t)
    log_ratio = batch.log_ratio(row, t)
    return value + loss.tau / 2 * log_ratio**2, slope + loss.tau * log_ratio


def _unclipped(batch: Batch, row: int, t: int, keep: bool, kl: float) -> tuple[float, float]:
    log_ratio, advantage = batch.log_ratio(row, t), batch.advantages[row][t]
    gain = math.exp(log_ratio) * advantage if keep else 0.0
    return -gain + kl * log_ratio**2, -gain + 2 * kl * log_ratio


def _change(batch: Batch, row: int, t: int) -> float:
    return math.exp(batch.logprobs[row][t]) - math.exp(batch.anchor[row][t])


@token_wise
def dppo(loss, batch, row, t):
    change = _change(batch, row, t)
    if batch.advantages[row][t] > 0:
        keep = not change > loss.max_increase
    else:
        keep = not change < -loss.max_decrease
    return _unclipped(batch, row, t, keep, loss.kl_coefficient)


@token_wise
def ipo(loss, batch, row, t):
    return _unclipped(batch, row, t, abs(_change(batch, row, t)) <= loss.threshold, loss.kl_coefficient)


@token_wise
def dppo_binary_kl(loss, batch, row, t):
    p, q = math.exp(batch.anchor[row][t]), math.exp(batch.logprobs[row][t])
    divergence = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    advantage = batch.advantages[row][t]
    away = (advantage > 0 and q > p) or (advantage < 0 and q < p)
    if away and divergence > loss.threshold:
        return 0.0, 0.0
    return weighted(min(q / p, loss.cap), batch, row, t)


def harmful(batch: Batch) -> list[tuple[int, int]]:
    chosen = []
    for row, t in batch.all_tokens():
        log_ratio, advantage = batch.log_ratio(row, t), batch.advantages[row][t]
        if (advantage > 0 and log_ratio > 0) or (advantage < 0 and log_ratio < 0):
            chosen.append((row, t))
    return chosen


def greedy_second_moment(squares: list[float], budget: float) -> set[int]:
    """Algorithm 1 of M2PO: indices dropped, the largest first."""
    left = list(range(len(squares)))
    while left and math.fsum(squares[n] for n in left) / len(left) > budget:
        left.remove(max(left, key=lambda n: (squares[n], -n)))
    return set(range(len(squares))) - set(left)


def m2po(batch: Batch, loss: Any) -> Result:
    places = harmful(batch)
    dropped = greedy_second_moment([batch.log_ratio(*place) ** 2 for place in places], loss.budget)
    gone = {places[n] for n in dropped}
    return token_wise(lambda _, b, row, t: _unclipped(b, row, t, (row, t) not in gone, 0.0))(batch, loss)


def water_level(values: list[float], budget: float) -> float:
    """By bisection."""
    if not values or sum(values) / len(values) <= budget:
        return math.inf
    low, high = 0.0, max(values)
    for _ in range(200):
        middle = (low + high) / 2
        if sum(min(value, middle) for value in values) / len(values) < budget:
            low = middle
        else:
            high = middle
    return high


def m2po_adaptive_clip(batch: Batch, loss: Any) -> Result:
    bound = math.sqrt(water_level([batch.log_ratio(*place) ** 2 for place in harmful(batch)], loss.budget))
    low, high = math.exp(-bound), math.exp(min(bound, 50.0))
    return token_wise(lambda _, b, r, t: ppo(math.exp(b.log_ratio(r, t)), b.advantages[r][t], low, high))(batch, loss)


def _terms(batch: Batch, low: float, high: float) -> list[tuple[float, float, float]]:
    """(A, mu, min(r A, clip(r, low, high) A)) of every token."""
    terms = []
    for row, t in batch.all_tokens():
        ratio, advantage = math.exp(batch.log_ratio(row, t)), batch.advantages[row][t]
        term = min(ratio * advantage, min(max(ratio, low), high) * advantage)
        terms.append((advantage, math.exp(batch.behavior[row][t]), term))
    return terms


def bapo_bounds(batch: Batch, loss: Any) -> tuple[float, float]:
    """The paper's loop, with every sum computed anew."""
    low, high = loss.low_start, loss.high_start

    def share() -> float:
        positive = abs(sum(mu * term for a, mu, term in _terms(batch, 0.0, high) if a > 0))
        everything = abs(sum(mu * term for _, mu, term in _terms(batch, low, high)))
        return positive / everything if everything > 0 else math.inf

    while share() < loss.target_share and low + loss.low_step <= loss.low_stop + 1e-9:
        if high + loss.high_step <= loss.high_stop + 1e-9:
            high += loss.high_step
        else:
            low += loss.low_step
    return low, high


def bapo(batch: Batch, loss: Any) -> Result:
    low, high = bapo_bounds(batch, loss)
    return token_wise(lambda _, b, r, t: ppo(math.exp(b.log_ratio(r, t)), b.advantages[r][t], low, high))(batch, loss)


def bapo_released_bounds(batch: Batch, loss: Any) -> tuple[float, float]:
    low, high = loss.low_start, loss.high_start

    def enough() -> bool:
        positive = negative = 0.0
        for row, t in batch.all_tokens():
            ratio, advantage = math.exp(batch.log_ratio(row, t)), batch.advantages[row][t]
            if advantage >= 0:
                positive += min(ratio, high) * advantage
            else:
                negative += max(ratio, low) * advantage
        return positive >= loss.target_ratio * abs(negative)

    while not enough() and low + loss.low_step <= loss.low_stop + 1e-9:
        low += loss.low_step
    while not enough() and high + loss.high_step <= loss.high_stop + 1e-9:
        high += loss.high_step
    return low, high


def bapo_released(batch: Batch, loss: Any) -> Result:
    low, high = bapo_released_bounds(batch, loss)

    def rule(_: Any, b: Batch, row: int, t: int) -> tuple[float, float]:
        advantage = b.advantages[row][t]
        return dual(*ppo(math.exp(b.log_ratio(row, t)), advantage, low, high), advantage, loss.dual_clip)

    return token_wise(rule)(batch, loss)


# -- corrections ------------------------------------------------------------------------------------------------------

Pool = Callable[[list[float], int], float]


def of_token(values: list[float], n: int) -> float:
    return values[n]


def of_sequence(values: list[float], n: int) -> float:
    return math.fsum(values)


def of_mean(values: list[float], n: int) -> float:
    return math.fsum(values) / len(values)


def of_worst(values: list[float], n: int) -> float:
    return max(values)


def row_wise(rule: Callable[[Any, list[float], int], tuple[float, bool]]) -> Callable[..., Any]:
    """A reference of a correction from a rule for the n-th trained token of a row with these log-ratios."""

    def reference(correction: Any, log_ratio: Matrix, mask: list[list[bool]]) -> tuple[Matrix, list[list[bool]]]:
        weights, rejected = [[0.0] * len(row) for row in mask], [[False] * len(row) for row in mask]
        for row, trains in enumerate(mask):
            places = [t for t, counts in enumerate(trains) if counts]
            values = [log_ratio[row][t] for t in places]
            for n, t in enumerate(places):
                weight, drop = rule(correction, values, n)
                weights[row][t], rejected[row][t] = 0.0 if drop else weight, drop
        return weights, rejected

    return reference


def truncated_is(pool: Pool) -> Callable[..., Any]:
    return row_wise(lambda c, values, n: (min(max(math.exp(pool(values, n)), c.floor), c.cap), False))


def masked_is(pool: Pool) -> Callable[..., Any]:
    def rule(correction: Any, values: list[float], n: int) -> tuple[float, bool]:
        ratio = math.exp(pool(values, n))
        return ratio, not correction.low <= ratio <= correction.high

    return row_wise(rule)


def rejection(pool: Pool) -> Callable[..., Any]:
    def rule(correction: Any, values: list[float], n: int) -> tuple[float, bool]:
        ratio = math.exp(pool(values, n))
        k2 = pool([x * x / 2 for x in values], n)
        k3 = pool([math.exp(x) - 1 - x for x in values], n)
        inside = correction.min_ratio <= ratio <= correction.max_ratio
        return 1.0, not (inside and k2 <= correction.max_k2 and k3 <= correction.max_k3)

    return row_wise(rule)


def _vetoes(correction: Any, values: list[float], n: int) -> tuple[float, bool]:
    for x in values:
        if not correction.min_ratio <= math.exp(x) <= correction.max_ratio:
            return 1.0, True
        if x * x / 2 > correction.max_k2 or math.exp(x) - 1 - x > correction.max_k3:
            return 1.0, True
    return 1.0, False


veto = row_wise(_vetoes)


def second_moment_mask(correction: Any, log_ratio: Matrix, mask: list[list[bool]]) -> Any:
    places = [(row, t) for row, trains in enumerate(mask) for t, counts in enumerate(trains) if counts]
    dropped = greedy_second_moment([log_ratio[row][t] ** 2 for row, t in places], correction.budget)
    gone = {places[n] for n in dropped}
    weights = [[float(counts and (b, t) not in gone) for t, counts in enumerate(row)] for b, row in enumerate(mask)]
    return weights, [[(b, t) in gone for t in range(len(row))] for b, row in enumerate(mask)]


def product(*references: Callable[..., Any]) -> Callable[..., Any]:
    def reference(correction: Any, log_ratio: Matrix, mask: list[list[bool]]) -> Any:
        weights = [[float(counts) for counts in row] for row in mask]
        rejected = [[False] * len(row) for row in mask]
        for part, part_reference in zip(correction.corrections, references, strict=True):
            part_weights, part_rejected = part_reference(part, log_ratio, mask)
            for b, row in enumerate(mask):
                for t in range(len(row)):
                    weights[b][t] *= part_weights[b][t]
                    rejected[b][t] |= part_rejected[b][t]
        return weights, rejected

    return reference


def batch_normalized(inner: Callable[..., Any]) -> Callable[..., Any]:
    def reference(correction: Any, log_ratio: Matrix, mask: list[list[bool]]) -> Any:
        weights, rejected = inner(correction.correction, log_ratio, mask)
        kept = [
            weights[b][t] for b, row in enumerate(mask) for t, counts in enumerate(row) if counts and not rejected[b][t]
        ]
        mean = math.fsum(kept) / len(kept) if kept else 0.0
        return [[weight / mean if mean > 0 else weight for weight in row] for row in weights], rejected

    return reference
