"""Experts that the routers of a mixture-of-experts model chose while a completion was sampled.

A text has P + L tokens, prompt and completion; the model has n routers, each of which chooses k experts for each token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from lit_async_rl.errors import InvariantError

OWN_CHOICE = -1  # in place of an expert: nothing was recorded, and a replaying router chooses itself


@dataclass(frozen=True, eq=False)
class ExpertChoices:
    """The experts of the P + L - 1 tokens of a text that the model has read; the last token is only sampled.

    On the CPU, as small integers.

    Attributes:
        experts: in the order of the text; `OWN_CHOICE` where nothing is known.
    """

    experts: Int[Tensor, "length n k"]

    def __post_init__(self) -> None:
        if self.experts.dim() != 3:
            raise InvariantError(f"chosen experts have shape {tuple(self.experts.shape)}")

    def __len__(self) -> int:
        return len(self.experts)

    def __eq__(self, other: object) -> bool:
        return torch.equal(self.experts, other.experts) if isinstance(other, ExpertChoices) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self.experts.shape))

    @property
    def shape(self) -> tuple[int, int]:
        """Routers of the model, and experts that each chooses."""
        return self.experts.shape[1], self.experts.shape[2]

    def continued(self, later: ExpertChoices) -> ExpertChoices:
        """The first recording of each token; `later` was recorded for a text that begins with this one."""
        return ExpertChoices(torch.cat([self.experts, later.experts[len(self) :]]))

    def padded(self, length: int) -> ExpertChoices:
        """With further tokens about which nothing is known, `length` in all."""
        unknown = self.experts.new_full((length - len(self), *self.shape), OWN_CHOICE)
        return ExpertChoices(torch.cat([self.experts, unknown]))


def pack_choices(choices: Sequence[ExpertChoices | None]) -> dict[str, Tensor]:
    """Choices of R completions as flat tensors of a checkpoint: `expert_lengths` [R], -1 without, and `expert_ids`."""
    known = [one.experts for one in choices if one is not None]
    if not known:
        return {}
    return {
        "expert_lengths": torch.tensor([-1 if one is None else len(one) for one in choices]),
        "expert_ids": torch.cat(known),
    }


def unpack_choices(packed: dict[str, Tensor], number: int) -> list[ExpertChoices | None]:
    """Inverse of `pack_choices`, for `number` completions."""
    if "expert_lengths" not in packed:
        return [None] * number
    lengths = packed["expert_lengths"].tolist()
    parts = packed["expert_ids"].split([max(0, length) for length in lengths])
    return [None if length < 0 else ExpertChoices(part.clone()) for length, part in zip(lengths, parts, strict=True)]
