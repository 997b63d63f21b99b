"""The log-ratio of a step in two parts: the discrepancy of engine and trainer, and the staleness of the data."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

KEEP = 0.9  # of the weight of earlier fresh tokens in the discrepancy, at a step that has new ones


class RatioParts(NamedTuple):
    """Root mean squares over the tokens of a step, in nats; their squares add up to that of the log-ratio.

    Attributes:
        discrepancy: of log p - log q at the weights that sampled a token, p the trainer's distribution and q the
            engine's.
        staleness: of the rest of the step's log-ratios.
    """

    discrepancy: float
    staleness: float


def stale_sums(
    log_ratio: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"], fresh: Bool[Tensor, "*shape"]
) -> Float64[Tensor, " 3"]:
    """Number of tokens, number of stale ones, and the sum of their squared log-ratios; additive, on the CPU.

    Args:
        log_ratio: log pi - log mu of each token.
        mask: the tokens that count.
        fresh: those sampled with the weights of `pi`.
    """
    stale = log_ratio[mask & ~fresh].detach().cpu().double()  # float64: sums over all tokens of a step
    return torch.stack([mask.sum().cpu().double(), torch.tensor(len(stale)).double(), stale.square().sum()])


class RatioSplit:
    """Splits the mean square of a step's log-ratios (arXiv:2605.12070 logs and corrects both parts apart).

    A token's log-ratio is log pi - log mu = (log pi - log p) + (log p - log q): with p and q of the version that
    sampled it, in trainer and engine, the first is staleness and the second discrepancy. Fresh tokens have the second
    alone. If the two are not correlated, their mean squares add, so that staleness is what stale tokens have beyond
    the mean square of fresh ones: over N tokens, of which M are stale,

        staleness^2 = max(0, sum over stale tokens of (log-ratio^2 - discrepancy^2)) / N

    It is 0 where all tokens are fresh, and where stale ones differ less than fresh ones do (noise of few tokens). The
    discrepancy is that of the fresh tokens so far, whose weights fall by a tenth with each step that adds some; it is
    taken to stay constant between such steps.
    """

    def __init__(self) -> None:
        self._number = 0.0  # of fresh tokens, weighted
        self._squares = 0.0

    def update(self, num_fresh: float, fresh_squares: float, sums: Float64[Tensor, " 3"]) -> RatioParts | None:
        """Parts of a step; None as long as no token was fresh, or if a log-ratio is not finite.

        Args:
            num_fresh: fresh tokens measured in this step, trained on or replayed.
            fresh_squares: sum of their squared log-ratios.
            sums: `stale_sums` of all micro-batches and ranks.
        """
        if num_fresh and math.isfinite(fresh_squares):
            self._number = KEEP * self._number + num_fresh
            self._squares = KEEP * self._squares + fresh_squares
        num_tokens, num_stale, stale_squares = sums.tolist()
        if not (self._number and num_tokens and math.isfinite(stale_squares)):
            return None
        square = self._squares / self._number
        beyond = max(0.0, stale_squares - num_stale * square) / num_tokens
        return RatioParts(discrepancy=math.sqrt(square), staleness=math.sqrt(beyond))
