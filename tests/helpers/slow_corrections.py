"""Corrections as loops over Python floats: independent of the package's own code.

A reference takes the correction (for its settings), log-ratios and mask, and returns weights and rejections.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from slow_batch_references import greedy_second_moment
from slow_references import Matrix

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
        weights = [[0.0] * len(row) for row in mask]
        rejected = [[False] * len(row) for row in mask]
        for row, trains in enumerate(mask):
            places = [t for t, counts in enumerate(trains) if counts]
            values = [log_ratio[row][t] for t in places]
            for n, t in enumerate(places):
                weight, drop = rule(correction, values, n)
                weights[row][t] = 0.0 if drop else weight
                rejected[row][t] = drop
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


def blended(of_sequences: Callable[..., Any], of_tokens: Callable[..., Any]) -> Callable[..., Any]:
    def reference(correction: Any, log_ratio: Matrix, mask: list[list[bool]]) -> Any:
        found = of_sequences(correction.sequence, log_ratio, mask), of_tokens(correction.token, log_ratio, mask)
        (first, rejected), (second, _) = found
        share = correction.share
        rows = zip(first, second, strict=True)
        return [[share * a + (1 - share) * b for a, b in zip(*row, strict=True)] for row in rows], rejected

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
