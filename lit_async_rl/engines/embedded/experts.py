"""Experts chosen for the tokens of the embedded engine's rows: S slots, P positions, n routers, k experts."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor, nn

from lit_async_rl.errors import InvariantError
from lit_async_rl.expert_choices import ExpertChoices
from lit_async_rl.models.routers import check_routers, record_in, routers_of

FIRST_POSITIONS = 64  # room at first; doubled as needed


class ExpertRecorder:
    """Records the experts of every position that a row has read, once a request has asked for it.

    Lives beside the KV cache: a prompt's choices are copied to all its samples like its keys and values. Costs nothing
    until `begin`.

    Args:
        lm: the model; gets forward hooks in `begin`.
        num_slots: S.
    """

    def __init__(self, lm: nn.Module, num_slots: int) -> None:
        self._lm, self._num_slots = lm, num_slots
        self._seen: list[Tensor | None] = []  # of the last forward pass, by router; [tokens, k]
        self._experts: Tensor | None = None  # [S, P, n, k]

    @property
    def is_on(self) -> bool:
        """Whether experts are recorded."""
        return bool(self._seen)

    def begin(self) -> None:
        """Starts to record.

        Raises:
            ValueError: the model has no routers that can be recorded.
        """
        check_routers(self._lm)
        self._seen = [None] * len(routers_of(self._lm))
        record_in(self._lm, self._note)

    def _note(self, router: int, experts: Tensor) -> None:
        self._seen[router] = experts

    def _last(self, shape: tuple[int, int]) -> Int[Tensor, "rows T n k"]:
        seen = [experts.view(*shape, -1) for experts in self._seen if experts is not None]
        if len(seen) < len(self._seen):
            raise InvariantError(f"{len(seen)} of {len(self._seen)} routers were used in a forward pass")
        return torch.stack(seen, dim=2).to(torch.int16)

    def _room(self, positions: int, like: Tensor) -> Tensor:
        """The record, with room for this many positions."""
        known = 0 if self._experts is None else self._experts.shape[1]
        if positions > known or self._experts is None:
            size = max(FIRST_POSITIONS, 2 * known, positions)
            grown = like.new_zeros(self._num_slots, size, *like.shape[2:])
            if self._experts is not None:
                grown[:, :known] = self._experts
            self._experts = grown
        return self._experts

    def add_prompts(self, shape: tuple[int, int], source: Int[Tensor, " rows"], slots: Int[Tensor, " rows"]) -> None:
        """After a forward pass over prompts, `shape` = (prompts, T): row `source[j]` of it goes to slot `slots[j]`."""
        if self.is_on:
            last = self._last(shape)
            self._room(shape[1], last)[slots, : shape[1]] = last[source]

    def add_tokens(self, positions: Int[Tensor, " rows"], longest: int) -> None:
        """After a forward pass over one token of each of the first slots, at `positions`, none of them > `longest`."""
        if self.is_on:
            last = self._last((len(positions), 1))
            rows = torch.arange(len(positions), device=positions.device)
            self._room(longest + 1, last)[rows, positions] = last[:, 0]

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copies slots to other slots."""
        if self._experts is not None:
            self._experts[targets] = self._experts[sources]

    def of(self, slot: int, length: int) -> ExpertChoices:
        """Experts of the first `length` positions of a slot."""
        if self._experts is None:
            raise InvariantError("no experts were recorded")
        return ExpertChoices(self._experts[slot, :length].to("cpu", copy=True))
