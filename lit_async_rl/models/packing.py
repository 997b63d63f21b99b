"""Shared-prompt attention: what completions of one prompt have in common is computed once.

A group is packed as prompt, completion 1, ..., completion G. A token sees the prompt and its own completion; positions
restart at the prompt's end, so every token gets what it would get in a row of its own (Periodic Asynchrony,
arXiv:2511.18871; the same layout as Prefix Grouper, arXiv:2506.05433). The first token of each completion is predicted
at the prompt's last position, whose gradient therefore sums over the completions.

For a prompt of P and completions of L_1 ... L_G tokens

    tokens            G P + sum L_i                    ->  P + sum L_i
    attention pairs   sum (P + L_i)(P + L_i + 1) / 2   ->  P (P + 1) / 2 + sum (P L_i + L_i (L_i + 1) / 2)

Here "prompt" is the longest prefix that the rows of a group share; and tokens after which nothing is predicted are left
out, so at least one less for each completion. B rows (completions) of T positions go in; R packed rows of L positions
are computed. H is the hidden size.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import PreTrainedModel

from lit_async_rl.errors import InvariantError
from lit_async_rl.models.loading import context_length

_PADDING = -1  # branch of positions that hold no token


@dataclass(frozen=True, kw_only=True)
class PackedRows:
    """Groups in rows.

    Attributes:
        source: where in the flattened [B, T] input each packed token comes from (0 for padding).
        position: of the token in its own row of the input.
        group: which group of the packed row; two groups never see each other.
        branch: 0 is the shared prefix, then completions from 1 on; -1 is padding.
        target: for each input position that is needed, its place in the flattened [R, L] rows; 0 elsewhere.
    """

    source: Int[Tensor, "R L"]
    position: Int[Tensor, "R L"]
    group: Int[Tensor, "R L"]
    branch: Int[Tensor, "R L"]
    target: Int[Tensor, "B T"]

    @property
    def num_tokens(self) -> int:
        """Tokens without padding."""
        return int((self.branch != _PADDING).sum())

    def to(self, device: torch.device) -> PackedRows:
        """The same on another device."""
        return PackedRows(**{name: value.to(device) for name, value in vars(self).items()})


@dataclass(frozen=True)
class SharedPromptPacking:
    """Computes the shared prefix of a group once; to be named as `model.packing`.

    Log-probabilities and gradients stay what they are. It saves most where prompts are long and groups are whole
    (`data.keep_groups_whole`, which the command line sets); rows of other groups are not compared.

    With `attn_implementation: flex_attention` (for GPUs: forbidden blocks are skipped) the mask is a FlexAttention
    block mask, with `sdpa` or `eager` a dense one of R L^2 entries, for which one group in a row is best.

    Args:
        row_tokens: groups share a packed row up to this many tokens; a longer group has a row of its own. 0 puts each
            group in its own row.

    Raises:
        ValueError: `row_tokens` is negative.
    """

    row_tokens: int = 0

    def __post_init__(self) -> None:
        if self.row_tokens < 0:
            raise ValueError(f"model.packing.row_tokens must be >= 0 (0 is one group a row), got {self.row_tokens}")

    def features(
        self,
        lm: PreTrainedModel,
        input_ids: Int[Tensor, "B T"],
        needed: Bool[Tensor, "B T"],
        group_index: Int[Tensor, " B"],
    ) -> Float[Tensor, "N H"]:
        """Last hidden states where `needed`, in the order of `hidden[needed]`, which they equal.

        Raises:
            ValueError: the input is longer than the model's attention window.
        """
        rows = pack(input_ids.cpu(), needed.cpu(), group_index.tolist(), self.row_tokens).to(input_ids.device)
        check_length(lm, int(rows.position.max()) + 1)
        hidden = lm.base_model(
            input_ids=input_ids.flatten()[rows.source],
            position_ids=rows.position,
            attention_mask=attention_mask(lm, rows),
            use_cache=False,
        ).last_hidden_state
        return hidden.flatten(0, 1)[rows.target[needed]]


def group_cost(prompt: int, completions: Sequence[int], shared: bool) -> tuple[int, int]:
    """Tokens and attention pairs of one group by the formula above, each completion alone or with a shared prompt."""
    if shared:
        pairs = prompt * (prompt + 1) // 2 + sum(prompt * n + n * (n + 1) // 2 for n in completions)
        return prompt + sum(completions), pairs
    return sum(prompt + n for n in completions), sum((prompt + n) * (prompt + n + 1) // 2 for n in completions)


@dataclass(frozen=True)
class _Segment:
    """Positions `begin` to `end` of input row `rows[0]`, computed once for all of `rows`."""

    rows: tuple[int, ...]
    begin: int
    end: int
    branch: int


def pack(
    input_ids: Int[Tensor, "B T"], needed: Bool[Tensor, "B T"], group_index: Sequence[int], row_tokens: int = 0
) -> PackedRows:
    """Lays out what `needed` positions depend on, on the CPU; rows of input with nothing needed are left out."""
    width = input_ids.shape[1]
    lengths = (needed * torch.arange(1, width + 1)).amax(-1).tolist()  # up to the last position that predicts
    members: dict[int, list[int]] = {}
    for row, index in enumerate(group_index):
        if lengths[row]:
            members.setdefault(index, []).append(row)
    if not members:
        raise InvariantError("a pack without rows")
    # lists: there are many short segments, and each tensor operation costs as much as a long one
    ids = input_ids.tolist()
    groups = [_segments(ids, rows, lengths) for rows in members.values()]
    sizes = [sum(segment.end - segment.begin for segment in group) for group in groups]
    bins = _first_fit(sizes, row_tokens)
    length = max(sum(sizes[n] for n in numbers) for numbers in bins)
    fields: list[list[list[int]]] = [[], [], [], []]
    target = [[0] * width for _ in ids]
    for number, numbers in enumerate(bins):
        columns: tuple[list[int], ...] = [], [], [], []
        source, position, group_of, branch = columns
        for n in numbers:
            for segment in groups[n]:
                part = range(segment.begin, segment.end)
                place, first = number * length + len(source), segment.rows[0] * width
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
    """The prefix that all rows share, then what is left of each."""
    columns = zip(*(ids[row][: lengths[row]] for row in rows), strict=False)  # as many as the shortest has
    shared = sum(1 for _ in takewhile(lambda tokens: len(set(tokens)) == 1, columns))
    tails = [_Segment((row,), shared, lengths[row], branch) for branch, row in enumerate(rows, start=1)]
    return [_Segment(tuple(rows), 0, shared, 0), *tails]


def _first_fit(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Numbers of the sizes in bins of at most `capacity`, largest first; what is larger has a bin of its own."""
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


def attention_mask(lm: PreTrainedModel, rows: PackedRows) -> Tensor | BlockMask:
    """Which key a query sees: the prefix and the own completion, up to the own position.

    Padding sees itself, because a softmax over nothing is not a number.

    Raises:
        ValueError: the attention implementation takes no mask.
    """
    group, branch, position = rows.group, rows.branch, rows.position

    def sees(row: Tensor, query: Tensor, key: Tensor) -> Tensor:
        own = branch[row, key] == branch[row, query]
        prefix = (branch[row, key] == 0) & (branch[row, query] > 0)
        before = position[row, key] <= position[row, query]
        real = branch[row, key] >= 0
        return ((group[row, key] == group[row, query]) & (own | prefix) & before & real) | (query == key)

    (num_rows, length), implementation = rows.branch.shape, lm.config._attn_implementation
    if implementation == "flex_attention":
        device = str(branch.device)
        return create_block_mask(lambda b, h, q, k: sees(b, q, k), num_rows, None, length, length, device=device)
    if implementation not in ("sdpa", "eager"):
        raise ValueError(
            f"model.packing needs model.attn_implementation sdpa, eager or flex_attention, got {implementation}"
        )
    row = torch.arange(num_rows, device=branch.device)[:, None, None, None]
    query, key = torch.arange(length, device=branch.device)[:, None], torch.arange(length, device=branch.device)
    mask = sees(row, query, key)
    if implementation == "sdpa":
        return mask
    lowest = torch.finfo(lm.dtype).min  # eager attention adds the mask to the scores
    return torch.zeros(mask.shape, dtype=lm.dtype, device=branch.device).masked_fill_(~mask, lowest)


def check_packable(lm: PreTrainedModel) -> None:
    """Checks that a token's state depends on others by attention alone, and that positions can be given.

    Raises:
        ValueError: it does not (recurrent and convolutional layers), or they cannot.
    """
    kinds = set(getattr(lm.config.get_text_config(), "layer_types", None) or ())
    if lm._is_stateful or kinds - {"full_attention", "sliding_attention"}:
        raise ValueError(f"model.packing: {type(lm).__name__} has layers that are no plain attention; leave it out")
    if "position_ids" not in inspect.signature(lm.base_model.forward).parameters:
        raise ValueError(f"model.packing: {type(lm).__name__} takes no position_ids; leave it out")


def check_length(lm: PreTrainedModel, length: int) -> None:
    """Checks that no attention window is shorter than the longest completion with its prompt.

    Raises:
        ValueError: one is; one mask serves all layers.
    """
    window = context_length(lm)
    if length > window:
        raise ValueError(
            f"model.packing: a completion and its prompt have {length} tokens, the model's attention window is {window}"
        )
