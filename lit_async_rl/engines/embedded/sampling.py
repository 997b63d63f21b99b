"""Sampling of the embedded engine: distributions, draws and records, and the state of each row as tensors.

S slots, C columns for completion tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lit_async_rl.sampler_records import SamplerHead
from lit_async_rl.types import SamplingParams
from lit_async_rl.utils.device_memory import to_device

# -- Heads of the sampling distributions: S slots, C columns, k likeliest tokens --------------------------------------


class HeadRecorder:
    """Records entropy and likeliest tokens at every sampled token while a request needs them (`width` is not None).

    Costs nothing otherwise. Its tensors grow with the columns and the largest k.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self.width: int | None = None  # largest requested k; None records nothing
        self._entropy = torch.zeros(num_slots, 0, device=device)
        self._ids = torch.zeros(num_slots, 0, 0, dtype=torch.int32, device=device)
        self._logprobs = torch.zeros(num_slots, 0, 0, device=device)

    def reserve(self, columns: int, width: int | None) -> None:
        """Allocates `columns` tokens per row with `width` entries each; a `width` of None needs no recording."""
        if width is None and self.width is None:
            return
        self.width = max(width or 0, self.width or 0)
        slots, known, entries = self._ids.shape
        if columns > known or self.width > entries:
            columns = max(columns, known)
            entries = max(self.width, entries)
            self._entropy = grown(self._entropy, (slots, columns))
            self._ids = grown(self._ids, (slots, columns, entries))
            self._logprobs = grown(self._logprobs, (slots, columns, entries), -torch.inf)

    def append(self, rows: Int[Tensor, " n"], columns: Int[Tensor, " n"], log_p: Float[Tensor, "n V"]) -> None:
        """Records the distributions `log_p` of the tokens in `columns` of `rows`."""
        if self.width is None:
            return
        possible = log_p > -torch.inf
        self._entropy[rows, columns] = -torch.where(possible, log_p.exp() * log_p, 0.0).sum(-1)
        top = log_p.topk(min(self.width, log_p.shape[-1]), dim=-1)
        entries = slice(0, top.values.shape[-1])
        self._ids[rows, columns, entries] = top.indices.to(torch.int32)
        self._logprobs[rows, columns, entries] = top.values

    def of(self, row: int, length: int, width: int) -> SamplerHead:
        """Head of the first `length` tokens of a row, with `width` entries."""
        parts = (self._entropy[row, :length], self._ids[row, :length, :width], self._logprobs[row, :length, :width])
        return SamplerHead(*(part.to("cpu", copy=True) for part in parts))  # copies: another row reuses the slot

    def move(self, sources: Int[Tensor, " k"], targets: Int[Tensor, " k"]) -> None:
        """Moves rows to other slots."""
        if self.width is not None:
            for values in (self._entropy, self._ids, self._logprobs):
                values[targets] = values[sources]


def grown(values: Tensor, shape: tuple[int, ...], fill: int | float = 0) -> Tensor:
    """A larger tensor with these values, and `fill` at its further places."""
    larger = values.new_full(shape, fill)
    larger[tuple(slice(0, size) for size in values.shape)] = values
    return larger


# -- Sampling of tokens: n rows, V vocabulary. Log-probabilities are those of the truncated, tempered distribution ----


# constants of SplitMix64, as signed 64-bit numbers, because torch has few operations on unsigned ones
SPLITMIX_INCREMENT = -0x61C8864680B583EB
SPLITMIX_MULTIPLIER_1 = -0x40A7B892E31B1A47
SPLITMIX_MULTIPLIER_2 = -0x6B2FB644ECCEEE15
MAX_CACHED_VALUES = 2**19  # logits sampled at a time on a CPU: with float64 temporaries they fill a core's cache


@dataclass
class RowParams:
    """`SamplingParams` of every row, as tensors.

    Attributes:
        temperature: divisor of the logits; 0 is greedy.
        top_p: largest probability mass to keep; 1 keeps all tokens.
        top_k: number of likeliest tokens to keep; 0 or less keeps all.
        min_p: smallest probability to keep, relative to the likeliest token.
        truncates: False guarantees that no row has top-k, top-p or min-p, which saves sorting.
        greedy: False guarantees that every temperature is positive.
    """

    temperature: Float[Tensor, " n"]
    top_p: Float[Tensor, " n"]
    top_k: Int[Tensor, " n"]
    min_p: Float[Tensor, " n"]
    truncates: bool = True
    greedy: bool = True

    def __getitem__(self, rows: slice | Tensor) -> RowParams:
        return replace(
            self,
            temperature=self.temperature[rows],
            top_p=self.top_p[rows],
            top_k=self.top_k[rows],
            min_p=self.min_p[rows],
        )


def parts(logits: Float[Tensor, "n V"]) -> list[slice]:
    """Parts of the rows, to sample one after the other.

    On a CPU a part and its temporary values fit into the cache, which makes the passes over the vocabulary four times
    as fast at V = 49,152. Other devices have one part.
    """
    n, size = logits.shape
    rows = max(1, MAX_CACHED_VALUES // size) if logits.device.type == "cpu" else n
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
    drop[:, 0].fill_(False)
    ordered = ordered.masked_fill(drop, -torch.inf).log_softmax(-1)
    return torch.empty_like(log_p).scatter_(-1, order, ordered)


def draw(
    log_p: Float[Tensor, "n V"], params: RowParams, uniform: Float[Tensor, "n 1"]
) -> tuple[Int[Tensor, " n"], Float[Tensor, " n"]]:
    """Samples one token per row by the inverse CDF, and returns its log-probability.

    Needs one random number per row instead of one per vocabulary entry. Sums are in float64: neither a float32 sum over
    a large vocabulary nor a float32 random number (24 bits) would give unlikely tokens their probability. A token of
    probability 0 is never sampled.

    Args:
        log_p: log-probabilities of each row.
        params: sampling parameters of the rows.
        uniform: random numbers in [0, 1), in float64.
    """
    cdf = log_p.exp().cumsum(-1, dtype=torch.float64)
    tokens = torch.searchsorted(cdf, uniform * cdf[:, -1:], right=True)[:, 0]  # rounding keeps u * total < total
    if params.greedy:
        tokens = torch.where(params.temperature > 0, tokens, log_p.argmax(-1))
    return tokens, log_p.gather(-1, tokens[:, None])[:, 0]


def stream_uniform(stream: Int[Tensor, " n"], position: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Random numbers in [0, 1), in float64, that depend on stream and position only.

    Entry `position` of the SplitMix64 sequence (Steele, Lea and Flood, OOPSLA 2014) seeded with SplitMix64 of the
    stream.
    """
    bits = _split_mix(_split_mix(stream * SPLITMIX_INCREMENT) + position * SPLITMIX_INCREMENT)
    return ((bits >> 11) & (2**53 - 1)).double() * 2.0**-53


def _split_mix(z: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
    """Mixing function of SplitMix64; products are modulo 2^64."""
    z = (z ^ ((z >> 30) & (2**34 - 1))) * SPLITMIX_MULTIPLIER_1
    z = (z ^ ((z >> 27) & (2**37 - 1))) * SPLITMIX_MULTIPLIER_2
    return z ^ ((z >> 31) & (2**33 - 1))


NO_TOKEN = NO_STREAM = -1
REACHED_LIMIT = 1  # outcome of a token, which continues the completion otherwise
AT_STOP = 2
Tokens = tuple[tuple[int, ...], tuple[float, ...], tuple[int, ...]]


class RowState:
    """State of all rows as tensors with one entry per slot: the Python cost of a token does not grow with the rows.

    Entries of a free slot (`alive` 0) are computed, too, but do not change.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        rows: dict[str, Any] = {"device": device, "dtype": torch.long}
        self.all_rows = torch.arange(num_slots, **rows)
        self.alive = torch.zeros(num_slots, **rows)  # 1 or 0
        self.position = torch.zeros(num_slots, **rows)  # of the last token, the next one to decode
        self.last = torch.zeros(num_slots, **rows)
        self.count = torch.zeros(num_slots, **rows)  # completion tokens so far
        self.max_tokens = torch.zeros(num_slots, **rows)
        self.stops = torch.full((num_slots, 1), NO_TOKEN, **rows)
        self.tokens = torch.zeros(num_slots, 0, **rows)
        self.versions = torch.zeros(num_slots, 0, **rows)
        self.logprobs = torch.zeros(num_slots, 0, device=device)
        self.version = torch.zeros((), **rows)  # of the weights, for the tokens that `append` appends
        self.heads = HeadRecorder(num_slots, device)
        self.params = RowParams(
            temperature=torch.ones(num_slots, device=device),
            top_p=torch.ones(num_slots, device=device),
            top_k=torch.zeros(num_slots, **rows),
            min_p=torch.zeros(num_slots, device=device),
            truncates=False,
            greedy=False,
        )
        self.stream = torch.full((num_slots,), NO_STREAM, **rows)  # of random numbers; without one, the engine's
        self._has_streams = False

    @property
    def flags(self) -> tuple[bool, bool, bool]:
        """Whether any row truncates, is greedy or has a stream: sampling leaves out the rest."""
        return self.params.truncates, self.params.greedy, self._has_streams

    @property
    def memory(self) -> list[Tensor]:
        """Tensors that move to other memory as they grow."""
        return [self.stops, self.tokens, self.versions, self.logprobs]

    def open(
        self,
        rows: Int[Tensor, " n"],
        sampling: SamplingParams,
        stops: Sequence[int],
        prompt: tuple[int, ...],
        stream: int | None = None,
    ) -> None:
        """Starts completions of one prompt.

        Args:
            rows: slots.
            sampling: sampling parameters.
            stops: tokens that end a completion.
            prompt: its token ids; the first token is sampled after the last of these.
            stream: stream of random numbers of the first row, with the following ones for the others, see
                `GenerationRequest.seed`; None takes the engine's generator.
        """
        self._reserve(sampling.max_tokens + 1, len(stops))  # one more, into which finished rows write
        self.heads.reserve(self.tokens.shape[1], sampling.head)
        self.alive[rows] = 1
        self.position[rows] = len(prompt) - 1
        self.last[rows] = prompt[-1]
        self.count[rows] = 0
        self.max_tokens[rows] = sampling.max_tokens
        params = self.params
        params.temperature[rows] = sampling.temperature
        params.top_p[rows] = sampling.top_p
        params.top_k[rows] = sampling.top_k
        params.min_p[rows] = sampling.min_p
        params.truncates |= sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0
        params.greedy |= sampling.temperature == 0
        self.stream[rows] = NO_STREAM if stream is None else stream + self.all_rows[: len(rows)]
        self._has_streams |= stream is not None
        self.stops[rows] = NO_TOKEN
        self.stops[rows, : len(stops)] = to_device(stops, rows.device)

    def sample(self, rows: slice | Tensor, logits: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Samples the next token of each row, with its log-probability, and records heads for requests with `head`."""
        params = self.params[rows]
        index = self.all_rows[rows]
        samples = []
        for part in parts(logits):
            log_p = processed_logprobs(logits[part], params[part])
            samples.append(draw(log_p, params[part], self._uniform(index[part], generator)))
            self.heads.append(index[part], self.count[index[part]], log_p)
        tokens, logprobs = zip(*samples, strict=True)
        return torch.cat(tokens), torch.cat(logprobs)

    def _uniform(self, rows: Int[Tensor, " n"], generator: torch.Generator) -> Float[Tensor, "n 1"]:
        uniform = torch.rand(len(rows), dtype=torch.float64, device=rows.device, generator=generator)
        if self._has_streams:
            stream = self.stream[rows]
            uniform = torch.where(stream == NO_STREAM, uniform, stream_uniform(stream, self.position[rows]))
        return uniform[:, None]

    def append(self, rows: slice | Tensor, tokens: Tensor, logprobs: Tensor) -> Int[Tensor, " n"]:
        """Appends one token of `version` per row; returns `REACHED_LIMIT`, `AT_STOP` or 0, and 0 for free rows."""
        index = self.all_rows[rows]
        column = self.count[rows]
        alive = self.alive[rows]
        self.tokens[index, column] = tokens
        self.logprobs[index, column] = logprobs
        self.versions[index, column] = self.version
        self.count[rows] = count = column + alive
        self.position[rows] += alive
        self.last[rows] = tokens
        stopped = (tokens[:, None] == self.stops[rows]).any(1)
        outcomes = torch.where(stopped, AT_STOP, REACHED_LIMIT * (count >= self.max_tokens[rows]).long()) * alive
        self.alive[rows] = torch.where(outcomes == 0, alive, 0)  # further steps may come before Python sees it
        return outcomes

    def completions(self, rows: Sequence[int], lengths: Sequence[int]) -> list[Tokens]:
        """The first `lengths` tokens, log-probabilities and versions of `rows`, in one transfer from the device."""
        width = max(lengths, default=0)
        if not width:
            return [((), (), ()) for _ in rows]
        index = to_device(rows, self.count.device)
        bits = self.logprobs.view(torch.int32)  # the same type for all, so that one transfer takes them
        packed = torch.stack([self.tokens[index, :width], self.versions[index, :width], bits[index, :width].long()])
        tokens, versions, bits = packed.cpu()
        logprobs = bits.to(torch.int32).view(torch.float32)
        return [
            (tuple(row_tokens[:n]), tuple(row_logprobs[:n]), tuple(row_versions[:n]))
            for n, row_tokens, row_logprobs, row_versions in zip(
                lengths, tokens.tolist(), logprobs.tolist(), versions.tolist(), strict=True
            )
        ]

    def move(self, sources: Int[Tensor, " k"], targets: Int[Tensor, " k"]) -> None:
        """Moves rows to other slots, which may be among `sources`; sources without a new row become free."""
        alive = self.alive[sources]
        for values in (
            self.position,
            self.last,
            self.count,
            self.max_tokens,
            self.stops,
            self.tokens,
            self.versions,
            self.logprobs,
            self.params.temperature,
            self.params.top_p,
            self.params.top_k,
            self.params.min_p,
            self.stream,
        ):
            values[targets] = values[sources]
        self.heads.move(sources, targets)
        self.alive[sources] = 0
        self.alive[targets] = alive

    def reset_settings(self) -> None:
        """Resets flags derived from sampling parameters; call it when no row is active."""
        self.params.truncates = self.params.greedy = self._has_streams = False
        self.heads.width = None

    def _reserve(self, columns: int, num_stops: int) -> None:
        num_slots, num_columns = self.tokens.shape
        if columns > num_columns:
            self.tokens = grown(self.tokens, (num_slots, columns))
            self.versions = grown(self.versions, (num_slots, columns))
            self.logprobs = grown(self.logprobs, (num_slots, columns))
        if num_stops > self.stops.shape[1]:
            self.stops = grown(self.stops, (num_slots, num_stops), NO_TOKEN)
