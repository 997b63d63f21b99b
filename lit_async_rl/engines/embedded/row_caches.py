"""Decoding row by row with the caches of transformers, for layers that keep other state than keys and values.

Recurrent, convolutional and sparse layers (Mamba, Qwen3-Next, LFM2, Jamba, DeepSeek-V3.2 and others) have state of
other kinds, which transformers' cache classes know. Rows of different length cannot share such a cache, so each has one
of its own, and a token takes one forward pass for every row.
"""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from collections.abc import Sequence
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from lit_async_rl.engines.embedded.packed import PackedLinear
from lit_async_rl.models.architecture import body
from lit_async_rl.models.policy import CausalPolicy

_ARGUMENTS = ("past_key_values", "cache_params")
# single steps of transformers leave out the least dt that its scan of a whole sequence has: up to 1e-3 nats
INEXACT = frozenset({"nemotron_h", "zamba2"})


def cache_argument(lm: PreTrainedModel) -> str | None:
    """Argument of the model's forward pass that takes its cache; None if it has none, or decodes inexactly with it."""
    if lm.config.get_text_config().model_type in INEXACT:
        return None
    known = inspect.signature(body(lm).forward).parameters
    return next((name for name in _ARGUMENTS if name in known), None)


class RowCaches:
    """A cache of transformers for each slot, with the interface of `SlotCache`.

    Attributes:
        rewinds: recurrent state does not go back to the end of its prompt, so that it serves one completion.
        max_len: positions of the longest row.
        caches: of each slot; None if it is free.
        prompt_lengths: of the prompts in the next forward pass; None if that decodes.
        prompts: caches of the prompts that were read last.
    """

    rewinds = False

    def __init__(self, num_slots: int) -> None:
        self.max_len = 0
        self.caches: list[Any] = [None] * num_slots
        self.prompt_lengths: Sequence[int] | None = None
        self.prompts: list[Any] = []

    def begin_prefill(self, lengths: Sequence[int]) -> None:
        """Switches the next forward pass to prompts of these lengths."""
        self.prompt_lengths, self.prompts = lengths, []

    def end_prefill(self, source: Tensor, slots: Tensor) -> None:
        """Gives slot `slots[j]` the cache of prompt `source[j]`, or a copy if others need it, too."""
        left = Counter(source.tolist())
        for number, slot in zip(source.tolist(), slots.tolist(), strict=True):
            left[number] -= 1
            self.caches[slot] = copy.deepcopy(self.prompts[number]) if left[number] else self.prompts[number]
        self.prompts, self.prompt_lengths = [], None

    def begin_decode(self, positions: Int[Tensor, " n"], num_long: int, short_len: int) -> None:
        """Switches the next forward pass to decoding, which it is anyway: each cache knows its position."""

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Moves the caches of slots to other slots."""
        moved = [self.caches[slot] for slot in sources.tolist()]
        self.free(sources.tolist())
        for slot, cache in zip(targets.tolist(), moved, strict=True):
            self.caches[slot] = cache

    def free(self, slots: Sequence[int]) -> None:
        """Drops the caches of finished rows."""
        for slot in slots:
            self.caches[slot] = None

    def clear(self) -> None:
        """Drops all caches."""
        self.caches, self.max_len = [None] * len(self.caches), 0

    def fit(self, length: int) -> bool:
        """Sets the length of the longest row; caches grow by themselves."""
        self.max_len = length
        return False


class RowwiseForward:
    """Hidden states of new tokens, with one forward pass of transformers for each row.

    Args:
        lm: the model.
        caches: of its rows; written to.
        argument: of the model's forward pass that takes a cache.
    """

    reads_ranges = False

    def __init__(self, lm: PreTrainedModel, caches: RowCaches, argument: str) -> None:
        self._lm, self._caches, self._argument = lm, caches, argument
        self._policy = CausalPolicy(lm)
        self.packed: dict[str, PackedLinear] = {}

    def logits(self, features: Float[Tensor, "n H"]) -> Float[Tensor, "n V"]:
        """Applies the output head."""
        return self._policy.logits(features)

    def __call__(self, input_ids: Int[Tensor, "n t"], position_ids: Tensor, mask: Tensor) -> Float[Tensor, "n t H"]:
        """Last hidden states; 0 for padding and free rows. The model's cache knows positions and what is visible."""
        lengths, caches = self._caches.prompt_lengths, self._caches.caches
        found: dict[int, Tensor] = {}
        for row, ids in enumerate(input_ids):
            if lengths is None and caches[row] is None:
                continue
            cache = None if lengths is not None else caches[row]
            new = ids[None] if lengths is None else ids[None, : lengths[row]]
            output = body(self._lm)(input_ids=new, use_cache=True, **{self._argument: cache})
            if output.get(self._argument) is None:
                raise ValueError(f"its forward pass returns no {self._argument}")
            found[row] = output.last_hidden_state[0]
            if lengths is not None:
                self._caches.prompts.append(output[self._argument])
        hidden = next(iter(found.values())).new_zeros(*input_ids.shape, next(iter(found.values())).shape[-1])
        for row, states in found.items():
            hidden[row, : len(states)] = states
        return hidden
