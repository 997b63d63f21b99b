"""Attention over a prefix tree on a CPU, split at its branches: exactly the pairs of the tree, without a mask.

In depth-first order the descendants of a run of tokens follow it, so that each run takes two calls of torch's kernel:
its tokens to themselves (causal), and its descendants to it (every pair). The parts of a token's softmax are merged by
their normalisers: with o_p the output over a part p of its keys, and l_p the logarithm of that part's normaliser,

    l = log sum_p exp(l_p),    o = sum_p exp(l_p - l) o_p

In the backward pass every part is computed with the whole o and l, as in ring attention (arXiv:2310.01889): its
probabilities are then those of the whole softmax. Saved are query, key, value, o and l, as by one call.

R packed rows, h heads, L places, d numbers per head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from lit_async_rl.models.compilation import is_compiled

MAKE_A_MASK = frozenset({"doge", "falcon"})  # families that compute another mask from the given one
CALL_COST = 100_000  # of one call of the kernel, in numbers of a hidden state per pair of tokens: about 25 us


class Span(NamedTuple):
    """Tokens `begin` to `end` of a packed row, whose descendants are those from `end` to `until`."""

    row: int
    begin: int
    end: int
    until: int

    @property
    def num_pairs(self) -> int:
        """Number of pairs of a token of the span and one that attends to it."""
        size = self.end - self.begin
        return size * (size + 1) // 2 + size * (self.until - self.end)


class TreeWork(NamedTuple):
    """Work of a tree: tokens, pairs of a token and one that it attends to, calls of the kernel."""

    num_tokens: int
    num_pairs: int
    num_calls: int


def can_split(lm: PreTrainedModel) -> bool:
    """Whether attention can be split: torch's kernel on a CPU, with heads of one size and the given mask.

    Not in compiled blocks, which would be compiled again for each tree.
    """
    config = lm.config.get_text_config()
    is_plain = config.model_type not in MAKE_A_MASK and getattr(config, "kv_lora_rank", None) is None
    is_on_cpu = lm.device.type == "cpu" and not is_compiled(lm)
    return is_plain and lm.config._attn_implementation == "sdpa" and is_on_cpu


def split_is_cheaper(lm: PreTrainedModel, spans: Sequence[Span], shape: Sequence[int]) -> bool:
    """Whether a layer costs less with split attention than with a dense mask of R rows of L tokens.

    In pairs of tokens: a pair costs about 4 H operations, a token 24 H^2 outside of attention, with the hidden size H.
    Split trees are in one row, and without padding.
    """
    work = TreeWork(
        num_tokens=sum(span.end - span.begin for span in spans),
        num_pairs=sum(span.num_pairs for span in spans),
        num_calls=sum(1 + (span.until > span.end) for span in spans),
    )
    return _split_cost(lm, [work]) < _dense_cost(lm, shape)


def trees_cost(lm: PreTrainedModel, trees: Sequence[TreeWork], shape: Sequence[int]) -> float:
    """Estimated cost of a layer on trees in R rows of L tokens, see `split_is_cheaper`."""
    if lm.config._attn_implementation == "flex_attention":  # skips what the mask forbids, but for parts of blocks
        return _split_cost(lm, [tree._replace(num_calls=0) for tree in trees])
    dense = _dense_cost(lm, shape)
    return min(dense, _split_cost(lm, trees)) if can_split(lm) else dense


def rows_cost(lm: PreTrainedModel, num_rows: int, length: int) -> float:
    """Estimated cost of a layer on separate rows of one length; only `eager` computes pairs with later tokens."""
    pairs = length if lm.config._attn_implementation == "eager" else (length + 1) / 2
    return float(num_rows * length * (6 * _hidden(lm) + pairs))


def _split_cost(lm: PreTrainedModel, trees: Sequence[TreeWork]) -> float:
    hidden = _hidden(lm)
    costs = [6 * hidden * tree.num_tokens + tree.num_pairs + tree.num_calls * CALL_COST / hidden for tree in trees]
    return sum(costs, start=0.0)


def _dense_cost(lm: PreTrainedModel, shape: Sequence[int]) -> float:
    num_rows, length = shape
    return float(num_rows * length * (6 * _hidden(lm) + length))


def _hidden(lm: PreTrainedModel) -> int:
    size: int = lm.config.get_text_config().hidden_size
    return size


def tree_mask(until: Int[Tensor, "R L"]) -> Bool[Tensor, "R 1 L L"]:
    """True where a query (the last axis but one) attends to a key: to its ancestors and itself."""
    place = torch.arange(until.shape[1], device=until.device)
    query = place[:, None]
    return ((place <= query) & (query < until[:, None]))[:, None]


class TreeMask(Tensor):
    """Stands for the mask of a tree: `scaled_dot_product_attention` splits attention at branches instead.

    Every other function, as in a model that computes another mask from it, gets the dense mask, made on demand. Its own
    memory permits no attention, so that whatever reads it cannot take a wrong mask for a right one.
    """

    until: Int[Tensor, "R L"]
    spans: tuple[Span, ...]

    @staticmethod
    def of(until: Int[Tensor, "R L"], spans: tuple[Span, ...]) -> TreeMask:
        """The mask of trees, given by `until` and by their spans."""
        num_rows, length = until.shape
        tree = torch.zeros((), dtype=torch.bool).expand(num_rows, 1, length, length).as_subclass(TreeMask)
        tree.until = until
        tree.spans = spans
        return tree

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and _is_plain(*args, **kwargs):
            return _split(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            if func not in _OF_SHAPE:
                args, kwargs = tree_map_only(TreeMask, lambda mask: tree_mask(mask.until), (args, kwargs))
            return func(*args, **kwargs)


_OF_SHAPE = {getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "requires_grad")}


def _is_plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> bool:
    """Whether the kernel computes the call: no settings but mask and scale."""
    is_alike = query.shape == key.shape == value.shape and query.dtype == key.dtype == value.dtype
    is_local = type(query) is type(key) is type(value) is Tensor
    return isinstance(attn_mask, TreeMask) and is_alike and is_local and not (dropout_p or is_causal or enable_gqa)


def _split(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: TreeMask, scale: float | None = None, **off: Any
) -> Tensor:
    states: tuple[Tensor, ...] = query, key, value
    if torch.is_autocast_enabled("cpu"):  # as the undivided function
        states = tuple(state.to(torch.get_autocast_dtype("cpu")) for state in states)
    found: Tensor = _SplitAttention.apply(*states, attn_mask.spans, scale)  # type: ignore[no-untyped-call]
    return found


def _parts(span: Span) -> list[tuple[slice, bool]]:
    """Queries that attend to a span, and whether they are its own tokens (causal)."""
    own = slice(span.begin, span.end)
    return [(own, True)] + [(slice(span.end, span.until), False)] * (span.until > span.end)


class _SplitAttention(torch.autograd.Function):
    """Attention of each token to its ancestors and itself."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Float[Tensor, "R h L d"],
        key: Float[Tensor, "R h L d"],
        value: Float[Tensor, "R h L d"],
        spans: Sequence[Span],
        scale: float | None,
    ) -> Tensor:
        precise = torch.promote_types(query.dtype, torch.float32)
        total = torch.zeros_like(query, dtype=precise)
        normaliser = torch.full(query.shape[:-1], -torch.inf, dtype=precise)
        for span in spans:
            row = slice(span.row, span.row + 1)
            keys = row, slice(None), slice(span.begin, span.end)
            for places, is_causal in _parts(span):
                queries = row, slice(None), places
                part, log_part = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                    query[queries], key[keys], value[keys], 0.0, is_causal, scale=scale
                )
                merged = torch.logaddexp(normaliser[queries], log_part)
                total[queries] *= (normaliser[queries] - merged).exp_()[..., None]
                total[queries] += part * (log_part - merged).exp_()[..., None]
                normaliser[queries] = merged
        output = total.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, normaliser)
        ctx.spans = spans
        ctx.scale = scale
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        query, key, value, output, normaliser = ctx.saved_tensors
        precise = normaliser.dtype
        of_query, of_key, of_value = (torch.zeros_like(state, dtype=precise) for state in (query, key, value))
        for span in ctx.spans:
            row = slice(span.row, span.row + 1)
            keys = row, slice(None), slice(span.begin, span.end)
            for places, is_causal in _parts(span):
                queries = row, slice(None), places
                parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                    *(grad[queries], query[queries], key[keys], value[keys], output[queries], normaliser[queries]),
                    *(0.0, is_causal),
                    scale=ctx.scale,
                )
                of_query[queries] += parts[0]
                of_key[keys] += parts[1]
                of_value[keys] += parts[2]
        return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype), None, None
