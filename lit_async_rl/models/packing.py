"""Shared-prompt attention: the common prefix of a group is computed once.

A group is packed as prompt, completion 1, ..., completion G. A token attends to the prompt and its own completion;
positions restart at the prompt's end, so every token has the same output as in a row of its own (Periodic Asynchrony,
arXiv:2511.18871; the same layout as Prefix Grouper, arXiv:2506.05433). The first token of each completion is predicted
at the prompt's last position, whose gradient therefore sums over the completions.

For a prompt of P and completions of L_1 ... L_G tokens

    tokens            G P + sum L_i                    ->  P + sum L_i
    attention pairs   sum (P + L_i)(P + L_i + 1) / 2   ->  P (P + 1) / 2 + sum (P L_i + L_i (L_i + 1) / 2)

Here "prompt" is the longest common prefix of the rows of a group. Tokens that predict nothing (at least the last one of
each completion) are omitted. The input has B rows (completions) of T positions, the packed form R rows of L positions.
H is the hidden size.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import PreTrainedModel

from lit_async_rl.errors import InvariantError
from lit_async_rl.models.architecture import body, context_length, other_layers
from lit_async_rl.models.routers import Replaying
from lit_async_rl.utils.checks import check_range
from lit_async_rl.utils.device_memory import to_device

# -- Layout: positions of the tokens of completions in the packed rows ------------------------------------------------


FLEX_BLOCK = 128  # of FlexAttention's masks; lengths that are multiples of it are compiled for less often
_PADDING = -1  # branch of positions that hold no token


@dataclass(frozen=True, kw_only=True)
class PackedRows:
    """Layout of groups in packed rows.

    Attributes:
        source: index of each packed token in the flattened [B, T] input (0 for padding).
        position: position of the token in its input row.
        group: group within the packed row; groups do not attend to each other.
        branch: 0 is the shared prefix, then completions from 1 on; -1 is padding.
        target: index in the flattened [R, L] rows of each needed input position; 0 elsewhere.
    """

    source: Int[Tensor, "R L"]
    position: Int[Tensor, "R L"]
    group: Int[Tensor, "R L"]
    branch: Int[Tensor, "R L"]
    target: Int[Tensor, "B T"]

    @property
    def num_tokens(self) -> int:
        """Number of tokens without padding."""
        return int((self.branch != _PADDING).sum())

    def to(self, device: torch.device) -> PackedRows:
        """Copy on another device; does not wait for work that is queued there."""
        return PackedRows(**{name: to_device(value, device) for name, value in vars(self).items()})


@dataclass(frozen=True)
class _Segment:
    """Positions `begin` to `end` of input row `rows[0]`, computed once for all of `rows`."""

    rows: tuple[int, ...]
    begin: int
    end: int
    branch: int


def pack(
    input_ids: Int[Tensor, "B T"],
    needed: Bool[Tensor, "B T"],
    group_index: Sequence[int],
    row_tokens: int = 0,
    multiple: int = 1,
) -> PackedRows:
    """Packs the tokens that `needed` positions depend on, on the CPU; rows without needed positions are omitted.

    Args:
        input_ids: unpacked rows.
        needed: True at positions that predict a trained token.
        group_index: group of each row.
        row_tokens: capacity of a packed row, in tokens; longer groups have a row of their own.
        multiple: L is a multiple of it.
    """
    width = input_ids.shape[1]
    lengths = (needed * torch.arange(1, width + 1)).amax(-1).tolist()  # up to the last predicting position
    members: dict[int, list[int]] = {}
    for row, index in enumerate(group_index):
        if lengths[row]:
            members.setdefault(index, []).append(row)
    if not members:
        raise InvariantError("no position is needed, so there is nothing to pack")
    # lists, because there are many short segments, and a tensor operation on a short one costs as much as on a long one
    ids = input_ids.tolist()
    groups = [_segments(ids, rows, lengths) for rows in members.values()]
    sizes = [sum(segment.end - segment.begin for segment in group) for group in groups]
    bins = _first_fit(sizes, row_tokens)
    longest = max(sum(sizes[n] for n in numbers) for numbers in bins)
    length = -(-longest // multiple) * multiple
    fields: list[list[list[int]]] = [[], [], [], []]
    target = [[0] * width for _ in ids]
    for number, numbers in enumerate(bins):
        columns: tuple[list[int], ...] = [], [], [], []
        source, position, group_of, branch = columns
        for n in numbers:
            for segment in groups[n]:
                part = range(segment.begin, segment.end)
                place = number * length + len(source)
                first = segment.rows[0] * width
                for row in segment.rows:
                    target[row][segment.begin : segment.end] = range(place, place + len(part))
                source += range(first + segment.begin, first + segment.end)
                position += part
                group_of += [n] * len(part)
                branch += [segment.branch] * len(part)
        for field, values, padding in zip(fields, columns, (0, 0, 0, _PADDING), strict=True):
            field.append(values + [padding] * (length - len(values)))
    tensors = dict(zip(("source", "position", "group", "branch"), map(torch.tensor, fields), strict=True))
    return PackedRows(**tensors, target=torch.tensor(target))


def _segments(ids: Sequence[list[int]], rows: list[int], lengths: Sequence[int]) -> list[_Segment]:
    """Common prefix of the rows, then the remainder of each row."""
    columns = zip(*(ids[row][: lengths[row]] for row in rows), strict=False)  # ends with the shortest row
    shared = sum(1 for _ in takewhile(lambda tokens: len(set(tokens)) == 1, columns))
    tails = [_Segment((row,), shared, lengths[row], branch=branch) for branch, row in enumerate(rows, start=1)]
    return [_Segment(tuple(rows), 0, shared, branch=0), *tails]


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
class SharedPromptPacking:
    """Computes the shared prefix of each group once (setting `model.packing`).

    Log-probabilities and gradients are unchanged. It saves most with long prompts and whole groups
    (`data.keep_groups_whole`, set by `WeightSync`); prefixes are shared within a group only.

    With `attn_implementation: flex_attention` (for GPUs: forbidden blocks are skipped) the mask is a FlexAttention
    block mask, made by compiled code, and rows are padded to a multiple of 128 tokens. With `sdpa` or `eager` it is a
    dense one of R L^2 entries, for which one group in a row is best.

    Args:
        row_tokens: largest number of tokens in a packed row of several groups; a longer group has a row of its own. 0
            gives each group its own row.

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
            experts: experts to replay in n routers; the shared prefix takes those of the group's first row.

        Returns:
            The hidden states of N positions, and the layout.

        Raises:
            ValueError: the input is longer than the model's attention window.
        """
        # one transfer, which waits for the device, and none back that does
        whole = torch.cat([input_ids, needed.to(input_ids.dtype), group_index[:, None]], 1).cpu()
        width = input_ids.shape[1]
        rows = pack(
            whole[:, :width],
            whole[:, width:-1].bool(),
            whole[:, -1].tolist(),
            row_tokens=self.row_tokens,
            multiple=FLEX_BLOCK if lm.config._attn_implementation == "flex_attention" else 1,
        )
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


def group_cost(prompt: int, completions: Sequence[int], shared: bool) -> tuple[int, int]:
    """Tokens and attention pairs of one group by the module's formula, unpacked or with a shared prompt."""
    if shared:
        pairs = prompt * (prompt + 1) // 2 + sum(prompt * n + n * (n + 1) // 2 for n in completions)
        return prompt + sum(completions), pairs
    return sum(prompt + n for n in completions), sum((prompt + n) * (prompt + n + 1) // 2 for n in completions)


def attention_mask(lm: PreTrainedModel, rows: PackedRows) -> Tensor | BlockMask:
    """Attention mask of packed rows: causal, over the prefix and the token's completion.

    Padding attends to itself, because a softmax over an empty set is NaN.

    Raises:
        ValueError: the attention implementation does not take a mask.
    """
    group = rows.group
    branch = rows.branch
    position = rows.position

    def sees(row: Tensor, query: Tensor, key: Tensor) -> Tensor:
        own = branch[row, key] == branch[row, query]
        prefix = (branch[row, key] == 0) & (branch[row, query] > 0)
        before = position[row, key] <= position[row, query]
        real = branch[row, key] >= 0
        return ((group[row, key] == group[row, query]) & (own | prefix) & before & real) | (query == key)

    num_rows, length = rows.branch.shape
    implementation = lm.config._attn_implementation
    if implementation == "flex_attention":
        return _block_mask_maker(branch.device)(
            lambda b, h, q, k: sees(b, q, k), num_rows, None, length, length, device=str(branch.device)
        )
    if implementation not in ("sdpa", "eager"):
        raise ValueError(
            f"model.packing needs model.attn_implementation sdpa, eager or flex_attention, got {implementation}"
        )
    row = torch.arange(num_rows, device=branch.device)[:, None, None, None]
    query = torch.arange(length, device=branch.device)[:, None]
    key = torch.arange(length, device=branch.device)
    mask = sees(row, query, key)
    if implementation == "sdpa":
        return mask
    lowest = torch.finfo(lm.dtype).min  # eager attention adds the mask to the scores
    return torch.zeros(mask.shape, dtype=lm.dtype, device=branch.device).masked_fill_(~mask, lowest)


def _block_mask_maker(device: torch.device) -> Callable[..., BlockMask]:
    """`create_block_mask`, compiled where FlexAttention trains: otherwise it makes R L^2 booleans first."""
    return create_block_mask if device.type == "cpu" else _compiled_block_mask()


@functools.cache
def _compiled_block_mask() -> Callable[..., BlockMask]:
    compiled: Callable[..., BlockMask] = torch.compile(create_block_mask)
    return compiled


def check_packable(lm: PreTrainedModel) -> None:
    """Checks that the model mixes tokens by attention with the given mask only, and takes position ids.

    Raises:
        ValueError: it has recurrent or convolutional layers, a mask of its own, or takes no position ids.
    """
    if kinds := other_layers(lm):
        raise ValueError(
            f"model.packing: {type(lm).__name__} has {kinds} layers, which take no mask; leave packing out"
        )
    if lm.config.model_type == "gpt_neo":
        raise ValueError("model.packing: GPTNeoForCausalLM builds its own mask from positions in a row; leave packing out")
    if "position_ids" not in inspect.signature(body(lm).forward).parameters:
        raise ValueError(f"model.packing: {type(lm).__name__} takes no position_ids; leave packing out")


def check_length(lm: PreTrainedModel, length: int) -> None:
    """Checks that the longest prompt with completion fits into the attention window.

    Raises:
        ValueError: it does not; sliding windows are not supported, because all layers share one mask.
    """
    window = context_length(lm)
    if length > window:
        raise ValueError(
            f"model.packing: a completion and its prompt have {length} tokens, but the model's attention window is {window}"
        )
