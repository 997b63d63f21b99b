"""Attention over prefix trees: computes once what rows have in common at their beginning.

Rows of one group (the completions of a prompt, the turns and branches of an agent's episodes) form a tree. Its tokens
are laid out in depth-first order, so that the descendants of a token follow it without a gap, up to a place `until`.
Token j is an ancestor of token i, or i itself, exactly if

    j <= i < until[j]

which is the attention mask. The position of a token is its depth; position and output are those in a row of its own
(the tree masks of AReaL; for one level Periodic Asynchrony, arXiv:2511.18871, and Prefix Grouper, arXiv:2506.05433).
Hidden states are gathered by row and position, so that losses see ordinary rows. The gradient at a shared token sums
over its rows.

With the runs s of n_s tokens between two branchings, and D_s tokens below each of them

    tokens            sum over rows of length             ->  sum n_s
    attention pairs   sum over rows of L (L + 1) / 2      ->  sum (n_s (n_s + 1) / 2 + n_s D_s)

Tokens that predict nothing (at least the last one of each row) are omitted. The input has B rows of T positions, the
packed form R rows of L positions. H is the hidden size.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import PreTrainedModel

from lit_async_rl.errors import InvariantError
from lit_async_rl.models.architecture import body, context_length, other_layers
from lit_async_rl.models.routers import Replaying
from lit_async_rl.models.tree_attention import (
    Span,
    TreeMask,
    TreeWork,
    can_split,
    rows_cost,
    split_is_cheaper,
    tree_mask,
    trees_cost,
)
from lit_async_rl.utils.checks import check_range
from lit_async_rl.utils.device_memory import to_device

# -- Layout: places of the tokens of rows in the packed rows ----------------------------------------------------------


log = logging.getLogger(__name__)
FLEX_BLOCK = 128  # of FlexAttention's masks; lengths that are multiples of it are compiled for less often


@dataclass(frozen=True, kw_only=True)
class PackedRows:
    """Layout of trees in packed rows.

    Attributes:
        source: index of each packed token in the flattened [B, T] input (0 for padding).
        position: position of the token in its input row.
        until: place in the packed row behind the token's last descendant.
        uses: number of input rows that have the token; 0 is padding.
        target: index in the flattened [R, L] rows of each needed input position; 0 elsewhere.
        spans: runs of tokens without a branching between them.
        num_tokens: number of tokens without padding.
        num_row_tokens: number of tokens of the separate rows, without padding.
    """

    source: Int[Tensor, "R L"]
    position: Int[Tensor, "R L"]
    until: Int[Tensor, "R L"]
    uses: Int[Tensor, "R L"]
    target: Int[Tensor, "B T"]
    spans: tuple[Span, ...]
    num_tokens: int
    num_row_tokens: int

    @property
    def num_pairs(self) -> int:
        """Number of pairs of a token and one that it attends to, without padding."""
        return sum(span.num_pairs for span in self.spans)

    def to(self, device: torch.device) -> PackedRows:
        """Copy on another device; does not wait for work that is queued there."""
        moved = {name: to_device(value, device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **moved)  # type: ignore[arg-type]


@dataclass(frozen=True)
class _Tree:
    """The tokens of one group in depth-first order; `places` of a row are those of its tokens."""

    source: np.ndarray
    position: np.ndarray
    until: np.ndarray
    uses: np.ndarray
    places: dict[int, np.ndarray]

    @property
    def spans(self) -> list[tuple[int, int, int]]:
        """Begin, end and end of descendants of each run of tokens that have the same ones."""
        begins = np.flatnonzero(np.diff(self.until, prepend=-1))
        ends = np.append(begins[1:], len(self.until))
        return list(zip(begins.tolist(), ends.tolist(), self.until[begins].tolist(), strict=True))


def pack(
    input_ids: Int[Tensor, "B T"],
    needed: Bool[Tensor, "B T"],
    group_index: Sequence[int],
    row_tokens: int | None = 0,
    multiple: int = 1,
) -> PackedRows:
    """Packs the tokens that `needed` positions depend on, on the CPU, without rows that have none.

    Args:
        input_ids: unpacked rows; equal numbers mean equal tokens.
        needed: True at positions that predict a trained token.
        group_index: group of each row; rows share prefixes within a group.
        row_tokens: capacity of a packed row, in tokens; larger trees have a row of their own. None is one row.
        multiple: L is a multiple of it.
    """
    width = input_ids.shape[1]
    lengths = (needed * torch.arange(1, width + 1)).amax(-1).tolist()  # up to the last predicting position
    members: dict[int, list[int]] = {}
    for row, index in enumerate(group_index):
        if lengths[row]:
            members.setdefault(index, []).append(row)
    if not members:
        raise InvariantError("none of the rows has a token that is trained on, so there is nothing to pack")
    ids = input_ids.numpy()
    trees = [_tree(ids, rows, lengths) for rows in members.values()]
    sizes = [len(tree.source) for tree in trees]
    bins = [list(range(len(trees)))] if row_tokens is None else _first_fit(sizes, row_tokens)
    longest = max(sum(sizes[n] for n in numbers) for numbers in bins)
    length = -(-longest // multiple) * multiple
    source, position, uses = (np.zeros((len(bins), length), dtype=np.int64) for _ in range(3))
    until = np.tile(np.arange(1, length + 1), (len(bins), 1))  # padding attends to itself: a softmax over none is NaN
    target = np.zeros(ids.shape, dtype=np.int64)
    spans = []
    for number, numbers in enumerate(bins):
        begin = 0
        for n in numbers:
            tree = trees[n]
            part = number, slice(begin, begin + sizes[n])
            source[part] = tree.source
            position[part] = tree.position
            until[part] = tree.until + begin
            uses[part] = tree.uses
            for row, places in tree.places.items():
                target[row, : len(places)] = places + number * length + begin
            spans += [Span(number, *(place + begin for place in places)) for places in tree.spans]
            begin += sizes[n]
    fields = dict(source=source, position=position, until=until, uses=uses, target=target)
    return PackedRows(
        **{name: torch.from_numpy(value) for name, value in fields.items()},
        spans=tuple(spans),
        num_tokens=sum(sizes),
        num_row_tokens=sum(lengths),
    )


def _tree(ids: np.ndarray, rows: Sequence[int], lengths: Sequence[int]) -> _Tree:
    """The tree of some rows, of which only the first `lengths` tokens count.

    Sorted by their tokens, each row continues its predecessor where the two part: the depth-first order.
    """
    source: list[np.ndarray] = []
    position: list[np.ndarray] = []
    places: dict[int, np.ndarray] = {}
    until = np.zeros(sum(lengths[row] for row in rows), dtype=np.int64)
    uses = np.zeros_like(until)
    size = 0
    before = np.zeros(0, dtype=np.int64)  # places of the row before, and its tokens
    tokens = ids[0, :0]
    for row in sorted(rows, key=lambda row: ids[row, : lengths[row]].tolist()):
        length = lengths[row]
        common = min(len(before), length)
        differs = np.flatnonzero(tokens[:common] != ids[row, :common])
        common = int(differs[0]) if len(differs) else common
        until[before[common:]] = size  # their last descendant was the one before
        own = np.arange(common, length)
        before = np.concatenate([before[:common], size + own - common])
        tokens = ids[row, :length]
        source.append(row * ids.shape[1] + own)
        position.append(own)
        uses[before] += 1
        places[row] = before
        size += len(own)
    until[before] = size
    return _Tree(
        source=np.concatenate(source),
        position=np.concatenate(position),
        until=until[:size],
        uses=uses[:size],
        places=places,
    )


def _first_fit(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """First-fit decreasing bin packing of indices; a size above `capacity` gets a bin of its own."""
    bins: list[list[int]] = []
    room: list[int] = []
    for n in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
        fitting = next((b for b, left in enumerate(room) if sizes[n] <= left), None)
        if fitting is None:
            bins.append([n])
            room.append(capacity - sizes[n])
        else:
            bins[fitting].append(n)
            room[fitting] -= sizes[n]
    return bins


@dataclass(frozen=True)
class PrefixTreePacking:
    """Computes once what rows of a group have in common at their beginning (setting `model.packing`).

    That is the prompt of completions, and all turns that the branches of an agent's episode share, at any depth.
    Log-probabilities and gradients are those of separate rows. It saves most with whole groups in one micro-batch:
    prefixes are shared within a group only, and not between tokens that recorded other experts (`sampling.experts`).

    Attention depends on `attn_implementation`. `sdpa` on a CPU computes exactly the pairs of the tree, in one row
    without padding; on a GPU, and for small trees, it takes a dense mask of R L^2 entries. `eager` takes the dense
    mask, for which one group in a row is best. `flex_attention`, for GPUs, takes a block mask, made by compiled code,
    and pads rows to a multiple of 128 tokens.

    Args:
        row_tokens: with a mask, largest number of tokens in a packed row of several groups; a longer group has its own
            row. 0 gives each group its own row; groups of a single row, such as records, fill rows as long as the
            longest.

    Raises:
        ValueError: `row_tokens` is negative.
    """

    row_tokens: int = 0

    def __post_init__(self) -> None:
        check_range("model.packing", "integer >= 0", row_tokens=self.row_tokens)

    def features(
        self,
        lm: PreTrainedModel,
        input_ids: Int[Tensor, "B T"],
        needed: Bool[Tensor, "B T"],
        group_index: Int[Tensor, " B"],
        experts: Int[Tensor, "B T n k"] | None = None,
    ) -> tuple[Float[Tensor, "N H"], PackedRows]:
        """Last hidden states at the `needed` positions, equal to `hidden[needed]` of an unpacked forward pass.

        Args:
            lm: the model.
            input_ids: unpacked rows.
            needed: positions of the returned hidden states.
            group_index: group of each row.
            experts: experts to replay in n routers; tokens with other experts are not shared.

        Returns:
            The hidden states of N positions, and the layout.

        Raises:
            ValueError: the input is longer than the model's attention window.
        """
        tokens = input_ids if experts is None else _with_experts(input_ids, experts)
        # one transfer, which waits for the device, and none back that does
        whole = torch.cat([tokens, needed.to(tokens.dtype), group_index[:, None]], 1).cpu()
        width = input_ids.shape[1]
        rows = self.layout(lm, whole[:, :width], needed=whole[:, width:-1].bool(), group_index=whole[:, -1].tolist())
        check_length(lm, int(rows.position.max()) + 1)
        rows = rows.to(input_ids.device)
        with Replaying(None if experts is None else experts.flatten(0, 1)[rows.source.flatten()]):
            hidden = body(lm)(
                input_ids=input_ids.flatten()[rows.source],
                position_ids=rows.position,
                attention_mask=attention_mask(lm, rows),
                use_cache=False,
            ).last_hidden_state
        return hidden.flatten(0, 1)[rows.target[needed]], rows

    def layout(
        self,
        lm: PreTrainedModel,
        input_ids: Int[Tensor, "B T"],
        needed: Bool[Tensor, "B T"],
        group_index: Sequence[int],
    ) -> PackedRows:
        """Layout for the model's attention: trees in one row if it is split at branches, else in several."""
        multiple = FLEX_BLOCK if lm.config._attn_implementation == "flex_attention" else 1
        groups = [group for group in group_index if group >= 0]
        is_of_records = len(set(groups)) == len(groups)  # with nothing to share, and rows to fill
        row_tokens = self.row_tokens or (input_ids.shape[1] if is_of_records else 0)
        rows = pack(input_ids, needed, group_index, row_tokens=row_tokens, multiple=multiple)
        if not can_split(lm) or not split_is_cheaper(lm, rows.spans, rows.until.shape):
            return rows
        return pack(input_ids, needed, group_index, row_tokens=None)


@dataclass(frozen=True)
class TreeCosts:
    """Estimates the cost of a pass over a micro-batch, on trees and on separate rows.

    Args:
        packing: of the policy.
        lm: its model.
    """

    packing: PrefixTreePacking
    lm: PreTrainedModel

    def of_trees(self, trees: Sequence[TreeWork]) -> float:
        """The cost of a micro-batch."""
        sizes = [tree.num_tokens for tree in trees]
        capacity = max([self.packing.row_tokens, *sizes])
        num_bins = -(-sum(sizes) // capacity) if self.packing.row_tokens else len(sizes)
        return trees_cost(self.lm, trees, (num_bins, capacity))

    @property
    def window(self) -> int:
        """Largest number of tokens of a row in a tree."""
        return context_length(self.lm)

    def of_rows(self, num_rows: int, length: int) -> float:
        """The cost of rows that are padded to a length."""
        return rows_cost(self.lm, num_rows, length)


@dataclass(frozen=True)
class SharedPromptPacking(PrefixTreePacking):
    """Former name of `PrefixTreePacking`."""


def _with_experts(input_ids: Int[Tensor, "B T"], experts: Int[Tensor, "B T n k"]) -> Int[Tensor, "B T"]:
    """Numbers that are equal where tokens and their recorded experts are."""
    both = torch.cat([input_ids[..., None], experts.flatten(2).to(input_ids.dtype)], -1)
    return both.flatten(0, 1).unique(dim=0, return_inverse=True)[1].view_as(input_ids)


def attention_mask(lm: PreTrainedModel, rows: PackedRows) -> Tensor | BlockMask:
    """Attention mask of packed rows: a token attends to its ancestors and itself, padding to itself.

    Raises:
        ValueError: the attention implementation does not take a mask.
    """
    until = rows.until
    implementation = lm.config._attn_implementation
    if implementation == "flex_attention":
        num_rows, length = until.shape
        return _block_mask_maker(until.device)(
            lambda b, h, q, k: (k <= q) & (q < until[b, k]), num_rows, None, length, length, device=str(until.device)
        )
    if implementation not in ("sdpa", "eager"):
        raise ValueError(
            f"model.packing needs model.attn_implementation sdpa, eager or flex_attention, got {implementation}"
        )
    if can_split(lm) and split_is_cheaper(lm, rows.spans, until.shape):
        return TreeMask.of(until, rows.spans)
    mask = tree_mask(until)
    if implementation == "sdpa":
        return mask
    lowest = torch.finfo(lm.dtype).min  # eager attention adds the mask to the scores
    return torch.zeros(mask.shape, dtype=lm.dtype, device=until.device).masked_fill_(~mask, lowest)


def _block_mask_maker(device: torch.device) -> Callable[..., BlockMask]:
    """`create_block_mask`, compiled except on a CPU: otherwise it makes R L^2 booleans first."""
    return create_block_mask if device.type == "cpu" else _compiled_block_mask()


@functools.cache
def _compiled_block_mask() -> Callable[..., BlockMask]:
    compiled: Callable[..., BlockMask] = torch.compile(create_block_mask)
    return compiled


def packing_for(lm: PreTrainedModel, packing: PrefixTreePacking) -> PrefixTreePacking | None:
    """The packing; None, after a warning, for a model that cannot be packed."""
    if not (reason := why_unpackable(lm)):
        return packing
    _warn_once(f"model.packing: {type(lm).__name__} {reason}; rows are computed separately")
    return None


def why_unpackable(lm: PreTrainedModel) -> str:
    """Reason why a model cannot be packed; empty if it can.

    Packed models mix tokens by attention with the given mask only, and take position ids.
    """
    if kinds := other_layers(lm):
        return f"has {kinds} layers, which take no mask"
    if lm.config.model_type == "gpt_neo":
        return "builds a mask of its own"
    if "position_ids" not in inspect.signature(body(lm).forward).parameters:
        return "takes no position_ids"
    return ""


@functools.cache
def _warn_once(message: str) -> None:
    """Warns once: policy and reference are of one model."""
    log.warning(message)


def check_length(lm: PreTrainedModel, length: int) -> None:
    """Checks that the longest row fits into the attention window.

    Raises:
        ValueError: it does not; sliding windows are not supported, because all layers share one mask.
    """
    window = context_length(lm)
    if length > window:
        raise ValueError(
            f"model.packing: a completion and its prompt have {length} tokens, but the model's "
            f"attention window has only {window} tokens"
        )
