"""Stop strings of the embedded engine: finds rows whose newest token completes one."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Bool, Int
from torch import Tensor
from transformers import PreTrainedModel

from lit_async_rl.engines.base import GenerationRequest
from lit_async_rl.engines.embedded.rows import RowState
from lit_async_rl.errors import InvariantError
from lit_async_rl.models.stop_strings import StopStrings


class StopCheck:
    """Free without stop strings; otherwise one lookup per token that cannot complete a stop string.

    Args:
        lm: the model; its tokenizer is loaded for the first request with stop strings.
        rows: the tokens of each slot.
    """

    def __init__(self, lm: PreTrainedModel, rows: RowState) -> None:
        self._lm, self._rows = lm, rows
        self._finder: StopStrings | None = None
        self._candidates: Bool[Tensor, " V"] | None = None  # tokens that can end a stop string of an active row

    def begin(self, stops: tuple[str, ...], vocab_size: int) -> None:
        """Registers a row with stop strings."""
        if not stops:
            return
        if self._finder is None:
            self._finder = StopStrings.of_model(self._lm.name_or_path, vocab_size)
        table = self._finder.may_end(stops).to(self._rows.alive.device)
        self._candidates = table if self._candidates is None else self._candidates | table

    def end(self) -> None:
        """Unregisters all rows."""
        self._candidates = None

    def stopped(
        self, rows: slice | Tensor, tokens: Int[Tensor, " n"], owners: Sequence[tuple[GenerationRequest, int] | None]
    ) -> Bool[Tensor, " n"] | None:
        """Mask of `rows` whose newest tokens complete a stop string; None if none does.

        Args:
            rows: slots.
            tokens: noted already.
            owners: request and sample of each slot.
        """
        if self._candidates is None:
            return None
        found = self._candidates[tokens] & (self._rows.alive[rows] > 0)
        if not found.any():
            return None
        places = found.nonzero()[:, 0]
        slots = self._rows.all_rows[rows][places].tolist()
        for place, slot, (sampled, _, _) in zip(places.tolist(), slots, self._rows.completions(slots), strict=True):
            owner = owners[slot]
            if owner is None or self._finder is None:
                raise InvariantError("a free slot gave a token")
            stops, before = owner[0].sampling.stop, owner[0].resumed_ids
            found[place] = bool(stops) and self._finder.is_at_end(before + sampled, stops)
        return found
