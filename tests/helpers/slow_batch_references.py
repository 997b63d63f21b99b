"""References of losses that look at the whole micro-batch, see `slow_references`."""

from __future__ import annotations

import math
from typing import Any

from slow_references import Batch, Result, dual, ppo, token_wise, unclipped


def harmful(batch: Batch) -> list[tuple[int, int]]:
    chosen = []
    for row, t in batch.all_tokens():
        log_ratio = batch.log_ratio(row, t)
        advantage = batch.advantages[row][t]
        if (advantage > 0 and log_ratio > 0) or (advantage < 0 and log_ratio < 0):
            chosen.append((row, t))
    return chosen


def greedy_second_moment(squares: list[float], budget: float) -> set[int]:
    """Algorithm 1 of M2PO: indices dropped, the largest first, equal ones together."""
    left = list(range(len(squares)))
    while left and math.fsum(squares[n] for n in left) / len(left) > budget:
        largest = max(squares[n] for n in left)
        left = [n for n in left if squares[n] < largest]
    return set(range(len(squares))) - set(left)


def m2po(batch: Batch, loss: Any) -> Result:
    places = harmful(batch)
    dropped = greedy_second_moment([batch.log_ratio(*place) ** 2 for place in places], loss.budget)
    gone = {places[n] for n in dropped}
    return token_wise(lambda _, b, row, t: unclipped(b, row, t, keep=(row, t) not in gone, kl=0.0))(batch, loss)


def water_level(values: list[float], budget: float) -> float:
    """By bisection."""
    if not values or sum(values) / len(values) <= budget:
        return math.inf
    low = 0.0
    high = max(values)
    for _ in range(200):
        middle = (low + high) / 2
        if sum(min(value, middle) for value in values) / len(values) < budget:
            low = middle
        else:
            high = middle
    return high


def m2po_adaptive_clip(batch: Batch, loss: Any) -> Result:
    bound = math.sqrt(water_level([batch.log_ratio(*place) ** 2 for place in harmful(batch)], loss.budget))
    low = math.exp(-bound)
    high = math.exp(min(bound, 50.0))
    return token_wise(lambda _, b, r, t: ppo(math.exp(b.log_ratio(r, t)), b.advantages[r][t], low, high=high))(
        batch, loss
    )


def _terms(batch: Batch, low: float, high: float) -> list[tuple[float, float, float]]:
    """(A, mu, min(r A, clip(r, low, high) A)) of every token."""
    terms = []
    for row, t in batch.all_tokens():
        ratio = math.exp(batch.log_ratio(row, t))
        advantage = batch.advantages[row][t]
        term = min(ratio * advantage, min(max(ratio, low), high) * advantage)
        terms.append((advantage, math.exp(batch.behavior[row][t]), term))
    return terms


def bapo_bounds(batch: Batch, loss: Any) -> tuple[float, float]:
    """The paper's loop, with every sum computed anew."""
    low = loss.low_start
    high = loss.high_start

    def share() -> float:
        positive = abs(sum(mu * term for a, mu, term in _terms(batch, 0.0, high) if a > 0))
        everything = abs(sum(mu * term for _, mu, term in _terms(batch, low, high)))
        return positive / everything if everything > 0 else math.inf

    while share() < loss.target_share and low < loss.low_stop - 1e-9:
        if high < loss.high_stop - 1e-9:
            high = min(high + loss.high_step, loss.high_stop)
        else:
            low = min(low + loss.low_step, loss.low_stop)
    return low, high


def bapo(batch: Batch, loss: Any) -> Result:
    low, high = bapo_bounds(batch, loss)
    return token_wise(lambda _, b, r, t: ppo(math.exp(b.log_ratio(r, t)), b.advantages[r][t], low, high=high))(
        batch, loss
    )


def bapo_released_bounds(batch: Batch, loss: Any) -> tuple[float, float]:
    low = loss.low_start
    high = loss.high_start

    def enough() -> bool:
        positive = negative = 0.0
        for row, t in batch.all_tokens():
            ratio = math.exp(batch.log_ratio(row, t))
            advantage = batch.advantages[row][t]
            if advantage >= 0:
                positive += min(ratio, high) * advantage
            else:
                negative += max(ratio, low) * advantage
        return positive >= loss.target_ratio * abs(negative)

    while not enough() and low < loss.low_stop - 1e-9:
        low = min(low + loss.low_step, loss.low_stop)
    while not enough() and high < loss.high_stop - 1e-9:
        high = min(high + loss.high_step, loss.high_stop)
    return low, high


def bapo_released(batch: Batch, loss: Any) -> Result:
    low, high = bapo_released_bounds(batch, loss)

    def rule(_: Any, b: Batch, row: int, t: int) -> tuple[float, float]:
        advantage = b.advantages[row][t]
        return dual(*ppo(math.exp(b.log_ratio(row, t)), advantage, low, high=high), advantage, loss.dual_clip)

    return token_wise(rule)(batch, loss)


def sat(batch: Batch, loss: Any) -> Result:
    drifts = sorted(abs(batch.log_ratio(*place)) for place in batch.all_tokens())
    threshold = max(drifts[int(loss.quantile * (len(drifts) - 1))], 1e-4) if drifts else 1e-4

    def rule(_: Any, batch: Batch, row: int, t: int) -> tuple[float, float]:
        relative = abs(batch.log_ratio(row, t)) / threshold
        shrink = 2 / (1 + relative**2) if relative > 1 else 1.0
        ratio = math.exp(batch.log_ratio(row, t))
        return ppo(ratio, batch.advantages[row][t], 1 - loss.clip_low * shrink, high=1 + loss.clip_high * shrink)

    return token_wise(rule)(batch, loss)
