"""Rows that an embedded engine decodes together.

A finished row stays in the arithmetic until the next prompt takes its slot, which is cheaper than compacting the rows
after every completion. They are compacted at once when many have accumulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel

from lit_async_rl.engines.base import Completion, GenerationRequest
from lit_async_rl.engines.embedded.experts import ExpertRecorder
from lit_async_rl.engines.embedded.forward import cache_and_forward
from lit_async_rl.engines.embedded.kv_cache import SlotCache
from lit_async_rl.engines.embedded.queue import Pending
from lit_async_rl.engines.embedded.row_order import RowOrder
from lit_async_rl.engines.embedded.rows import RowState
from lit_async_rl.engines.embedded.stop_check import StopCheck
from lit_async_rl.errors import InvariantError
from lit_async_rl.types import FinishReason


class Slots:
    """Prefill, decoding and bookkeeping of the rows; not thread-safe.

    Args:
        lm: the model; read in evaluation mode, without gradients.
        num_slots: S.
        eos_token_ids: end every completion.
        seed: of the random numbers.
        owns_weights: whether the model's parameters may be moved in memory, as no other object holds them.
        cache_class: what keeps the keys and values.
    """

    def __init__(
        self,
        lm: PreTrainedModel,
        num_slots: int,
        eos_token_ids: Sequence[int],
        seed: int,
        owns_weights: bool = False,
        cache_class: type[SlotCache] = SlotCache,
    ) -> None:
        self.lm = lm
        self.num_tokens = 0  # sampled so far
        self._eos_token_ids = tuple(eos_token_ids)
        self.num_slots = num_slots
        self.device = next(lm.parameters()).device
        self._cache, self._forward = cache_and_forward(lm, num_slots, owns_weights, cache_class)
        self.packed = self._forward.packed  # linear layers in the place of parameters
        self._experts = ExpertRecorder(lm, num_slots)
        self.generator = torch.Generator(device=self.device).manual_seed(seed)
        self._rows = RowState(num_slots, self.device)
        self._stop_check = StopCheck(lm, self._rows)
        self._owners: list[tuple[GenerationRequest, int] | None] = []  # and sample, of each slot up to the last in use
        self._num_active = 0
        self._prompts: list[tuple[int, ...] | None] = [None] * num_slots  # whose keys and values each slot begins with
        self._order = RowOrder(self._forward.reads_ranges)
        self._longest = 0  # upper bound on the position of any active row, known without asking the device

    @property
    def vocab_size(self) -> int:
        """Size of the input embedding; token ids must be smaller."""
        embeddings: Any = self.lm.get_input_embeddings()
        return embeddings.weight.shape[0]

    @property
    def num_active(self) -> int:
        """Number of rows being decoded."""
        return self._num_active

    def forget_prompts(self, longer_than: int = 0) -> None:
        """Invalidates cached prompts after a change of weights, or those that the cache has become too short for."""
        self._prompts = [p if p is not None and len(p) <= longer_than else None for p in self._prompts]

    def begin_batch(self, seed: int) -> None:
        """Re-seeds and clears all state, so that what follows is independent of earlier requests."""
        if self._num_active:
            raise InvariantError(f"{self._num_active} slots are in use")
        self.generator.manual_seed(seed)
        self.forget_prompts()
        self._cache.clear()

    # -- one token ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def admit(self, pending: Sequence[Pending], version: int) -> list[Completion]:
        """Starts completions and samples their first tokens; returns those that are already finished.

        Each prompt is prefilled once. If a slot still holds its KV cache, that is copied, and the prompt's last token
        is decoded together with those of all other rows.
        """
        if not self._experts.is_on and any(item.request.sampling.experts for item in pending):
            self._experts.begin()
            self.forget_prompts()  # they were read without being recorded
        num_rows = sum(item.num_samples for item in pending)
        free = [row for row, owner in enumerate(self._owners) if owner is None]
        free = (free + list(range(len(self._owners), self.num_slots)))[:num_rows]
        self._owners += [None] * (max(free) + 1 - len(self._owners))
        self._cache.fit(max(self._cache.max_len, *(len(item.request.prompt_ids) for item in pending)))
        kept = self._prompts if self._cache.rewinds else []
        slot_of = {prompt: slot for slot, prompt in enumerate(kept) if prompt is not None}
        known = [item for item in pending if item.request.prompt_ids in slot_of]
        fresh = [item for item in pending if item.request.prompt_ids not in slot_of]
        if known:
            sources = [slot_of[item.request.prompt_ids] for item in known for _ in range(item.num_samples)]
            targets, free = self._index(free[: len(sources)]), free[len(sources) :]
            self._copy(self._index(sources), targets)
            self._open_rows(known, targets)
        finished = self._read(fresh, self._index(free), version) if fresh else []
        return finished + self.decode(version) if known else finished

    def _read(self, pending: Sequence[Pending], rows: Int[Tensor, " n"], version: int) -> list[Completion]:
        prompts = list(dict.fromkeys(item.request.prompt_ids for item in pending))  # each once
        lengths = torch.tensor([len(ids) for ids in prompts], device=self.device)
        width = max(2, *(len(ids) for ids in prompts))  # a single column would be taken for a decode step
        input_ids = torch.tensor([ids + (0,) * (width - len(ids)) for ids in prompts], device=self.device)
        causal = torch.ones(width, width, dtype=torch.bool, device=self.device).tril()[None, None]
        self._cache.begin_prefill([len(ids) for ids in prompts])
        hidden = self._forward(input_ids, torch.arange(width, device=self.device)[None], causal)
        number = {prompt: n for n, prompt in enumerate(prompts)}
        source = self._index([number[item.request.prompt_ids] for item in pending for _ in range(item.num_samples)])
        self._cache.end_prefill(source, rows)
        self._experts.add_prompts((len(prompts), width), source, rows)
        self._open_rows(pending, rows)
        logits = self._forward.logits(hidden[torch.arange(len(prompts), device=self.device), lengths - 1])
        self.num_tokens += len(rows)
        return self._commit(logits[source], rows, version)

    @torch.no_grad()
    def decode(self, version: int) -> list[Completion]:
        """Samples one token for every active row."""
        if self._num_active < 3 / 4 * len(self._owners):
            self._close_holes()
        n = len(self._owners)
        if self._cache.fit(self._longest + 1):  # free rows are written to, too: at the new end, within longer prompts
            self.forget_prompts(longer_than=self._cache.max_len)
        if self._order.is_due:
            self._move(*self._order.sort(self._rows.positions(n), self._cache.max_len))
        # holes are written to, too: one that ended on the cache's last position would write into the next slot
        positions = self._rows.position[:n].clamp(max=self._cache.max_len - 1)
        self._cache.begin_decode(positions, *self._order.step(n))
        mask = torch.arange(self._cache.max_len, device=self.device) <= positions[:, None]
        hidden = self._forward(self._rows.last[:n, None], positions[:, None], mask[:, None, None])
        self._experts.add_tokens(positions, self._longest)
        self.num_tokens += self._num_active
        return self._commit(self._forward.logits(hidden[:, 0]), slice(0, n), version)

    def _commit(self, logits: Tensor, rows: slice | Tensor, version: int) -> list[Completion]:
        """Samples a token for each of `rows`, appends it, and closes the finished rows."""
        tokens, logprobs = self._rows.sample(rows, logits, self.generator)
        done, stopped = self._rows.append(rows, tokens, logprobs, version)
        if (at_stop := self._stop_check.stopped(rows, tokens, self._owners)) is not None:
            done, stopped = done | at_stop, stopped | at_stop
        self._longest += 1
        if not done.any():
            return []
        closing = self._rows.all_rows[rows][done].tolist()
        finished = self._completions(closing, ["stop" if stop else "length" for stop in stopped[done].tolist()])
        self._close_rows(closing)
        return finished

    # -- rows ---------------------------------------------------------------------------------------------------------

    def _index(self, rows: Sequence[int]) -> Int[Tensor, " n"]:
        return torch.tensor(rows, dtype=torch.long, device=self.device)

    def _open_rows(self, pending: Sequence[Pending], rows: Int[Tensor, " n"]) -> None:
        begin, slots = 0, rows.tolist()
        for item in pending:
            prompt, part = item.request.prompt_ids, slice(begin, begin + item.num_samples)
            begin += item.num_samples
            stops = item.request.sampling.ends(self._eos_token_ids)
            self._rows.open(rows[part], item.request.sampling, stops, prompt, item.stream)
            for sample, slot in enumerate(slots[part], start=item.first_sample):
                self._owners[slot] = (item.request, sample)
                self._prompts[slot] = prompt
            self._longest = max(self._longest, len(prompt) - 1)
            self._stop_check.begin(item.request.sampling.stop, self.vocab_size)
        self._num_active += begin
        self._order.forget()

    def partial_completions(self) -> list[Completion]:
        """Partial completions of all active rows."""
        rows = [row for row, owner in enumerate(self._owners) if owner is not None]
        return self._completions(rows, ["abort"] * len(rows))

    def _completions(self, rows: Sequence[int], reasons: Sequence[FinishReason]) -> list[Completion]:
        found = []
        for row, reason, (tokens, logprobs, versions) in zip(rows, reasons, self._rows.completions(rows), strict=True):
            owner = self._owners[row]
            if owner is None:
                raise InvariantError("a free slot gave a token")
            sampled: dict[str, Any] = dict(token_ids=tokens, logprobs=logprobs, versions=versions, finish_reason=reason)
            if (width := owner[0].sampling.head) is not None:
                sampled["head"] = self._rows.heads.of(row, len(tokens), width)
            if owner[0].sampling.experts:  # the last token was not read yet
                sampled["experts"] = self._experts.of(row, len(owner[0].prompt_ids) + len(tokens) - 1)
            found.append(Completion(request_id=owner[0].id, sample_index=owner[1], **sampled))
        return found

    def _close_rows(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._owners[row] = None
        self._cache.free(rows)
        self._rows.alive[self._index(rows)] = 0
        self._num_active -= len(rows)
        while self._owners and self._owners[-1] is None:
            self._owners.pop()
        self._longest = self._rows.longest()
        if not self._num_active:
            self._rows.forget_settings()
            self._stop_check.end()

    def _close_holes(self) -> None:
        """Compacts the rows: the last ones move to the free slots."""
        holes = [row for row in range(self._num_active) if self._owners[row] is None]
        tails = [row for row in range(self._num_active, len(self._owners)) if self._owners[row] is not None]
        self._move(tails, holes)
        del self._owners[self._num_active :]

    def _move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Moves rows to other slots, which may be among `sources`."""
        if not sources:
            return
        before, after = self._index(sources), self._index(targets)
        self._copy(before, after)
        self._rows.move(before, after)
        moved = [(self._owners[row], self._prompts[row]) for row in sources]
        for row, (owner, prompt) in zip(targets, moved, strict=True):
            self._owners[row], self._prompts[row] = owner, prompt

    def _copy(self, sources: Tensor, targets: Tensor) -> None:
        self._cache.copy(sources, targets)
        self._experts.copy(sources, targets)

    def drop(self, request_ids: set[int]) -> None:
        """Closes all rows of these requests."""
        rows = [n for n, owner in enumerate(self._owners) if owner is not None and owner[0].id in request_ids]
        if rows:
            self._close_rows(rows)
