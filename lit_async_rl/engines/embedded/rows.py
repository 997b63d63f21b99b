"""Per-row state of the embedded engine as tensors: S slots, C columns for completion tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lit_async_rl.types import SamplerHead, SamplingParams

# -- Heads of the sampling distributions of the embedded engine's rows: S slots, C columns, k tokens ------------------


class HeadRecorder:
    """Records entropy and likeliest tokens of every sampled token, while any request asks for it.

    Costs nothing otherwise. Its tensors grow with the number of columns and with the largest k.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self.width: int | None = None  # largest k that was asked for; None records nothing
        self._entropy = torch.zeros(num_slots, 0, device=device)
        self._ids = torch.zeros(num_slots, 0, 0, dtype=torch.int32, device=device)
        self._logprobs = torch.zeros(num_slots, 0, 0, device=device)

    def reserve(self, columns: int, width: int | None) -> None:
        """Makes room for `columns` tokens per row and `width` entries of each; None asks for no recording."""
        if width is None and self.width is None:
            return
        self.width = max(width or 0, self.width or 0)
        slots, known, entries = self._ids.shape
        if columns > known or self.width > entries:
            columns = max(columns, known)
            entries = max(self.width, entries)
            self._entropy = _grow(self._entropy, (slots, columns), 0.0)
            self._ids = _grow(self._ids, (slots, columns, entries), 0.0)
            self._logprobs = _grow(self._logprobs, (slots, columns, entries), -torch.inf)

    def append(self, rows: Int[Tensor, " n"], columns: Int[Tensor, " n"], log_p: Float[Tensor, "n V"]) -> None:
        """Records the distributions that the tokens in `columns` of `rows` are sampled from."""
        if self.width is None:
            return
        possible = log_p > -torch.inf
        self._entropy[rows, columns] = -torch.where(possible, log_p.exp() * log_p, 0.0).sum(-1)
        best = log_p.topk(min(self.width, log_p.shape[-1]), dim=-1)
        here = slice(0, best.values.shape[-1])
        self._ids[rows, columns, here] = best.indices.to(torch.int32)
        self._logprobs[rows, columns, here] = best.values

    def of(self, row: int, length: int, width: int) -> SamplerHead:
        """Head of the first `length` tokens of a row, with `width` entries."""
        parts = (self._entropy[row, :length], self._ids[row, :length, :width], self._logprobs[row, :length, :width])
        return SamplerHead(*(part.to("cpu", copy=True) for part in parts))

    def move(self, sources: Int[Tensor, " k"], targets: Int[Tensor, " k"]) -> None:
        """Moves rows to other slots."""
        if self.width is not None:
            for values in (self._entropy, self._ids, self._logprobs):
                values[targets] = values[sources]

    def forget(self) -> None:
        """Stops recording until the next request that asks for it."""
        self.width = None


def _grow(values: Tensor, shape: tuple[int, ...], fill: float) -> Tensor:
    grown = values.new_full(shape, fill)
    grown[tuple(slice(0, size) for size in values.shape)] = values
    return grown


# -- Sampling of tokens: n rows, V vocabulary. Log-probabilities are those of the truncated, tempered distribution


GOLDEN = -0x61C8864680B583EB  # as signed numbers of 64 bits
MIX_1 = -0x40A7B892E31B1A47
MIX_2 = -0x6B2FB644ECCEEE15
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
        return RowParams(
            temperature=self.temperature[rows],
            top_p=self.top_p[rows],
            top_k=self.top_k[rows],
            min_p=self.min_p[rows],
            truncates=self.truncates,
            greedy=self.greedy,
        )


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


NO_TOKEN = NO_STREAM = -1
Tokens = tuple[tuple[int, ...], tuple[float, ...], tuple[int, ...]]


class RowState:
    """Tensors with one entry per slot, so that the Python cost of a token does not grow with the rows.

    Entries of a free slot (`alive` 0) take part in the arithmetic but do not change.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        rows: dict[str, Any] = {"device": device, "dtype": torch.long}
        self.all_rows = torch.arange(num_slots, **rows)
        self.alive = torch.zeros(num_slots, **rows)  # 1 or 0
        self.position = torch.zeros(num_slots, **rows)  # of the last token, which has no keys and values yet
        self.last = torch.zeros(num_slots, **rows)
        self.count = torch.zeros(num_slots, **rows)  # completion tokens so far
        self.max_tokens = torch.zeros(num_slots, **rows)
        self.stops = torch.full((num_slots, 1), NO_TOKEN, **rows)
        self.tokens = torch.zeros(num_slots, 0, **rows)
        self.versions = torch.zeros(num_slots, 0, **rows)
        self.logprobs = torch.zeros(num_slots, 0, device=device)
        self.heads = HeadRecorder(num_slots, device)
        self.temperature = torch.ones(num_slots, device=device)
        self.top_p = torch.ones(num_slots, device=device)
        self.top_k = torch.zeros(num_slots, **rows)
        self.min_p = torch.zeros(num_slots, device=device)
        self.stream = torch.full((num_slots,), NO_STREAM, **rows)  # of the random numbers, or the engine's
        self._truncates = self._greedy = self._has_streams = False

    def params(self, rows: slice | Tensor) -> RowParams:
        """Sampling parameters of the rows."""
        return RowParams(
            temperature=self.temperature[rows],
            top_p=self.top_p[rows],
            top_k=self.top_k[rows],
            min_p=self.min_p[rows],
            truncates=self._truncates,
            greedy=self._greedy,
        )

    def open(
        self,
        rows: Int[Tensor, " n"],
        sampling: SamplingParams,
        stops: Sequence[int],
        prompt: tuple[int, ...],
        stream: int | None = None,
    ) -> None:
        """Starts completions of one prompt; the next token is sampled after its last one.

        Their random numbers are the streams from `stream` on, see `GenerationRequest.seed`.
        """
        self._reserve(sampling.max_tokens + 1, len(stops))  # the last column is written by rows that are finished
        self.heads.reserve(self.tokens.shape[1], sampling.head)
        self.alive[rows] = 1
        self.position[rows] = len(prompt) - 1
        self.last[rows] = prompt[-1]
        self.count[rows] = 0
        self.max_tokens[rows] = sampling.max_tokens
        self.temperature[rows] = sampling.temperature
        self.top_p[rows] = sampling.top_p
        self.top_k[rows] = sampling.top_k
        self.min_p[rows] = sampling.min_p
        self._truncates |= sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0
        self._greedy |= sampling.temperature == 0
        self.stream[rows] = NO_STREAM if stream is None else stream + self.all_rows[: len(rows)]
        self._has_streams |= stream is not None
        self.stops[rows] = NO_TOKEN
        self.stops[rows, : len(stops)] = torch.tensor(stops, dtype=torch.long, device=rows.device)

    def sample(self, rows: slice | Tensor, logits: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draws the tokens that `append` adds next, with log-probabilities; records what requests ask for."""
        params = self.params(rows)
        index = self.all_rows[rows]
        drawn = []
        for part in parts(logits):
            log_p = processed_logprobs(logits[part], params[part])
            drawn.append(draw(log_p, params[part], self._uniform(index[part], generator)))
            self.heads.append(index[part], self.count[index[part]], log_p)
        tokens, logprobs = zip(*drawn, strict=True)
        return torch.cat(tokens), torch.cat(logprobs)

    def _uniform(self, rows: Int[Tensor, " n"], generator: torch.Generator) -> Float[Tensor, "n 1"]:
        drawn = torch.rand(len(rows), dtype=torch.float64, device=rows.device, generator=generator)
        if self._has_streams:
            stream = self.stream[rows]
            drawn = torch.where(stream == NO_STREAM, drawn, stream_uniform(stream, self.position[rows]))
        return drawn[:, None]

    def append(self, rows: slice | Tensor, tokens: Tensor, logprobs: Tensor, version: int) -> tuple[Tensor, Tensor]:
        """Appends one token per row; returns the finished rows, and which of them ended with a stop token."""
        index = self.all_rows[rows]
        column = self.count[rows]
        alive = self.alive[rows]
        self.tokens[index, column] = tokens
        self.logprobs[index, column] = logprobs
        self.versions[index, column] = version
        self.count[rows] = count = column + alive
        self.position[rows] += alive
        self.last[rows] = tokens
        stopped = (tokens[:, None] == self.stops[rows]).any(1)
        return (stopped | (count >= self.max_tokens[rows])) & (alive > 0), stopped

    def completions(self, rows: Sequence[int]) -> list[Tokens]:
        """Tokens, log-probabilities and versions of `rows`, in one transfer from the device."""
        index = torch.tensor(rows, dtype=torch.long, device=self.count.device)
        counts = self.count[index].tolist()
        width = max(counts, default=0)
        columns = [values[index, :width].tolist() for values in (self.tokens, self.logprobs, self.versions)]
        return [
            (tuple(tokens[:n]), tuple(logprobs[:n]), tuple(versions[:n]))
            for n, tokens, logprobs, versions in zip(counts, *columns, strict=True)
        ]

    def move(self, sources: Int[Tensor, " k"], targets: Int[Tensor, " k"]) -> None:
        """Moves rows to other slots, which may be among `sources`; a slot that is only left is free then."""
        alive = self.alive[sources]
        for values in (
            *(self.position, self.last, self.count, self.max_tokens, self.stops),
            *(self.tokens, self.versions, self.logprobs),
            *(self.temperature, self.top_p, self.top_k, self.min_p, self.stream),
        ):
            values[targets] = values[sources]
        self.heads.move(sources, targets)
        self.alive[sources] = 0
        self.alive[targets] = alive

    def longest(self) -> int:
        """Highest position of any active row."""
        return int((self.position * self.alive).max())

    def positions(self, num_rows: int) -> list[int]:
        """Positions of the first rows, 0 of those that are free."""
        return (self.position[:num_rows] * self.alive[:num_rows]).tolist()

    def forget_settings(self) -> None:
        """Resets the flags derived from sampling parameters; call it when no row is active."""
        self._truncates = self._greedy = self._has_streams = False
        self.heads.forget()

    def _reserve(self, columns: int, num_stops: int) -> None:
        if columns > self.tokens.shape[1]:
            self.tokens = _widen(self.tokens, columns, 0)
            self.versions = _widen(self.versions, columns, 0)
            self.logprobs = _widen(self.logprobs, columns, 0)
        if num_stops > self.stops.shape[1]:
            self.stops = _widen(self.stops, num_stops, NO_TOKEN)


def _widen(values: Tensor, width: int, fill: int) -> Tensor:
    wide = values.new_full((values.shape[0], width), fill)
    wide[:, : values.shape[1]] = values
    return wide
