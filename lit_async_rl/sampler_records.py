"""A sampler's records beside its tokens: the distribution of each, and the experts that routers chose.

Engines make them for `sampling.head` and `sampling.experts`, and the trainer computes with the same tokens and experts.
Heads also show a truncated sampler's support. In checkpoints, both are flat tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lit_async_rl.errors import InvariantError

# -- Head of the sampling distribution: the likeliest tokens of each position, as the engine recorded them ------------
# L tokens of one completion, k = `sampling.head`. B rows, T positions of a batch.


@dataclass(frozen=True, eq=False)
class SamplerHead:
    """The k likeliest tokens of the distribution that each token was sampled from, and its entropy.

    On the CPU. Temperature and truncation (top-k, top-p, min-p) are applied; tokens outside of the support have a
    log-probability of -inf. Not normalised over the head: other tokens have the rest of the probability.

    Attributes:
        entropy: in nats, over the whole vocabulary; NaN where the engine does not compute it.
        ids: token ids, by falling probability.
        logprobs: their log-probabilities.
    """

    entropy: Float[Tensor, " L"]
    ids: Int[Tensor, "L k"]
    logprobs: Float[Tensor, "L k"]

    def __post_init__(self) -> None:
        if not len(self.entropy) == len(self.ids) == len(self.logprobs) or self.ids.shape != self.logprobs.shape:
            shapes = ", ".join(str(tuple(v.shape)) for v in (self.entropy, self.ids, self.logprobs))
            raise InvariantError(
                f"entropy, ids and logprobs of a SamplerHead must match in shape, got the shapes {shapes}"
            )

    def __len__(self) -> int:
        return len(self.entropy)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SamplerHead):
            return NotImplemented
        pairs = zip(self.tensors, other.tensors, strict=True)
        return all(a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) for a, b in pairs)

    def __hash__(self) -> int:
        return hash(tuple(self.ids.shape))

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Entropy, ids and log-probabilities."""
        return self.entropy, self.ids, self.logprobs

    def first(self, length: int) -> SamplerHead:
        """Head of the first `length` tokens."""
        return SamplerHead(*(values[:length] for values in self.tensors))

    @property
    def width(self) -> int:
        """k, the number of tokens per position."""
        return self.ids.shape[1]


class Support(NamedTuple):
    """Tokens that a truncated sampler (top-k, top-p, min-p) chose from: those of `ids` where `known` is True."""

    ids: Int[Tensor, "B T k"]
    known: Bool[Tensor, "B T k"]


def known_support(
    head_logprobs: Float[Tensor, "B T k"], mask: Bool[Tensor, "B T"], truncated: bool = False
) -> Bool[Tensor, "B T k"]:
    """Marks the tokens of the recorded heads that the truncated sampler could choose.

    All False outside of `mask`. A support that fills the head may have further tokens; unless the sampler truncates,
    nothing is marked there.

    Args:
        head_logprobs: of the recorded heads; -inf outside of the support.
        mask: sampled tokens.
        truncated: whether the sampler was set to truncate.
    """
    possible = head_logprobs > -math.inf
    has_support = mask if truncated else ~possible.all(-1) & mask
    return possible & has_support[..., None]


def log_mass(logprobs: Float[Tensor, "*shape k"], known: Bool[Tensor, "*shape k"]) -> Float[Tensor, "*shape"]:
    """Log of the sum of pi over the known support, from log-probabilities of the head; 0 where none is known."""
    is_known = known.any(-1, keepdim=True)
    inside = torch.where(known, logprobs, -math.inf)
    total = torch.where(is_known, inside, 0.0).logsumexp(-1)  # a row of -inf has no gradient
    return torch.where(is_known[..., 0], total, 0.0)


def blank_head(length: int, width: int) -> SamplerHead:
    """Head of tokens that were not sampled (a tool's answer): nothing is known, entropy NaN."""
    return SamplerHead(
        torch.full((length,), torch.nan),
        torch.zeros(length, width, dtype=torch.int32),
        torch.full((length, width), -torch.inf),
    )


def join_heads(heads: Sequence[SamplerHead]) -> SamplerHead:
    """Heads of consecutive parts of one completion, as one."""
    return SamplerHead(*(torch.cat(parts) for parts in zip(*(head.tensors for head in heads), strict=True)))


def pack_heads(heads: Sequence[SamplerHead | None]) -> dict[str, Tensor]:
    """Heads of several completions as flat tensors of a checkpoint; empty if there are none.

    R completions, N tokens of those with a head: `head_lengths` [R], -1 without a head, and the tensors of all heads.
    """
    known = [head for head in heads if head is not None]
    if not known:
        return {}
    whole = join_heads(known)
    return {
        "head_lengths": torch.tensor([-1 if head is None else len(head) for head in heads]),
        "head_entropy": whole.entropy,
        "head_ids": whole.ids,
        "head_logprobs": whole.logprobs,
    }


def unpack_heads(packed: dict[str, Tensor], number: int) -> list[SamplerHead | None]:
    """Inverse of `pack_heads`, for `number` completions."""
    if "head_lengths" not in packed:
        return [None] * number
    lengths = packed["head_lengths"].tolist()
    sizes = [max(0, length) for length in lengths]
    parts = zip(*(packed[f"head_{name}"].split(sizes) for name in ("entropy", "ids", "logprobs")), strict=True)
    return [
        None if length < 0 else SamplerHead(*(value.clone() for value in part))
        for length, part in zip(lengths, parts, strict=True)
    ]


# -- Experts that the routers of a mixture-of-experts model chose while a completion was sampled ----------------------
# A text has P + L tokens, prompt and completion; the model has n routers, each of which chooses k experts for each
# token.


OWN_CHOICE = -1  # in place of an expert: nothing was recorded, and a replaying router chooses itself


@dataclass(frozen=True, eq=False)
class ExpertChoices:
    """Experts of the P + L - 1 tokens of a text that the model has read; the last token is only sampled.

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
        """Padded with tokens of unknown experts to `length` in all."""
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
