"""The rows that an embedded engine decodes together. Active rows are always the first n of S slots.

Everything per row is a tensor, so that the work of one token does not grow with Python; only rows that finish are
looked at one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lit_async_rl.engine import Completion
from lit_async_rl.llama_forward import LlamaForward
from lit_async_rl.network import CausalPolicy
from lit_async_rl.request_queue import Pending
from lit_async_rl.sampling import RowParams, draw, processed_logprobs
from lit_async_rl.slot_cache import SlotCache
from lit_async_rl.types import FinishReason

NO_TOKEN = -1


class Slots:
    """Prefill, decode and bookkeeping; no threads.

    Args:
        lm: the model; read in evaluation mode, without gradients.
        num_slots: S.
        eos_token_ids: end every completion.
        seed: of the random numbers.
    """

    def __init__(self, lm: PreTrainedModel, num_slots: int, eos_token_ids: Sequence[int], seed: int) -> None:
        if lm.config._attn_implementation not in ("sdpa", "eager"):
            raise ValueError(
                f"the embedded engine needs the attention implementation sdpa or eager, whose masks it can give; the "
                f"model has {lm.config._attn_implementation!r}"
            )
        self.lm = lm
        self._policy = CausalPolicy(lm)
        self._llama = LlamaForward(lm) if LlamaForward.supports(lm) else None
        self._eos_token_ids = tuple(eos_token_ids)
        self._cache = SlotCache(num_slots)
        self._owners: list[tuple[int, int]] = []  # (request id, sample index) of each active row
        self.device = next(lm.parameters()).device
        self.generator = torch.Generator(device=self.device).manual_seed(seed)
        rows: dict[str, Any] = {"device": self.device, "dtype": torch.long}
        self._position = torch.zeros(num_slots, **rows)  # of the last token, which has no keys and values yet
        self._last = torch.zeros(num_slots, **rows)
        self._count = torch.zeros(num_slots, **rows)  # completion tokens so far
        self._max_tokens = torch.zeros(num_slots, **rows)
        self._stops = torch.full((num_slots, 1), NO_TOKEN, **rows)
        self._tokens = torch.zeros(num_slots, 0, **rows)
        self._versions = torch.zeros(num_slots, 0, **rows)
        self._logprobs = torch.zeros(num_slots, 0, device=self.device)
        self._temperature = torch.ones(num_slots, device=self.device)
        self._top_p = torch.ones(num_slots, device=self.device)
        self._top_k = torch.zeros(num_slots, **rows)
        self._min_p = torch.zeros(num_slots, device=self.device)
        self._truncates = self._greedy = False
        self._longest = 0  # upper bound on the position of any active row, known without asking the device

    @property
    def vocab_size(self) -> int:
        """Token ids that the model can read are smaller than this."""
        embeddings: Any = self.lm.get_input_embeddings()
        return embeddings.weight.shape[0]

    @property
    def num_active(self) -> int:
        """Rows being decoded."""
        return len(self._owners)

    # -- one token ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def admit(self, pending: Sequence[Pending], version: int) -> list[Completion]:
        """Reads the prompts, samples the first token of each of their completions; returns what is finished already."""
        prompts = list(dict.fromkeys(item.request.prompt_ids for item in pending))  # each once
        lengths = torch.tensor([len(ids) for ids in prompts], device=self.device)
        width = max(len(ids) for ids in prompts)
        input_ids = torch.tensor([ids + (0,) * (width - len(ids)) for ids in prompts], device=self.device)
        causal = torch.ones(width, width, dtype=torch.bool, device=self.device).tril()[None, None]
        self._cache.begin_prefill()
        hidden = self._forward(input_ids, torch.arange(width, device=self.device)[None], causal)
        counts = torch.tensor([item.num_samples for item in pending], device=self.device)
        owner = torch.tensor([prompts.index(item.request.prompt_ids) for item in pending], device=self.device)
        source = owner.repeat_interleave(counts)
        begin = self.num_active
        needed = max(len(item.request.prompt_ids) + item.request.sampling.max_tokens for item in pending)
        self._cache.end_prefill(source, begin, needed)
        for item in pending:
            self._open_rows(item)
        rows = slice(begin, self.num_active)
        self._position[rows] = lengths[source] - 1
        self._longest = max(self._longest, width - 1)
        logits = self._policy.logits(hidden[torch.arange(len(prompts), device=self.device), lengths - 1])
        return self._commit(logits[source], rows, version)

    @torch.no_grad()
    def decode(self, version: int) -> list[Completion]:
        """Samples one token for every active row."""
        n = self.num_active
        positions = self._position[:n]
        view = min(self._cache.max_len, -(-(self._longest + 1) // 16) * 16)
        self._cache.begin_decode(positions, view)
        mask = torch.arange(view, device=self.device)[None] <= positions[:, None]
        hidden = self._forward(self._last[:n, None], positions[:, None], mask[:, None, None])
        return self._commit(self._policy.logits(hidden[:, 0]), slice(0, n), version)

    def _forward(self, input_ids: Tensor, position_ids: Tensor, mask: Tensor) -> Tensor:
        position_ids = position_ids.expand(len(input_ids), -1)
        # Added to the scores: eager attention needs it so, the others would make it so in every layer.
        mask = torch.zeros(mask.shape, device=self.device, dtype=self.lm.dtype).masked_fill_(~mask, -torch.inf)
        if self._llama is not None:
            return self._llama(input_ids, position_ids, mask, self._cache)
        output = self.lm.base_model(
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=mask,
            past_key_values=self._cache,
            use_cache=True,
        )
        return output.last_hidden_state

    def _commit(self, logits: Tensor, rows: slice, version: int) -> list[Completion]:
        """Draws a token for each of `rows`, notes it, and closes the rows that are finished."""
        params = RowParams(
            *(self._temperature[rows], self._top_p[rows], self._top_k[rows], self._min_p[rows]),
            *(self._truncates, self._greedy),
        )
        log_p = processed_logprobs(logits, params)
        tokens, logprobs = draw(log_p, params, self.generator)
        column = self._count[rows, None]
        self._tokens[rows].scatter_(1, column, tokens[:, None])
        self._logprobs[rows].scatter_(1, column, logprobs[:, None])
        self._versions[rows].scatter_(1, column, version)
        self._count[rows] += 1
        self._position[rows] += 1
        self._longest += 1
        self._last[rows] = tokens
        stopped = (tokens[:, None] == self._stops[rows]).any(1)
        done = stopped | (self._count[rows] >= self._max_tokens[rows])
        if not done.any():
            return []
        first = rows.start
        closing = [(first + n, bool(stopped[n])) for n in done.nonzero()[:, 0].tolist()]
        finished = [self._completion(row, "stop" if stop else "length") for row, stop in closing]
        for row, _ in reversed(closing):
            self._close_row(row)
        return finished

    # -- rows ---------------------------------------------------------------------------------------------------------

    def _open_rows(self, item: Pending) -> None:
        sampling, begin = item.request.sampling, self.num_active
        samples = range(item.first_sample, item.first_sample + item.num_samples)
        self._owners += [(item.request.id, sample) for sample in samples]
        rows = slice(begin, self.num_active)
        self._reserve_columns(sampling.max_tokens)
        self._count[rows] = 0
        self._max_tokens[rows] = sampling.max_tokens
        self._temperature[rows], self._top_p[rows] = sampling.temperature, sampling.top_p
        self._top_k[rows], self._min_p[rows] = sampling.top_k, sampling.min_p
        self._truncates |= sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0
        self._greedy |= sampling.temperature == 0
        stops = self._eos_token_ids + sampling.stop_token_ids
        if len(stops) > self._stops.shape[1]:
            self._stops = _widen(self._stops, len(stops), NO_TOKEN)
        self._stops[rows] = NO_TOKEN
        self._stops[rows, : len(stops)] = torch.tensor(stops, dtype=torch.long, device=self.device)

    def _reserve_columns(self, width: int) -> None:
        if width > self._tokens.shape[1]:
            self._tokens = _widen(self._tokens, width, 0)
            self._versions = _widen(self._versions, width, 0)
            self._logprobs = _widen(self._logprobs, width, 0)

    def partial_completions(self) -> list[Completion]:
        """What every active row has so far."""
        return [self._completion(row, "abort") for row in range(self.num_active)]

    def _completion(self, row: int, reason: FinishReason) -> Completion:
        count = int(self._count[row])
        request_id, sample = self._owners[row]
        return Completion(
            request_id=request_id,
            sample_index=sample,
            token_ids=tuple(self._tokens[row, :count].tolist()),
            logprobs=tuple(self._logprobs[row, :count].tolist()),
            versions=tuple(self._versions[row, :count].tolist()),
            finish_reason=reason,
        )

    def _close_row(self, row: int) -> None:
        """Moves the last active row into the hole."""
        last = self.num_active - 1
        if row != last:
            self._cache.move(last, row, int(self._position[last]))
            for per_row in (
                *(self._position, self._last, self._count, self._max_tokens, self._stops),
                *(self._tokens, self._versions, self._logprobs),
                *(self._temperature, self._top_p, self._top_k, self._min_p),
            ):
                per_row[row] = per_row[last]
            self._owners[row] = self._owners[last]
        self._owners.pop()
        self._longest = int(self._position[: self.num_active].max()) if self._owners else 0
        self._truncates &= bool(self._owners)
        self._greedy &= bool(self._owners)

    def drop(self, request_ids: set[int]) -> None:
        """Closes all rows of these requests."""
        for row in reversed(range(self.num_active)):
            if self._owners[row][0] in request_ids:
                self._close_row(row)


def _widen(values: Tensor, width: int, fill: int) -> Tensor:
    wide = values.new_full((values.shape[0], width), fill)
    wide[:, : values.shape[1]] = values
    return wide
