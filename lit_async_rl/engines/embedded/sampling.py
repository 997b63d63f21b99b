"""Sampling of tokens: n rows, V vocabulary. Log-probabilities are those of the truncated, tempered distribution."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

GOLDEN, MIX_1, MIX_2 = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15  # as signed numbers of 64 bits
CACHED = 2**19  # numbers of a part of the rows: with temporary values in double precision as much as a core's cache


@dataclass(frozen=True)
class RowParams:
    """`SamplingParams` of every row, as tensors.

    Attributes:
        truncates: False promises that no row has top-k, top-p or min-p, which saves sorting.
        greedy: False promises that every temperature is positive.
    """

    temperature: Float[Tensor, " n"]
    top_p: Float[Tensor, " n"]
    top_k: Int[Tensor, " n"]
    min_p: Float[Tensor, " n"]
    truncates: bool = True
    greedy: bool = True

    def __getitem__(self, rows: slice) -> RowParams:
        kept = (self.temperature[rows], self.top_p[rows], self.top_k[rows], self.min_p[rows])
        return RowParams(*kept, self.truncates, self.greedy)


def parts(logits: Float[Tensor, "n V"]) -> list[slice]:
    """The rows in parts to be sampled from one after the other.

    On a CPU, where sampling makes several passes over a vocabulary, a part and its temporary values stay in the cache:
    four times as fast at V = 49,152. Elsewhere it is one part.
    """
    n, size = logits.shape
    rows = max(1, CACHED // size) if logits.device.type == "cpu" else n
    return [slice(begin, begin + rows) for begin in range(0, n, rows)]


def processed_logprobs(logits: Float[Tensor, "n V"], params: RowParams) -> Float[Tensor, "n V"]:
    """Float32 log-probabilities after temperature, top-k, top-p and min-p; -inf for excluded tokens.

    Greedy rows (temperature 0) use temperature 1.
    """
    temperature = params.temperature
    if params.greedy:
        temperature = torch.where(temperature > 0, temperature, 1.0)
    log_p = torch.log_softmax(logits.float() / temperature[:, None], dim=-1)
    return _truncate(log_p, params) if params.truncates else log_p


def _truncate(log_p: Float[Tensor, "n V"], params: RowParams) -> Float[Tensor, "n V"]:
    """Applies top-k, then top-p to the remaining tokens, then min-p; each keeps at least the likeliest token."""
    ordered, order = log_p.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(log_p.shape[-1], device=log_p.device)
    top_k = torch.where(params.top_k > 0, params.top_k, log_p.shape[-1])
    ordered = ordered.masked_fill(rank >= top_k[:, None], -torch.inf).log_softmax(-1)
    before = ordered.exp().cumsum(-1) - ordered.exp()  # probability of all likelier tokens
    drop = (before >= params.top_p[:, None]) & (params.top_p[:, None] < 1)
    drop |= ordered < ordered[:, :1] + params.min_p[:, None].log()
    drop[:, 0] = False
    ordered = ordered.masked_fill(drop, -torch.inf).log_softmax(-1)
    return torch.empty_like(log_p).scatter_(-1, order, ordered)


def draw(
    log_p: Float[Tensor, "n V"], params: RowParams, uniform: Float[Tensor, "n 1"]
) -> tuple[Int[Tensor, " n"], Float[Tensor, " n"]]:
    """Samples one token per row, with its log-probability; `uniform` are random numbers from 0 to 1, in float64.

    Uses the inverse CDF: one random number per row instead of one per vocabulary entry. Summation is in double
    precision: neither a float32 sum over a large vocabulary nor a float32 random number (24 bits) would give unlikely
    tokens their probability. A token of probability 0 is never sampled.
    """
    cdf = log_p.exp().cumsum(-1, dtype=torch.float64)
    tokens = torch.searchsorted(cdf, uniform * cdf[:, -1:], right=True)[:, 0]  # rounding keeps u * total < total
    if params.greedy:
        tokens = torch.where(params.temperature > 0, tokens, log_p.argmax(-1))
    return tokens, log_p.gather(-1, tokens[:, None])[:, 0]


def stream_uniform(stream: Int[Tensor, " n"], position: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Random numbers from 0 to 1 that depend on their stream and position alone, in float64.

    SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) at the position, of a sequence that begins
    with SplitMix64 of the stream.
    """
    bits = _split_mix(_split_mix(stream * GOLDEN) + position * GOLDEN)
    return ((bits >> 11) & (2**53 - 1)).double() * 2.0**-53


def _split_mix(z: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
    """Mixing function of SplitMix64; products are modulo 2^64."""
    z = (z ^ ((z >> 30) & (2**34 - 1))) * MIX_1
    z = (z ^ ((z >> 27) & (2**37 - 1))) * MIX_2
    return z ^ ((z >> 31) & (2**33 - 1))
