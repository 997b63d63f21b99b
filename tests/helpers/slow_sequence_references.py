"""References of losses with the ratio of a whole completion or of its beginning, see `slow_references`."""

from __future__ import annotations

import math
from typing import Any

from slow_references import Batch, Result, ppo, token_wise, weighted


@token_wise
def min_pro(loss, batch, row, t):
    before = [batch.log_ratio(row, u) for u in batch.tokens(row) if u < t]
    weight = math.exp(batch.log_ratio(row, t)) * math.exp(min(before, default=0.0))
    return weighted(min(weight, loss.cap), batch, row, t=t)


@token_wise
def pnpo(loss, batch, row, t):
    prefix = [batch.log_ratio(row, u) for u in batch.tokens(row) if u <= t]
    ratio = math.exp(math.fsum(prefix) / len(prefix))
    return ppo(ratio, batch.advantages[row][t], 1 - loss.clip_low, high=1 + loss.clip_high)


def gspo(batch: Batch, loss: Any) -> Result:
    values = batch.zeros()
    grads = batch.zeros()
    for row in range(len(batch.mask)):
        tokens = batch.tokens(row)
        for t in tokens:
            ratio = math.exp(sum(batch.log_ratio(row, u) for u in tokens) / len(tokens))
            value, slope = ppo(ratio, batch.advantages[row][t], 1 - loss.clip_low, high=1 + loss.clip_high)
            values[row][t] = value
            for u in tokens:  # s contains every token of the completion
                grads[row][u] += batch.cotangents[row][t] * slope / len(tokens)
    return values, grads


@token_wise
def gspo_token(loss, batch, row, t):
    tokens = batch.tokens(row)
    ratio = math.exp(sum(batch.log_ratio(row, u) for u in tokens) / len(tokens))
    return ppo(ratio, batch.advantages[row][t], 1 - loss.clip_low, high=1 + loss.clip_high)


def sequence_ratio(batch: Batch, row: int) -> float:
    product = 1.0
    for t in batch.tokens(row):
        product *= math.exp(batch.logprobs[row][t]) / math.exp(batch.proximal[row][t])
    return product


@token_wise
def topr(loss, batch, row, t):
    ratio = sequence_ratio(batch, row)
    if batch.advantages[row][t] > 0:
        return weighted(min(max(ratio, loss.positive_low), loss.positive_high), batch, row, t=t)
    return weighted(min(max(ratio, loss.negative_low), loss.negative_high), batch, row, t=t)


@token_wise
def vespo(loss, batch, row, t):
    ratio = sequence_ratio(batch, row)
    if batch.advantages[row][t] >= 0:
        weight = ratio**loss.c1_positive * math.exp(loss.c2_positive * (1 - ratio))
    else:
        weight = ratio**loss.c1_negative * math.exp(loss.c2_negative * (1 - ratio))
    return weighted(weight, batch, row, t=t)
