"""Per-row state of the embedded engine as tensors: S slots, C columns for completion tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lit_async_rl.engines.base import SamplingParams
from lit_async_rl.engines.embedded.heads import HeadRecorder
from lit_async_rl.engines.embedded.sampling import RowParams, draw, parts, processed_logprobs, stream_uniform

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
        values = (self.temperature[rows], self.top_p[rows], self.top_k[rows], self.min_p[rows])
        return RowParams(*values, self._truncates, self._greedy)

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
        self.position[rows], self.last[rows] = len(prompt) - 1, prompt[-1]
        self.count[rows] = 0
        self.max_tokens[rows] = sampling.max_tokens
        self.temperature[rows], self.top_p[rows] = sampling.temperature, sampling.top_p
        self.top_k[rows], self.min_p[rows] = sampling.top_k, sampling.min_p
        self._truncates |= sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0
        self._greedy |= sampling.temperature == 0
        self.stream[rows] = NO_STREAM if stream is None else stream + self.all_rows[: len(rows)]
        self._has_streams |= stream is not None
        self.stops[rows] = NO_TOKEN
        self.stops[rows, : len(stops)] = torch.tensor(stops, dtype=torch.long, device=rows.device)

    def sample(self, rows: slice | Tensor, logits: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draws the tokens that `append` adds next, with log-probabilities; records what requests ask for."""
        params, index, drawn = self.params(rows), self.all_rows[rows], []
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
        index, column, alive = self.all_rows[rows], self.count[rows], self.alive[rows]
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
