"""Batch of rows that an embedded engine decodes together.

A finished row stays in the batch until the next prompt takes its slot. Rows are compacted once many have finished,
which is cheaper than after every completion.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from lit_async_rl.engines.embedded.decode_graphs import BLOCK_POSITIONS, STEPS_AHEAD, DecodeGraphs, Record, num_rows
from lit_async_rl.engines.embedded.forward import LlamaForward, cache_and_forward
from lit_async_rl.engines.embedded.kv_cache import SlotCache
from lit_async_rl.engines.embedded.queue import Pending
from lit_async_rl.engines.embedded.sampling import AT_STOP, RowState, Tokens, grown
from lit_async_rl.errors import InvariantError
from lit_async_rl.models.routers import check_routers, record_in, routers_of
from lit_async_rl.models.tokenizer import StopStrings
from lit_async_rl.sampler_records import ExpertChoices
from lit_async_rl.types import Completion, FinishReason, GenerationRequest
from lit_async_rl.utils.device_memory import to_device

# -- Experts chosen for the tokens of the embedded engine's rows: S slots, P positions, n routers, k experts ----------


MIN_POSITIONS = 64  # allocated at first; doubled as needed


class ExpertRecorder:
    """Records the experts of every position of a row, beside the KV cache.

    A prompt's choices are copied to all its samples, like keys and values. Costs nothing until `begin`.

    Args:
        lm: the model; `begin` registers forward hooks.
        num_slots: S.
    """

    def __init__(self, lm: nn.Module, num_slots: int) -> None:
        self._lm = lm
        self._chosen: list[Tensor | None] = []  # [tokens, k] of each router in the last forward pass
        device = next(lm.parameters()).device
        self._experts = torch.zeros(num_slots, 0, 0, 0, dtype=torch.int16, device=device)  # [S, P, n, k]

    @property
    def is_recording(self) -> bool:
        """Whether experts are recorded."""
        return bool(self._chosen)

    def begin(self) -> None:
        """Starts recording.

        Raises:
            ValueError: the model has no routers that can be recorded.
        """
        check_routers(self._lm)
        self._chosen = [None] * len(routers_of(self._lm))
        record_in(self._lm, self._note)

    def _note(self, router: int, experts: Tensor) -> None:
        self._chosen[router] = experts

    def _last_experts(self, shape: tuple[int, int]) -> Int[Tensor, "rows T n k"]:
        """Experts of the last forward pass over tokens of this shape (rows, T)."""
        chosen = [experts.view(*shape, -1) for experts in self._chosen if experts is not None]
        if len(chosen) < len(self._chosen):
            raise InvariantError(
                f"cannot record the chosen experts: a forward pass used only {len(chosen)} of the model's "
                f"{len(self._chosen)} routers"
            )
        return torch.stack(chosen, dim=2).to(torch.int16)  # a quarter of int64, for every token of the batch

    def _reserve(self, positions: int, like: Int[Tensor, "rows T n k"]) -> Int[Tensor, "S P n k"]:
        """The record, grown to this many positions."""
        slots, known = self._experts.shape[:2]
        if positions > known:
            size = max(MIN_POSITIONS, 2 * known, positions)
            self._experts = grown(self._experts, (slots, size, *like.shape[2:]))
        return self._experts

    def add_prompts(self, shape: tuple[int, int], source: Int[Tensor, " rows"], slots: Int[Tensor, " rows"]) -> None:
        """Records a forward pass over prompts of `shape` (prompts, T): row `source[j]` goes to slot `slots[j]`."""
        if self.is_recording:
            last = self._last_experts(shape)
            self._reserve(shape[1], last)[slots, : shape[1]] = last[source]

    def add_tokens(self, positions: Int[Tensor, " rows"], longest: int) -> None:
        """Records a decode step of the first slots at `positions`, which are at most `longest`."""
        if self.is_recording:
            last = self._last_experts((len(positions), 1))
            rows = torch.arange(len(positions), device=positions.device)
            self._reserve(longest + 1, last)[rows, positions] = last[:, 0]

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copies slots to other slots."""
        if self.is_recording:
            self._experts[targets] = self._experts[sources]

    def of(self, slot: int, length: int) -> ExpertChoices:
        """Experts of the first `length` positions of a slot."""
        return ExpertChoices(self._experts[slot, :length].to("cpu", copy=True))


# -- Order of the rows: much longer rows come first, so that attention reads fewer positions of the others ------------
# Completions of very different lengths are decoded together, and a batched product reads every row up to the length of
# the longest. With the long rows in front there are two products: all positions of these, fewer of the others.


STEPS_BETWEEN_SORTS = 16  # decode steps
_MIN_ROWS_TO_SPLIT = 8  # with fewer rows a second product costs more than it saves
_MAX_READ_SHARE = 0.6  # two products must read at most this share of the positions that one product reads


def split(lengths: Sequence[int], max_len: int) -> tuple[int, int]:
    """Number of long rows in front, and largest number of positions of those behind them.

    Args:
        lengths: positions of each row in the next `STEPS_BETWEEN_SORTS` steps.
        max_len: positions to read of the rows in front.

    Returns:
        The split that reads the fewest positions in total; all rows and `max_len` if that saves little.
    """
    num_rows = len(lengths)
    best = (num_rows, max_len)
    fewest = _MAX_READ_SHARE * num_rows * max_len
    if num_rows < _MIN_ROWS_TO_SPLIT:
        return best
    for num_short, length in enumerate(sorted(lengths), start=1):
        positions = (num_rows - num_short) * max_len + num_short * length
        if positions < fewest:
            best = (num_rows - num_short, length)
            fewest = positions
    return best


class RowOrder:
    """Moves rows much longer than most to the front, periodically and after rows were added.

    Rows may finish, and rows from the end take their slots, without another sort.

    Args:
        is_enabled: whether attention can read fewer positions of some rows; else nothing moves.
    """

    def __init__(self, is_enabled: bool = True) -> None:
        self._is_enabled = is_enabled
        self._num_long = self._short_len = self._steps_left = 0

    def invalidate(self) -> None:
        """Forces a sort before the next step, because rows were added."""
        self._steps_left = 0

    @property
    def is_due(self) -> bool:
        """Whether to `sort` before the next step."""
        return self._is_enabled and self._steps_left == 0

    def sort(self, positions: Sequence[int], max_len: int) -> tuple[list[int], list[int]]:
        """Rows to move, and their targets, see `split`; the position of a free row is 0."""
        self._steps_left = STEPS_BETWEEN_SORTS
        lengths = [position + STEPS_BETWEEN_SORTS for position in positions]
        self._num_long, self._short_len = split(lengths, max_len)
        down = [row for row in range(self._num_long, len(lengths)) if lengths[row] > self._short_len]
        up = [row for row in range(self._num_long) if lengths[row] <= self._short_len][: len(down)]
        return down + up, up + down

    def step(self, num_rows: int) -> tuple[int, int]:
        """Begins a decode step; returns the number of long rows, and the largest number of positions of the others."""
        if not self._is_enabled:
            return num_rows, 0
        self._steps_left -= 1
        return min(self._num_long, num_rows), self._short_len


# -- Stop strings: detects rows with a newest token that completes one ------------------------------------------------


class StopCheck:
    """Detects stop strings by one table lookup per token; costs nothing without stop strings.

    Args:
        lm: the model; its tokenizer is loaded for the first request with stop strings.
        rows: the tokens of each slot.
    """

    def __init__(self, lm: PreTrainedModel, rows: RowState) -> None:
        self._lm = lm
        self._rows = rows
        self._finder: StopStrings | None = None
        self.is_active = False  # whether a row has stop strings
        self._candidates: Bool[Tensor, " V"] | None = None  # tokens that can end a stop string of an active row

    def begin(self, stops: tuple[str, ...], vocab_size: int) -> None:
        """Registers a row with stop strings."""
        if not stops:
            return
        if self._finder is None:
            self._finder = StopStrings.of_model(self._lm.name_or_path, vocab_size)
        table = self._finder.may_end(stops).to(self._rows.alive.device)
        if self._candidates is None:
            self._candidates = torch.zeros_like(table)
        self._candidates.logical_or_(table)  # in place, where recorded steps read it
        self.is_active = True

    def end(self) -> None:
        """Unregisters all rows."""
        self.is_active = False
        if self._candidates is not None:
            self._candidates.zero_()

    @property
    def memory(self) -> list[Tensor]:
        """Tensors that `candidates` reads."""
        return [] if self._candidates is None else [self._candidates]

    def candidates(self, rows: slice | Tensor, tokens: Int[Tensor, " n"]) -> Bool[Tensor, " n"] | None:
        """Mask of rows with a newest token that can end a stop string; None without stop strings."""
        if self._candidates is None or not self.is_active:
            return None
        return self._candidates[tokens] & (self._rows.alive[rows] > 0)

    def is_at_end(self, request: GenerationRequest, sampled: tuple[int, ...]) -> bool:
        """Whether the tokens sampled so far end with a stop string of the request."""
        stops = request.sampling.stop
        if not stops or self._finder is None:
            return False
        return self._finder.is_at_end(request.resumed_ids + sampled, stops)


# -- Prompts that are read together -----------------------------------------------------------------------------------


MAX_PREFILL_TOKENS = 2**14  # with padding; more would not be faster, and activations take memory in proportion


def prefill_parts(prompts: Sequence[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
    """Splits prompts into parts of at most `MAX_PREFILL_TOKENS` tokens with padding, or of one longer prompt.

    Several parts hold prompts of similar lengths. Prompts include resumed completions and turns of episodes, which are
    long and differ in length.
    """
    if len(prompts) * max(map(len, prompts)) <= MAX_PREFILL_TOKENS:
        return [list(prompts)]
    parts: list[list[tuple[int, ...]]] = []
    for prompt in sorted(prompts, key=len):  # so that each is the longest of its part
        if not parts or (len(parts[-1]) + 1) * len(prompt) > MAX_PREFILL_TOKENS:
            parts.append([])
        parts[-1].append(prompt)
    return parts


class Slots:
    """Prefill, decoding and bookkeeping of the rows. Not thread-safe: the engine's lock guards it.

    Args:
        lm: the model; used in evaluation mode, without gradients.
        num_slots: S.
        eos_token_ids: tokens that end every completion.
        seed: of the random numbers.
        owns_weights: see `LlamaForward`.
        cache_class: of the KV cache.
        recorder: makes recorders of decode steps, as `cuda_graphs` does; None records none.

    Raises:
        ValueError: the model's decode steps cannot be recorded.
    """

    def __init__(
        self,
        lm: PreTrainedModel,
        num_slots: int,
        eos_token_ids: Sequence[int],
        seed: int,
        owns_weights: bool = False,
        cache_class: type[SlotCache] = SlotCache,
        recorder: Callable[[torch.Generator], Callable[[], Record]] | None = None,
    ) -> None:
        self.lm = lm
        self.num_tokens = 0  # sampled so far
        self._eos_token_ids = tuple(eos_token_ids)
        self.num_slots = num_slots
        self.device = next(lm.parameters()).device
        self._cache, self._forward = cache_and_forward(lm, num_slots, owns_weights, cache_class=cache_class)
        self.packed = self._forward.packed  # packed linear layers by the names of the parameters they replace
        self._experts = ExpertRecorder(lm, num_slots)
        self.generator = torch.Generator(device=self.device).manual_seed(seed)
        self._rows = RowState(num_slots, self.device)
        self._stop_check = StopCheck(lm, self._rows)
        self._owners: list[
            tuple[GenerationRequest, int] | None
        ] = []  # (request, sample) of slots up to the last in use
        self.num_active = 0  # rows being decoded
        self._prompts: list[tuple[int, ...] | None] = [None] * num_slots  # prompt at the beginning of each slot's cache
        self._graphs = None if recorder is None else self._decode_graphs(recorder)
        self._order = RowOrder(self._forward.reads_ranges and self._graphs is None)
        # Positions are counted here, too, because reading them would wait for the device: that of a row is its offset
        # plus the number of decode steps so far.
        self._offsets = [0] * num_slots
        self._num_steps = 0
        self._longest = 0  # upper bound on the positions of active rows

    def _decode_graphs(self, recorder: Callable[[torch.Generator], Callable[[], Record]]) -> DecodeGraphs:
        cache = self._cache
        forward = self._forward
        if not isinstance(cache, SlotCache) or not isinstance(forward, LlamaForward):
            raise ValueError(
                f"data.engine.cuda_graphs must be False with the model type {self.lm.config.model_type!r}, got True: "
                "CUDA graphs need the engine's own forward pass, which supports Llama, Mistral, Qwen2 and Qwen3"
            )
        cache.block_positions = BLOCK_POSITIONS
        cache.growth_percent = 200  # all graphs are dropped when it grows
        return DecodeGraphs(
            recorder(self.generator),
            memory=lambda: [*cache.memory, *forward.memory, *self._rows.memory, *self._stop_check.memory],
        )

    @property
    def vocab_size(self) -> int:
        """Size of the input embedding; token ids must be smaller."""
        embeddings: Any = self.lm.get_input_embeddings()
        return embeddings.weight.shape[0]

    def invalidate_prompts(self, longer_than: int = 0) -> None:
        """Invalidates cached prompts after a change of weights, or only those longer than a shortened cache."""
        self._prompts = [p if p is not None and len(p) <= longer_than else None for p in self._prompts]

    def begin_batch(self, seed: int) -> None:
        """Re-seeds and clears all state: later results are independent of earlier requests."""
        if self.num_active:
            raise InvariantError(f"{self.num_active} slots are in use")
        self.generator.manual_seed(seed)
        self.invalidate_prompts()
        self._cache.clear()

    # -- one token ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def admit(self, pending: Sequence[Pending], version: int) -> list[Completion]:
        """Starts completions and samples their first tokens; returns those that are finished already.

        Each prompt is prefilled once. If a slot still has its KV cache, that is copied, and the prompt's last token is
        decoded together with all other rows.
        """
        if not self._experts.is_recording and any(item.request.sampling.experts for item in pending):
            self._experts.begin()
            self.invalidate_prompts()  # their experts were not recorded
        num_rows = sum(item.num_samples for item in pending)
        free = [row for row, owner in enumerate(self._owners) if owner is None]
        free = (free + list(range(len(self._owners), self.num_slots)))[:num_rows]
        self._owners += [None] * (max(free) + 1 - len(self._owners))
        self._cache.fit(max(self._cache.max_len, *(len(item.request.prompt_ids) for item in pending)))
        cached = self._prompts if self._cache.rewinds else []
        slot_of = {prompt: slot for slot, prompt in enumerate(cached) if prompt is not None}
        known = [item for item in pending if item.request.prompt_ids in slot_of]
        fresh = [item for item in pending if item.request.prompt_ids not in slot_of]
        if known:
            sources = [slot_of[item.request.prompt_ids] for item in known for _ in range(item.num_samples)]
            targets = free[: len(sources)]
            free = free[len(sources) :]
            self._copy(self._index(sources), self._index(targets))
            self._open_rows(known, targets)
        finished = self._read(fresh, free, version) if fresh else []
        return finished + self.decode(version) if known else finished

    def _read(self, pending: Sequence[Pending], slots: Sequence[int], version: int) -> list[Completion]:
        """Prefills each distinct prompt once, copies its cache to its samples, and samples first tokens."""
        slots_of: dict[tuple[int, ...], list[int]] = {}
        prompts = [item.request.prompt_ids for item in pending for _ in range(item.num_samples)]
        for prompt, slot in zip(prompts, slots, strict=True):
            slots_of.setdefault(prompt, []).append(slot)
        features: dict[tuple[int, ...], Tensor] = {}
        for part in prefill_parts(list(slots_of)):
            features |= zip(part, self._prefill(part, [slots_of[prompt] for prompt in part]), strict=True)
        self._open_rows(pending, slots)
        number = {prompt: n for n, prompt in enumerate(features)}
        logits = self._forward.logits(torch.stack(list(features.values())))
        self.num_tokens += len(slots)
        source = self._index([number[prompt] for prompt in prompts])
        self._rows.version.fill_(version)
        outcomes = self._sample(logits[source], self._index(slots))
        for slot in slots:
            self._offsets[slot] += 1
        return self._close_finished(outcomes.tolist(), slots)

    def _prefill(
        self, prompts: Sequence[tuple[int, ...]], slots: Sequence[Sequence[int]]
    ) -> Float[Tensor, "prompts H"]:
        """Hidden states of the last tokens of prompts, whose cache is copied to `slots[j]` for prompt j."""
        width = max(2, *(len(ids) for ids in prompts))  # the forward pass takes a single column for a decode step
        input_ids = to_device([ids + (0,) * (width - len(ids)) for ids in prompts], self.device)
        self._cache.begin_prefill([len(ids) for ids in prompts])
        hidden = self._forward(input_ids, torch.arange(width, device=self.device)[None], None)
        source = self._index([number for number, part in enumerate(slots) for _ in part])
        rows = self._index([slot for part in slots for slot in part])
        self._cache.end_prefill(source, rows)
        self._experts.add_prompts((len(prompts), width), source, rows)
        last = self._index([len(ids) - 1 for ids in prompts])
        return hidden[torch.arange(len(prompts), device=self.device), last]

    @torch.no_grad()
    def decode(self, version: int) -> list[Completion]:
        """Samples one token for every active row; with recorded steps several, before it waits for the device."""
        if self.num_active < 3 / 4 * len(self._owners):
            self._close_holes()
        n = len(self._owners)
        graphs = self._graphs if self._rows.heads.width is None else None
        # the device ends rows at their last token by itself, but only Python finds stop strings
        steps = 1 if graphs is None or self._stop_check.is_active else STEPS_AHEAD
        if self._cache.fit(self._longest + steps):  # free rows are written to, too, now inside of longer cached prompts
            self.invalidate_prompts(longer_than=self._cache.max_len)
        if self._order.is_due:
            lengths = [0 if owner is None else self._position(row) for row, owner in enumerate(self._owners)]
            sources, targets = self._order.sort(lengths, self._cache.max_len)
            self._move(sources, targets)
        num_long, short_len = self._order.step(n)
        self._rows.version.fill_(version)
        if graphs is None:
            outcomes = self._decode_rows(n, num_long=num_long, short_len=short_len)[None]
        else:
            outcomes = torch.stack([self._replay(graphs, n).clone() for _ in range(steps)])
        finished = []
        for of_step in outcomes.tolist():
            self.num_tokens += self.num_active
            self._num_steps += 1
            finished += self._close_finished(of_step, range(n))
        return finished

    def _replay(self, graphs: DecodeGraphs, n: int) -> Int[Tensor, "kinds n"]:
        """`_decode_rows` of the first n slots as a recorded step; its next replay overwrites the result."""
        padded = num_rows(n, self.num_slots)
        key = (self._cache.max_len, self._rows.flags, self._stop_check.is_active)
        step = partial(self._decode_rows, padded, num_long=padded, short_len=0)
        return graphs.run(step, rows=padded, key=key)[:, :n]

    def _decode_rows(self, n: int, num_long: int, short_len: int) -> Int[Tensor, "kinds n"]:
        """A decode step of the first n slots, on the device alone; returns what `_sample` does."""
        # clamped: a free row that ended at the cache's last position would otherwise write into the next slot
        positions = self._rows.position[:n].clamp(max=self._cache.max_len - 1)
        self._cache.begin_decode(positions, num_long, short_len)
        mask = torch.arange(self._cache.max_len, device=self.device) <= positions[:, None]
        hidden = self._forward(self._rows.last[:n, None], positions[:, None], mask[:, None, None])
        self._experts.add_tokens(positions, self._longest)
        return self._sample(self._forward.logits(hidden[:, 0]), slice(0, n))

    def _sample(self, logits: Tensor, rows: slice | Tensor) -> Int[Tensor, "kinds n"]:
        """Samples a token for each of `rows` and appends it.

        Returns:
            Outcomes of the rows, and with stop strings a second line: whether a row may be at one.
        """
        tokens, logprobs = self._rows.sample(rows, logits, self.generator)
        candidates = self._stop_check.candidates(rows, tokens)  # before a row ends at its largest number of tokens
        outcomes = self._rows.append(rows, tokens, logprobs)
        return outcomes[None] if candidates is None else torch.stack([outcomes, candidates])

    def _close_finished(self, outcomes: list[list[int]], slots: Sequence[int]) -> list[Completion]:
        """Closes rows that have finished by the outcomes of `_sample`; returns their completions.

        Waits for the device if there are completions or possible stop strings.
        """
        self._longest += 1
        found, *candidates = outcomes
        if candidates:
            self._find_stop_strings(found, candidates[0], slots)
        if not any(found):
            return []
        closing = [slot for slot, outcome in zip(slots, found, strict=True) if outcome]
        reasons: list[FinishReason] = ["stop" if outcome == AT_STOP else "length" for outcome in found if outcome]
        finished = self._completions(closing, reasons)
        self._close_rows(closing)
        return finished

    def _find_stop_strings(self, outcomes: list[int], may_stop: Sequence[int], slots: Sequence[int]) -> None:
        """Sets outcomes to `AT_STOP` for rows at a stop string, among those that may be at one."""
        indices = [index for index, candidate in enumerate(may_stop) if candidate]
        rows = [slots[index] for index in indices]
        for index, row, (sampled, _, _) in zip(indices, rows, self._sampled(rows), strict=True):
            if self._stop_check.is_at_end(self._owner(row)[0], sampled):
                outcomes[index] = AT_STOP

    # -- rows ---------------------------------------------------------------------------------------------------------

    def _index(self, rows: Sequence[int]) -> Int[Tensor, " n"]:
        return to_device(rows, self.device)

    def _position(self, row: int) -> int:
        """Position of the last token of an active row."""
        return self._offsets[row] + self._num_steps

    def _owner(self, row: int) -> tuple[GenerationRequest, int]:
        """Request and sample of an active row."""
        owner = self._owners[row]
        if owner is None:
            raise InvariantError(f"slot {row} returned a token, but has no request")
        return owner

    def _sampled(self, rows: Sequence[int]) -> list[Tokens]:
        """Tokens, log-probabilities and versions of active rows."""
        lengths = [self._position(row) - len(self._owner(row)[0].prompt_ids) + 1 for row in rows]
        return self._rows.completions(rows, lengths)

    def _open_rows(self, pending: Sequence[Pending], slots: Sequence[int]) -> None:
        begin = 0
        rows = self._index(slots)
        for item in pending:
            prompt = item.request.prompt_ids
            part = slice(begin, begin + item.num_samples)
            begin += item.num_samples
            stops = item.request.sampling.ends(self._eos_token_ids)
            self._rows.open(rows[part], item.request.sampling, stops, prompt, item.stream)
            for sample, slot in enumerate(slots[part], start=item.first_sample):
                self._owners[slot] = (item.request, sample)
                self._prompts[slot] = prompt
                self._offsets[slot] = len(prompt) - 1 - self._num_steps
            self._longest = max(self._longest, len(prompt) - 1)
            self._stop_check.begin(item.request.sampling.stop, self.vocab_size)
        self.num_active += begin
        self._order.invalidate()

    def partial_completions(self) -> list[Completion]:
        """Partial completions of all active rows."""
        rows = [row for row, owner in enumerate(self._owners) if owner is not None]
        return self._completions(rows, ["abort"] * len(rows))

    def _completions(self, rows: Sequence[int], reasons: Sequence[FinishReason]) -> list[Completion]:
        completions = []
        for row, reason, (tokens, logprobs, versions) in zip(rows, reasons, self._sampled(rows), strict=True):
            request, sample = self._owner(row)
            width = request.sampling.head
            num_read = len(request.prompt_ids) + len(tokens) - 1  # the model has not read the last token yet
            completions.append(
                Completion(
                    request_id=request.id,
                    sample_index=sample,
                    token_ids=tokens,
                    logprobs=logprobs,
                    versions=versions,
                    finish_reason=reason,
                    head=None if width is None else self._rows.heads.of(row, len(tokens), width),
                    experts=self._experts.of(row, num_read) if request.sampling.experts else None,
                )
            )
        return completions

    def _close_rows(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._owners[row] = None
        self._cache.free(rows)
        self._rows.alive[self._index(rows)] = 0
        self.num_active -= len(rows)
        while self._owners and self._owners[-1] is None:
            self._owners.pop()
        active = (self._position(row) for row, owner in enumerate(self._owners) if owner is not None)
        self._longest = max(active, default=0)
        if not self.num_active:
            self._rows.reset_settings()
            self._stop_check.end()

    def _close_holes(self) -> None:
        """Compacts the rows: the last ones move to the free slots."""
        holes = [row for row in range(self.num_active) if self._owners[row] is None]
        tails = [row for row in range(self.num_active, len(self._owners)) if self._owners[row] is not None]
        self._move(tails, holes)
        del self._owners[self.num_active :]

    def _move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Moves rows and their owners to other slots, see `RowState.move`."""
        if not sources:
            return
        before = self._index(sources)
        after = self._index(targets)
        self._copy(before, after)
        self._rows.move(before, after)
        moved = [(self._owners[row], self._prompts[row], self._offsets[row]) for row in sources]
        for row, (owner, prompt, offset) in zip(targets, moved, strict=True):
            self._owners[row] = owner
            self._prompts[row] = prompt
            self._offsets[row] = offset

    def _copy(self, sources: Tensor, targets: Tensor) -> None:
        self._cache.copy(sources, targets)
        self._experts.copy(sources, targets)

    def drop(self, request_ids: set[int]) -> None:
        """Closes all rows of these requests."""
        rows = [n for n, owner in enumerate(self._owners) if owner is not None and owner[0].id in request_ids]
        if rows:
            self._close_rows(rows)
