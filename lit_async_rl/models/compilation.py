"""Transformer blocks compiled by `torch.compile`: fewer and larger kernels, in training only.

All blocks of a model run the same code, which is compiled once and not once for each: in seconds where the whole model
would take minutes. Numbers of rows and tokens are symbols in it, so that no other batch compiles it again. Embeddings,
head and losses stay as they are.

Wherever a model is read in another way than by training steps (the plain pass of a self-check, sampling in a
validation), its blocks run without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from lit_async_rl.models.architecture import is_transformer_block
from lit_async_rl.models.routers import routers_of


def compile_blocks(lm: PreTrainedModel) -> None:
    """Compiles the blocks in place, at their first forward pass; names of parameters stay.

    Raises:
        ValueError: the model has no blocks, or routers, whose choices are recorded and replayed.
    """
    blocks = list(_blocks(lm))
    reason = "" if blocks else "has no blocks that can be compiled"
    if routers_of(lm):
        reason = "has routed experts, whose number of tokens differs each time"
    if reason:
        raise ValueError(f"model.torch_compile must be False with {type(lm).__name__}, got True: it {reason}")
    for block in blocks:
        block.compile(dynamic=True)


def _blocks(lm: nn.Module) -> Iterator[nn.Module]:
    return filter(is_transformer_block, lm.modules())


def is_compiled(lm: nn.Module) -> bool:
    """Whether the blocks are compiled."""
    block: Any = next(_blocks(lm), None)
    return block is not None and block._compiled_call_impl is not None


def uncompiled(lm: nn.Module) -> AbstractContextManager[object]:
    """Context in which compiled blocks run as they were written; only in the thread that trains the model."""
    return torch.compiler.set_stance("force_eager") if is_compiled(lm) else nullcontext()
