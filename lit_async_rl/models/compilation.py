"""Transformer blocks compiled by `torch.compile`: fewer and larger kernels, where gradients are taken.

All blocks run the same code, compiled once: in seconds, where the whole model would take minutes. Numbers of rows and
tokens are symbols in it, so that no batch compiles it again. Embeddings, head and losses are not compiled, nor is what
runs without gradients (self-checks, validation, the reference), which would each be compiled apart.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from lit_async_rl.models.architecture import is_transformer_block

MAX_GRAPHS = 64  # torch's limit of eight is one of all blocks together, which run without compiled code beyond it
_EXPERTS = re.compile("moe|expert", re.IGNORECASE)  # in names of classes


def compile_blocks(lm: PreTrainedModel) -> None:
    """Compiles the blocks in place, at their first forward pass; parameters keep their names.

    Raises:
        ValueError: the model has no blocks, or experts to which tokens are routed.
    """
    blocks = list(_blocks(lm))
    reason = "" if blocks else "has no blocks that can be compiled"
    if any(_EXPERTS.search(type(module).__name__) for module in lm.modules()):
        reason = "has routed experts, whose number of tokens differs each time"
    if reason:
        raise ValueError(f"model.torch_compile must be False with {type(lm).__name__}, got True: it {reason}")
    limit = {"recompile_limit": MAX_GRAPHS} if "recompile_limit" in inspect.signature(torch.compile).parameters else {}
    torch._dynamo.config.optimize_ddp = False  # it would cut the blocks; gradients of one are sent while others compute
    for block in blocks:
        block.compile(dynamic=True, **limit)
        compiled: Any = block._compiled_call_impl
        block._compiled_call_impl = partial(_called, block._call_impl, compiled)


def _called(plain: Callable[..., Any], compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return (compiled if torch.is_grad_enabled() else plain)(*args, **kwargs)


def _blocks(lm: nn.Module) -> Iterator[nn.Module]:
    return filter(is_transformer_block, lm.modules())


def is_compiled(lm: nn.Module) -> bool:
    """Whether the blocks are compiled."""
    block: Any = next(_blocks(lm), None)
    return block is not None and block._compiled_call_impl is not None
